"""Why a plan was chosen, why others lost, and what would have to change for another answer. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import Found, Option
from topology.units import format_size, format_time

_LARGEST = 256.0
_STEP = 2**0.5
_CLEARLY = 1.01
"""Another plan is the answer where it is faster by more than this."""
SWITCH_DCS_MOST = 64
_WORDS = {
    "compute": "computes {} longer at its slowest DC",
    "codecs": "encodes and decodes {} longer",
    "tokens": "waits {} longer for tokens",
    "experts": "waits {} longer for expert weights",
    "gradients": "waits {} longer for returned gradients",
    "dense": "waits {} longer for dense gradients",
}


@dataclass(frozen=True, slots=True)
class Switch:
    """The first other plan on the way from `factor` 1, times `what` ("bandwidth" or "tokens")."""

    what: str
    factor: float
    name: str


def why_lost(option: Option, choice: Option) -> str:
    """One line on a runner-up."""
    if not option.fits:
        return f"its copies need {format_size(option.copy_bytes)} per worker, more than the budget"
    if option.step_s <= choice.step_s * (1 + 1e-9):
        more = option.copy_bytes - choice.copy_bytes
        return f"as fast, with {format_size(more)} more copies per worker" if more > 0 else "as fast"
    more_s = {part: seconds - choice.parts[part] for part, seconds in option.parts.items()}
    part = max(more_s, key=lambda name: more_s[name])
    return _WORDS[part].format(format_time(more_s[part]))


def reason(found: Found) -> str:
    """Why the choice is the choice."""
    choice = found.choice
    plain = next(option for option in found.named if option.name == "ep")
    rivals = [option for option in found.named if option.fits and option is not choice and option.name != choice.name]
    ahead = f"{choice.name}: {format_time(choice.step_s)} per step"
    if choice is plain or choice.copy_bytes == 0:
        if not rivals:
            return f"{ahead}; no copy is possible."
        rival = rivals[0]
        why = why_lost(rival, choice)
        return f"{ahead}; the best alternative, {rival.name}, takes {format_time(rival.step_s)}: {why}."
    saved = plain.parts["tokens"] - choice.parts["tokens"]
    cost = sum(choice.parts[part] - plain.parts[part] for part in ("experts", "gradients", "codecs"))
    text = (
        f"{ahead} against {format_time(plain.step_s)} for plain EP: copies save {format_time(max(saved, 0.0))} of "
        f"waiting for tokens and cost {format_time(max(cost, 0.0))} of waiting for weights and gradients."
    )
    too_big = [option for option in found.named if not option.fits and option.step_s < choice.step_s]
    if too_big:
        best = min(too_big, key=lambda option: option.step_s)
        text += f" {best.name} would take {format_time(best.step_s)}, but {why_lost(best, choice)}."
    return text


def switches(predictor: Predictor, found: Found) -> list[Switch]:
    """For more and less bandwidth, and more and fewer tokens: from where on another of the plans is faster.

    None are given for many DCs, where that takes long.
    """
    if not 1 < predictor.job.layout.dcs <= SWITCH_DCS_MOST:
        return []
    rivals = [option for option in found.named if option.fits and option.name != found.choice.name]
    if not rivals:
        return []
    changes: dict[str, Callable[[Job, float], Job]] = {"bandwidth": _bandwidth, "tokens": _tokens}
    ways = [(what, step) for what in changes for step in (1 / _STEP, _STEP)]
    met = (_first(predictor, found.choice, rivals, what, changes[what], step) for what, step in ways)
    return [switch for switch in met if switch is not None]


def _first(
    predictor: Predictor,
    choice: Option,
    rivals: list[Option],
    what: str,
    change: Callable[[Job, float], Job],
    step: float,
) -> Switch | None:
    def winner(factor: float) -> str | None:
        other = predictor.what_if(change(predictor.job, factor))
        times = _times(other, [choice, *rivals])
        best = int(np.argmin(times[1:]))
        return rivals[best].name if times[0] > times[1 + best] * _CLEARLY else None

    near, far = 1.0, step
    while winner(far) is None:
        near, far = far, far * step
        if not 1 / _LARGEST <= far <= _LARGEST:
            return None
    for _ in range(8):
        middle = (near * far) ** 0.5
        near, far = (middle, far) if winner(middle) is None else (near, middle)
    return Switch(what, far, winner(far) or "")


def _times(predictor: Predictor, options: list[Option]) -> list[float]:
    """Plans that spread work alike inside DCs are predicted together."""
    alike = [option.layers for option in options if option.canonical]
    together = iter(predictor.predict(alike).step_s.tolist() if alike else [])
    return [
        next(together) if option.canonical else float(predictor.predict([option.layers]).step_s[0])
        for option in options
    ]


def _bandwidth(job: Job, factor: float) -> Job:
    return Job(job.topology, job.work, job.routing, job.compute, job.bandwidth_factor * factor, job.drawn)


def _tokens(job: Job, factor: float) -> Job:
    work = replace(job.work, tokens_per_worker_per_step=job.work.tokens_per_worker_per_step * factor)
    return Job(job.topology, work, job.routing, job.compute, job.bandwidth_factor, job.drawn)
