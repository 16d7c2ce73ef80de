"""Intervals cover what they should, and equal things are never called different."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.intervals import (
    Floor,
    Interval,
    compare,
    differs,
    floor_of,
    interleave,
    mean_difference,
    median_interval,
    ratio_interval,
    schedule,
    verdict,
)

times = st.floats(1e-6, 1e3)
samples = st.lists(times, min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("draw", "median"),
    [
        (lambda rng: rng.normal(10, 2, 40), 10.0),
        (lambda rng: rng.lognormal(0, 0.5, 40), 1.0),
        (lambda rng: rng.exponential(1, 40), math.log(2)),
    ],
)
def test_the_interval_of_a_median_covers_the_true_one(draw, median):
    rng = np.random.default_rng(5)
    found = [median_interval(draw(rng), seed=trial) for trial in range(200)]
    assert 0.90 <= np.mean([each.low <= median <= each.high for each in found]) <= 0.99


def test_the_interval_of_a_ratio_covers_the_true_one_though_the_machine_drifts():
    rng = np.random.default_rng(6)
    covered = []
    for trial in range(200):
        drift = np.exp(np.cumsum(rng.normal(0, 0.2, 40)))
        base, other = drift * rng.lognormal(0, 0.05, 40), 1.3 * drift * rng.lognormal(0, 0.05, 40)
        found = ratio_interval(base, other, seed=trial)
        covered.append(found.low <= 1.3 <= found.high)
        assert found.high - found.low < 0.2
    assert 0.90 <= np.mean(covered) <= 0.99


@pytest.mark.parametrize(("few", "more"), [(3, 3), (3, 8), (5, 5)])
def test_the_interval_of_a_difference_of_few_covers_the_true_one(few, more):
    rng = np.random.default_rng(7)
    found = [mean_difference(rng.normal(5, 3, few), rng.normal(3, 1, more)) for _ in range(500)]
    assert 0.92 <= np.mean([each.low <= 2 <= each.high for each in found]) <= 0.99


def test_a_difference_of_one_sample_has_no_bounds():
    assert mean_difference([2.0], [1.0, 1.5]) == Interval(0.75, -math.inf, math.inf)
    assert mean_difference([2.0, 2.0], [1.5, 1.5]) == Interval(0.5, 0.5, 0.5)


@given(samples)
@settings(max_examples=50)
def test_an_interval_lies_within_the_samples_and_is_repeatable(values):
    found = median_interval(values)
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert found == median_interval(values)


@given(samples, st.floats(0.01, 100))
@settings(max_examples=50)
def test_ratios_have_no_unit_and_a_known_factor_is_found(values, factor):
    found = ratio_interval(values, [value * factor for value in values])
    assert found.value == pytest.approx(factor)
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)


@given(st.floats(1, 3), st.floats(0.05, 20), st.floats(0, 0.5))
def test_only_what_lies_beyond_the_floor_is_a_difference(floor, value, width):
    ratio = Interval(value, value / (1 + width), value * (1 + width))
    inside = 1 / floor <= ratio.value <= floor
    if inside:
        assert not differs(ratio, Floor(floor))
        assert verdict(ratio, Floor(floor)) == "within the floor"
    elif ratio.low > floor:
        assert verdict(ratio, Floor(floor)) == "slower"
    elif ratio.high < 1 / floor:
        assert verdict(ratio, Floor(floor)) == "faster"
    else:
        assert verdict(ratio, Floor(floor)) == "within the floor"


def test_equal_things_stay_within_the_floor_they_gave():
    rng = np.random.default_rng(7)

    def again():
        return ratio_interval(rng.lognormal(0, 0.2, 40), rng.lognormal(0, 0.2, 40))

    floor = floor_of([again() for _ in range(4)])
    assert sum(differs(again(), floor) for _ in range(100)) == 0


def test_a_floor_takes_the_worse_direction():
    assert floor_of([Interval(1.0, 0.8, 1.1), Interval(1.0, 0.9, 1.2)]).ratio == pytest.approx(1.25)
    assert floor_of([Interval(1.0, 0.95, 1.2)]).ratio == pytest.approx(1.2)


@given(st.integers(0, 20), st.lists(st.text(max_size=3), min_size=1, max_size=4, unique=True), st.integers(0, 9))
def test_every_round_has_every_arm_once(rounds, arms, seed):
    order = schedule(rounds, arms, seed)
    assert order == schedule(rounds, arms, seed)
    assert all(Counter(each) == Counter(arms) for each in order)
    assert len(order) == rounds


def test_arms_take_turns_and_the_first_place_changes():
    log = []
    taken = interleave({name: lambda name=name: log.append(name) or len(log) for name in "AB"}, 20, warmup=2)
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert {"".join(pair) for pair in pairs} == {"AB", "BA"}
    assert [len(values) for values in taken.values()] == [20, 20]
    assert min(taken["A"] + taken["B"]) == 5


@pytest.mark.parametrize(("base", "other"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([math.nan], [1.0])])
def test_bad_samples_are_refused(base, other):
    with pytest.raises(ValueError, match=r"sample|above 0"):
        ratio_interval(base, other)


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="outside"):
        Interval(2.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        Floor(0.9)


def test_a_comparison_has_both_arms_and_their_ratio():
    found = compare("old", [1.0, 2.0, 3.0], "new", [2.0, 4.0, 6.0])
    assert (found.base_s.value, found.other_s.value, found.ratio.value, found.pairs) == (2.0, 4.0, 2.0, 3)
