"""One plan's step as intervals on lanes, the chain of intervals that makes it as long as it is, and its bottleneck.

A lane is a DC's compute stream ("a") or one class of traffic on a directed link ("a -> b").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridep_rt.planner.events import Outcome
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.site_plan import SitePlan

_SAME_S = 1e-9
"""Times this close (relative to the step) are one event: sums in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`source` == `target`: compute in that DC, else a transfer that has arrived at `arrival_s`."""

    stream: str
    kind: str
    layer: int
    source: int
    target: int
    start_s: float
    end_s: float
    arrival_s: float

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """`intervals` by start. `critical`: the longest chain, in order of time."""

    names: tuple[str, ...]
    intervals: tuple[Interval, ...]
    critical: tuple[Interval, ...]
    outcome: Outcome

    @property
    def step_s(self) -> float:
        """Length of the step."""
        return float(self.outcome.step_s[0])

    def parts(self) -> list[dict[str, float]]:
        """Seconds of each DC by name of `events.PARTS`, and "others": until the last DC is done as well."""
        found = []
        for dc in range(len(self.names)):
            split = {name: float(seconds[0, dc]) for name, seconds in self.outcome.parts.items()}
            found.append(split | {"others": self.step_s - float(self.outcome.end_s[0, dc])})
        return found

    def lane(self, interval: Interval) -> str:
        """Its name."""
        source, target = self.names[interval.source], self.names[interval.target]
        return source if interval.source == interval.target else f"{source} -> {target}"

    def critical_seconds(self) -> dict[str, float]:
        """Seconds of the critical chain by lane."""
        seconds: defaultdict[str, float] = defaultdict(float)
        ends = [*(interval.start_s for interval in self.critical[1:]), self.step_s]
        for interval, end_s in zip(self.critical, ends, strict=True):
            seconds[self.lane(interval)] += end_s - interval.start_s
        return dict(seconds)

    def bottleneck(self) -> str | None:
        """The link on which the critical chain spends most time; None where it never leaves a DC."""
        links = {lane: seconds for lane, seconds in self.critical_seconds().items() if " -> " in lane}
        return max(links, key=lambda lane: (links[lane], lane)) if links else None


def timeline(predictor: Predictor, plan: Sequence[SitePlan]) -> Timeline:
    """Play one plan through and keep every interval: for a few DCs, as links grow with their square."""
    found: list[Interval] = []

    def record(stream: str, kind: str, layer: int, start: Array, end: Array, arrival: Array) -> None:
        found.extend(_intervals(stream, kind, layer, start, end, arrival))

    outcome = predictor.predict([plan], record)
    intervals = tuple(sorted(found, key=lambda interval: (interval.start_s, interval.end_s, interval.source)))
    names = predictor.job.topology.dc_names
    return Timeline(names, intervals, _critical(intervals, float(outcome.step_s[0])), outcome)


def _intervals(stream: str, kind: str, layer: int, start: Array, end: Array, arrival: Array) -> list[Interval]:
    found = []
    for index in np.argwhere(np.isfinite(start) & (arrival > start)):
        at = tuple(index)
        source = target = int(at[0])
        name = "compute" if stream == "visitors" else stream
        if stream not in ("compute", "visitors"):
            target = (source - 1 - int(at[1])) % len(start)
        found.append(Interval(name, kind, layer, source, target, float(start[at]), float(end[at]), float(arrival[at])))
    return found


def _critical(intervals: Sequence[Interval], step_s: float) -> tuple[Interval, ...]:
    """From the last event back: what ended, where this interval starts, exactly when it starts?

    Experts and gradients queue behind tokens that they don't name; before them comes what the link carried last.
    """
    same = _SAME_S * max(step_s, 1e-6)
    at_dc: defaultdict[int, list[Interval]] = defaultdict(list)
    on_link: defaultdict[tuple[int, int], list[Interval]] = defaultdict(list)
    for interval in intervals:
        at_dc[interval.target].append(interval)
        if interval.source != interval.target:
            on_link[interval.source, interval.target].append(interval)
    chain: list[Interval] = []
    last = max(intervals, key=lambda interval: interval.arrival_s, default=None)
    while last is not None:
        chain.append(last)
        when, lane = last.start_s, (last.source, last.target)
        there = at_dc[last.source if last.source != last.target else last.target]
        before = [i for i in there if abs(i.arrival_s - when) <= same and i.start_s < when - same]
        before += [i for i in on_link[lane] if abs(i.end_s - when) <= same and i.start_s < when - same]
        if not before and when > same:
            before = [i for i in (*on_link[lane], *there) if i.end_s <= when and i.start_s < when - same]
            latest_s = max((i.end_s for i in before), default=0.0)
            before = [i for i in before if i.end_s >= latest_s - same]
        last = max(before, key=lambda i: (i.source == i.target, i.start_s, i.source, i.target), default=None)
    return tuple(reversed(chain))
