"""Sweeps: one quantity of a scenario takes several values, and every plan is simulated at each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.makers import divisors
from hybridep_rt.simulate.scenario import CODECS, Result, Scenario, simulate
from topology.units import RATE

SWEEPS = ("bandwidth", "dcs", "domain", "p", "tokens", "codec")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One value of the quantity that is swept, as written, and the results of all plans there."""

    value: str
    results: tuple[Result, ...]


def sweep(
    scenario: Scenario,
    what: str,
    values: Sequence[str],
    plans: Sequence[str],
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> list[Point]:
    """`what`: one of SWEEPS; for "domain" and "p" the values make the plans. Raises PlanError for values that make no
    sense."""
    points = []
    for value in progress(values):
        changed, tried = _at(scenario, what, value, plans)
        points.append(Point(value, tuple(simulate(changed, plan) for plan in tried)))
    return points


def default_values(scenario: Scenario, what: str) -> list[str]:
    """Around the scenario's own."""
    if what == "bandwidth":
        return ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
    if what == "dcs":
        return [str(count) for count in (1, 2, 4, 8, 16, 64, 250, 1000) if count <= max(scenario.dcs, 1)]
    if what == "domain":
        return [str(size) for size in divisors(scenario.dcs)]
    if what == "p":
        return ["0", "0.25", "0.5", "0.75", "0.9", "1"]
    if what == "tokens":
        return [str(1 << power) for power in range(8, 19, 2)]
    return [codec.name for codec in CODECS]


def _at(scenario: Scenario, what: str, value: str, plans: Sequence[str]) -> tuple[Scenario, Sequence[str]]:
    try:
        if what == "bandwidth":
            return replace(scenario, bandwidth=RATE.parse(value)), plans
        if what == "dcs":
            return replace(scenario, dcs=int(value)), plans
        if what == "tokens":
            return replace(scenario, tokens=float(value)), plans
        if what == "codec":
            return replace(scenario, codec=next(codec for codec in CODECS if codec.name == value)), plans
    except (ValueError, StopIteration):
        raise PlanError(f"{what} can't be {value!r}; as in {', '.join(default_values(scenario, what))}") from None
    if what in ("domain", "p"):
        return scenario, [f"{'domains' if what == 'domain' else 'p'}:{value}"]
    raise PlanError(f"no sweep over {what!r}; allowed: {', '.join(SWEEPS)}")
