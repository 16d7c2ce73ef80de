"""A step as it was predicted against as it was measured, component by component. Pure.

Components: "compute" (with codecs, and whatever else a worker does itself), and waits for "tokens", "experts",
"gradients" and "dense" sums. The measured ones are one worker's: waits that it had, and the rest of its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridep_rt.planner.events import Outcome
from topology.units import format_time

COMPONENTS = ("compute", "tokens", "experts", "gradients", "dense")
TOLERANCE = 0.2
"""Predictions that are off by more are warned about."""
MATTERS = 0.05
"""Differences below this share of the measured step are not."""
_FIRST_STEPS = 8
_MOST_STEPS = 512
_TOKENS = ("dispatch", "combine", "combine-gradient", "dispatch-gradient")

Seconds = dict[str, float]


def predicted_parts(outcome: Outcome, dc: int) -> Seconds:
    """One DC's step of the outcome's first plan; what the last DC needs longer is waited for with the dense sums."""
    parts = {name: float(seconds[0, dc]) for name, seconds in outcome.parts.items()}
    parts["compute"] += parts.pop("codecs")
    parts["dense"] += float(outcome.step_s[0] - outcome.end_s[0, dc])
    return parts


def measured_parts(step_s: float, waited_s: Mapping[tuple[int, int, str], float]) -> Seconds:
    """`waited_s`: (layer, DC, channel) -> seconds of the step, as `metrics` has them."""
    parts = dict.fromkeys(COMPONENTS, 0.0)
    for (layer, _, channel), seconds in waited_s.items():
        name, _, _ = channel.partition("/")
        if name in _TOKENS:
            parts["tokens"] += seconds
        elif name in ("experts", "gradients"):
            parts[name] += seconds
        elif layer < 0 and name != "user":
            parts["dense"] += seconds
    parts["compute"] = max(0.0, step_s - sum(parts.values()))
    return parts


def deviations(predicted: Seconds, measured: Seconds) -> list[str]:
    """One line for each component that is off by more than `TOLERANCE` of what was predicted, largest first.

    Both figures are named. What matters less than `MATTERS` of the step is left out.
    """
    step_s = sum(measured.values())
    off = {name: measured[name] - predicted[name] for name in COMPONENTS}
    named = [n for n in COMPONENTS if abs(off[n]) > max(TOLERANCE * predicted[n], MATTERS * step_s)]
    return [
        f"{name}: {format_time(measured[name])} per step where {format_time(predicted[name])} was predicted"
        for name in sorted(named, key=lambda name: -abs(off[name]))
    ]


def described(predicted: Seconds, measured: Seconds) -> str:
    """All components, for people."""
    each = (f"{name} {format_time(measured[name])} ({format_time(predicted[name])})" for name in COMPONENTS)
    totals = (format_time(sum(parts.values())) for parts in (measured, predicted))
    return "step {} ({} predicted): ".format(*totals) + ", ".join(each)


@dataclass(slots=True)
class StepWatch:
    """When to compare: after 8 steps, then after twice as many, up to every 512. Time is an argument."""

    predicted: Seconds
    _began_s: float | None = None
    _steps: int = 0
    _wanted: int = _FIRST_STEPS
    _waited_s: dict[tuple[int, int, str], float] = field(default_factory=dict)

    def stepped(self, now_s: float, waited_s: Mapping[tuple[int, int, str], float]) -> Seconds | None:
        """An optimizer step ended; `waited_s` are all waits so far. The measured components per step, when due.

        The first step, which warms up, only starts the clock.
        """
        if self._began_s is None:
            self._restart(now_s, waited_s)
            return None
        self._steps += 1
        if self._steps < self._wanted:
            return None
        count = self._steps
        each = {key: (seconds - self._waited_s.get(key, 0.0)) / count for key, seconds in waited_s.items()}
        found = measured_parts((now_s - self._began_s) / count, each)
        self._wanted = min(2 * self._wanted, _MOST_STEPS)
        self._restart(now_s, waited_s)
        return found

    def _restart(self, now_s: float, waited_s: Mapping[tuple[int, int, str], float]) -> None:
        self._began_s, self._steps, self._waited_s = now_s, 0, dict(waited_s)
