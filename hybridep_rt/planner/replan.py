"""Whether a running job should go over to another plan, by what was measured since it took up its own. Pure.

Candidates are the search's answer, and the plan in force or that answer with experts' places swapped between DCs
(`swaps`). A change costs the transfer of what moves, shared by the steps until the next look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hybridep_rt.planner.choice import layer_plans, settled
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.plan import LayerPlan, Layout
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import Routing
from hybridep_rt.planner.search import search
from topology.units import format_time

GAIN = 0.1
"""A plan has to be faster by this part of a step, what the change costs included, ..."""
IN_A_ROW = 2
"""... so many looks in a row: what was measured once may be noise."""
STATE_BYTES = 12.0
"""Of each parameter that changes homes: float32 weights and two moments."""
_IN_FORCE = "the plan in force"
_SWAPPED_DCS_MOST = 12
_ROUNDS_MOST = 4

Layers = tuple[LayerPlan, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The best plan found, what it is, its step, and the seconds of each step that pay for the change."""

    layers: Layers
    name: str
    current_s: float
    step_s: float
    change_s: float

    @property
    def gain(self) -> float:
        """Part of the present step that is saved."""
        return 1 - (self.step_s + self.change_s) / self.current_s if self.current_s > 0 else 0.0


class Judge:
    """Lets a change through that has paid in several looks in a row."""

    def __init__(self, gain: float = GAIN, in_a_row: int = IN_A_ROW) -> None:
        self._gain = gain
        self._in_a_row = in_a_row
        self._seen = 0

    def judge(self, proposal: Proposal) -> tuple[bool, str]:
        """Whether to change now, and why, in one line."""
        figures = (
            f"{format_time(proposal.step_s)} per step and {format_time(proposal.change_s)} for the change, "
            f"against {format_time(proposal.current_s)}"
        )
        if not proposal.gain > self._gain:
            self._seen = 0
            if proposal.name == _IN_FORCE:
                return (
                    False,
                    f"the plan stays: nothing better is known than its {format_time(proposal.step_s)} per step",
                )
            return False, f"the plan stays: {proposal.name} would take {figures}, which is not {self._gain:.0%} better"
        self._seen += 1
        if self._seen < self._in_a_row:
            return False, f"the plan stays for now: {proposal.name} would take {figures}"
        self._seen = 0
        return True, f"{proposal.name}: {figures}"


def propose(job: Job, current: Layers, steps: int, *, memory_budget_bytes: float | None = None) -> Proposal:
    """The best that is known for the next `steps` steps; it may be the plan in force."""
    predictor = Predictor(job)
    found = layer_plans(settled(search(predictor, memory_budget_bytes=memory_budget_bytes)), job)
    current_s = _step_s(predictor, current)
    ranked = [
        Proposal(layers, name, current_s, _step_s(predictor, layers), _change_s(job, current, layers) / steps)
        for name, layers in ((_IN_FORCE, current), ("the search's plan", found))
    ]
    best = min(ranked, key=_cost)
    if job.layout.dcs > _SWAPPED_DCS_MOST:
        return best
    for _ in range(_ROUNDS_MOST):
        near = [
            Proposal(
                layers,
                "experts' homes swapped",
                current_s,
                _step_s(predictor, layers),
                _change_s(job, current, layers) / steps,
            )
            for layers in _neighbours(job, best.layers)
        ]
        better = min(near, key=_cost, default=best)
        if not _cost(better) < _cost(best) * (1 - 1e-9):
            break
        best = better
    return best


def swaps(layer: LayerPlan, routing: Routing, layout: Layout) -> Iterator[LayerPlan]:
    """The layer with experts of any two DCs in each other's places: those that gain most, the first 1, 2, 4, ...

    An expert gains by as much as the other DC's tokens choose it more often than the DC's own.
    """
    chosen = np.array([np.bincount(routing.of(dc).ravel(), minlength=layer.num_experts) for dc in range(layout.dcs)])
    home = np.array([layout.locate(worker)[0] for worker in layer.home])
    for a, b in combinations(range(layout.dcs), 2):
        wanted = chosen[b] - chosen[a]
        from_a = sorted(np.flatnonzero(home == a).tolist(), key=lambda e: (-wanted[e], e))
        from_b = sorted(np.flatnonzero(home == b).tolist(), key=lambda e: (wanted[e], e))
        pairs = [(x, y) for x, y in zip(from_a, from_b, strict=False) if wanted[x] > wanted[y]]
        for count in sorted({*(1 << power for power in range(len(pairs).bit_length())), len(pairs)} - {0}):
            yield _swapped(layer, pairs[:count])


def _swapped(layer: LayerPlan, pairs: Sequence[tuple[int, int]]) -> LayerPlan:
    place = list(range(layer.num_experts))
    for x, y in pairs:
        place[x], place[y] = y, x

    def moved(row: Sequence[int]) -> tuple[int, ...]:
        return tuple(row[at] for at in place)

    return LayerPlan(
        home=moved(layer.home),
        holders=tuple(layer.holders[at] for at in place),
        route=tuple(map(moved, layer.route)),
        serve=tuple(map(moved, layer.serve)),
    )


def _neighbours(job: Job, layers: Layers) -> Iterator[Layers]:
    for number, layer in enumerate(layers):
        for changed in swaps(layer, job.routing_of(number), job.layout):
            yield (*layers[:number], changed, *layers[number + 1 :])


def _step_s(predictor: Predictor, layers: Layers) -> float:
    return float(predictor.predict([predictor.site_plans(layers)]).step_s[0])


def _change_s(job: Job, old: Layers, new: Layers) -> float:
    """Until what moves has passed the busiest link: experts with their state, and the weights of new copies."""
    sent: Array = np.zeros((job.layout.dcs, job.layout.dcs))
    for before, after, shape in zip(old, new, job.work.layers, strict=True):
        for expert in range(before.num_experts):
            source, to = (job.layout.locate(plan.home[expert])[0] for plan in (before, after))
            sent[source, to] += STATE_BYTES * shape.parameters_per_expert * (before.home[expert] != after.home[expert])
            had, have = ({job.layout.locate(w)[0] for w in plan.holders[expert]} for plan in (before, after))
            for dc in have - had:
                sent[to, dc] += 4.0 * shape.parameters_per_expert
    np.fill_diagonal(sent, 0.0)
    return float(job.network.wire_s(sent).max())


def _cost(proposal: Proposal) -> float:
    return proposal.step_s + proposal.change_s
