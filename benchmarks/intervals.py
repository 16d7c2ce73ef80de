"""Statistics of timings: medians and ratios with bootstrap intervals, and when a difference is one. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000

Measure = TypeVar("Measure")
Samples = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} lies outside {self.low} .. {self.high}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired timings of two arms: sample i of both was taken right after one another. `ratio` is other / base."""

    base: str
    other: str
    base_s: Interval
    other_s: Interval
    ratio: Interval
    pairs: int


@dataclass(frozen=True, slots=True)
class Floor:
    """The ratio, at least 1, that two equal things can show on a machine. Ratios in 1/ratio .. ratio mean nothing."""

    ratio: float

    def __post_init__(self) -> None:
        if not self.ratio >= 1:
            raise ValueError(f"a noise floor is a ratio of at least 1, not {self.ratio}")


def median_interval(samples: Samples, *, seed: int = 0) -> Interval:
    """The median and its percentile bootstrap interval. Raises ValueError for no samples or one that isn't finite."""
    values = _checked(samples)
    medians = np.median(values[_draws(len(values), seed)], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    middle = float(np.median(values))
    # Rounding in the quantiles' interpolation may pass the median of equal values by one unit in the last place.
    return Interval(middle, min(float(low), middle), max(float(high), middle))


def ratio_interval(base: Samples, other: Samples, *, seed: int = 0) -> Interval:
    """The median of other[i] / base[i]; pairs are resampled together, so that slow drift of the machine cancels.

    Raises ValueError for unequal numbers of samples and for times that aren't above 0.
    """
    if len(base) != len(other):
        raise ValueError(f"pairs need as many samples of one arm as of the other, not {len(base)} and {len(other)}")
    below, above = _checked(base), _checked(other)
    if min(below.min(), above.min()) <= 0:
        raise ValueError("a time must be above 0")
    return median_interval(above / below, seed=seed)


def compare(base: str, base_s: Samples, other: str, other_s: Samples, *, seed: int = 0) -> Comparison:
    """Compare two arms of one interleaved run. Raises ValueError as `ratio_interval`."""
    return Comparison(
        base,
        other,
        median_interval(base_s, seed=seed),
        median_interval(other_s, seed=seed),
        ratio_interval(base_s, other_s, seed=seed),
        len(base_s),
    )


def mean_difference(samples: Samples, reference: Samples) -> Interval:
    """The difference of two means and its interval (Welch's t), for few samples that weren't taken in pairs.

    Unbounded where one of the two has a single sample. Raises ValueError as `median_interval`.
    """
    one, other = _checked(samples), _checked(reference)
    difference = float(one.mean() - other.mean())
    if min(len(one), len(other)) < 2:
        return Interval(difference, -math.inf, math.inf)
    if one.var() == other.var() == 0:
        return Interval(difference, difference, difference)
    low, high = stats.ttest_ind(one, other, equal_var=False).confidence_interval(CONFIDENCE)
    return Interval(difference, float(low), float(high))


def floor_of(ratios: Sequence[Interval]) -> Floor:
    """The floor under A/A runs: their intervals' end that is farthest from 1, in either direction."""
    return Floor(max(max(ratio.high, 1 / ratio.low) for ratio in ratios))


def differs(ratio: Interval, floor: Floor) -> bool:
    """Whether a ratio says anything: its whole interval lies beyond the floor."""
    return ratio.low > floor.ratio or ratio.high < 1 / floor.ratio


def verdict(ratio: Interval, floor: Floor) -> str:
    """What may be said about `other` against `base`, in words."""
    if not differs(ratio, floor):
        return "within the floor"
    return "slower" if ratio.value > 1 else "faster"


def schedule(rounds: int, arms: Sequence[str], seed: int = 0) -> list[list[str]]:
    """Each round has every arm once, in a random order that is the same in every process."""
    generator = random.Random(seed)
    return [generator.sample(list(arms), len(arms)) for _ in range(rounds)]


def interleave(
    arms: Mapping[str, Callable[[], Measure]], rounds: int, *, warmup: int = 0, seed: int = 0
) -> dict[str, list[Measure]]:
    """Run every arm once per round, in random order; its answers by arm, in the order of rounds, without the warm-up.

    An arm returns its own measure, so that what surrounds it (barriers, new batches) stays out.
    """
    taken: dict[str, list[Measure]] = {name: [] for name in arms}
    for order in schedule(warmup + rounds, list(arms), seed):
        for name in order:
            taken[name].append(arms[name]())
    return {name: values[warmup:] for name, values in taken.items()}


def _checked(samples: Samples) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError("statistics need at least one sample, and finite ones")
    return values


def _draws(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
