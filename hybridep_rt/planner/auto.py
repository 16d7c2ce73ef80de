"""`--plan auto`: prices every feasible tuple of domain sizes and takes the cheapest in time. It can be plain EP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.economics import Cost, Workload, price
from hybridep_rt.planner.makers import domains
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_file import from_file
from hybridep_rt.planner.plan_spec import Maker, PlanSpec, make_layer
from topology.domains import allowed_sizes
from topology.location import Tree
from topology.model import Topology
from topology.units import format_size, format_time

MOST_TOKENS = 1 << 50
SAME = 0.03
"""Times closer than this share count as equal, as the model is no finer; then the plan with fewer copies is better."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tuple of domain sizes, what it costs, and whether its copies fit the memory budget."""

    sizes: tuple[int, ...]
    name: str
    cost: Cost
    fits: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The cheapest candidate that fits, all candidates (plain EP first), and why.

    `break_even_tokens`: per worker and step, below which no expert should cross the WAN, so that plain EP (between DCs)
    is the answer; None where no number of tokens makes crossing experts cheaper.
    """

    candidates: tuple[Candidate, ...]
    choice: Candidate
    reason: str
    break_even_tokens: float | None

    def terms(self) -> tuple[str, ...]:
        """One line per candidate: what it costs per step, and where."""
        return tuple(
            f"{'->' if candidate is self.choice else '  '} {candidate.name}: {candidate.cost.describe()}"
            + ("" if candidate.fits else "; its copies don't fit the memory budget")
            for candidate in self.candidates
        )


def decide(topology: Topology, work: Workload, *, memory_budget_bytes: float | None = None) -> Decision:
    """Price plain EP, every domain size and full replication.

    `memory_budget_bytes`: for the copies of one worker; None doesn't limit them. Raises PlanError for a negative one.
    """
    if memory_budget_bytes is not None and not memory_budget_bytes >= 0:
        raise PlanError(f"the memory budget must be bytes from 0, not {memory_budget_bytes}")
    candidates = tuple(_candidate(sizes, topology, work, memory_budget_bytes) for sizes in all_sizes(topology))
    fitting = [candidate for candidate in candidates if candidate.fits]
    fastest_s = min(candidate.cost.total_s for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.cost.total_s <= fastest_s * (1 + SAME)]
    choice = min(near, key=lambda candidate: candidate.cost.copy_bytes_per_worker)
    break_even = _break_even(fitting)
    return Decision(candidates, choice, _reason(candidates, choice, break_even), break_even)


def make_plan(
    spec: PlanSpec,
    topology: Topology,
    work: Workload,
    *,
    epoch: int = 0,
    memory_budget_bytes: float | None = None,
) -> Plan:
    """The plan that a spec names, for the layers of `work`. Raises PlanError where it doesn't fit them."""
    layout = Layout(topology.workers_per_dc)
    if spec.maker is Maker.FILE:
        return _matching(from_file(spec.path, layout), work)
    reason, terms = f"{spec}, as asked for", tuple[str, ...]()
    if spec.maker is Maker.AUTO:
        decision = decide(topology, work, memory_budget_bytes=memory_budget_bytes)
        spec, reason, terms = PlanSpec(Maker.DOMAINS, decision.choice.sizes), decision.reason, decision.terms()
    made = {count: make_layer(spec, layout, count, topology.scaling) for count in _expert_counts(work)}
    return Plan(epoch, layout, tuple(made[shape.num_experts] for shape in work.layers), reason, terms)


def _matching(plan: Plan, work: Workload) -> Plan:
    found = [layer.num_experts for layer in plan.layers]
    needed = [shape.num_experts for shape in work.layers]
    if found != needed:
        raise PlanError(f"the plan file is for layers of {found} experts, the model has {needed}")
    return plan


def _expert_counts(work: Workload) -> set[int]:
    return {shape.num_experts for shape in work.layers}


def all_sizes(topology: Topology) -> list[tuple[int, ...]]:
    """Every feasible tuple of domain sizes, plain EP first."""
    tree = Tree.of(topology)
    levels = range(tree.depth if tree.scaling is not None else 1)
    return list(product(*(allowed_sizes(tree, level) for level in levels)))


def _candidate(sizes: tuple[int, ...], topology: Topology, work: Workload, budget_bytes: float | None) -> Candidate:
    layout = Layout(topology.workers_per_dc)
    layers = {count: domains(layout, count, sizes, topology.scaling) for count in _expert_counts(work)}
    cost = price((layers[shape.num_experts] for shape in work.layers), topology, work)
    fits = budget_bytes is None or cost.copy_bytes_per_worker <= budget_bytes
    return Candidate(sizes, size_name(sizes, topology), cost, fits)


def size_name(sizes: tuple[int, ...], topology: Topology) -> str:
    """How a person asks for them."""
    if set(sizes) == {1}:
        return Maker.EP.value
    if sizes == topology.scaling:
        return Maker.REPLICATE.value
    named = max(level for level, size in enumerate(sizes) if size > 1) + 1
    return str(PlanSpec(Maker.DOMAINS, sizes[:named]))


def _break_even(candidates: list[Candidate]) -> float | None:
    """Tokens per worker at which the first candidate with S_0 > 1 beats all with S_0 = 1, by bisection."""
    staying = [candidate.cost for candidate in candidates if candidate.sizes[0] == 1]
    crossing = [candidate.cost for candidate in candidates if candidate.sizes[0] > 1]
    if not crossing:
        return None

    def beaten(tokens: float) -> bool:
        best_s = min(cost.total_at(tokens) for cost in staying)
        return best_s > min(cost.total_at(tokens) for cost in crossing) * (1 + SAME)

    return _first_true(beaten)


def _first_true(condition: Callable[[float], bool]) -> float | None:
    """The least number from which the condition holds, to 1 part in 10^6; it fails below and holds above."""
    if condition(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not condition(high):
        low, high = high, high * 2
        if high > MOST_TOKENS:
            return None
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


def _reason(candidates: tuple[Candidate, ...], choice: Candidate, break_even: float | None) -> str:
    plain = candidates[0]
    parts = [_comparison(candidates, choice), _threshold(plain, break_even)]
    too_big = [c for c in candidates if not c.fits and c.cost.total_s < choice.cost.total_s]
    if too_big:
        best = min(too_big, key=lambda candidate: candidate.cost.total_s)
        needs = format_size(best.cost.copy_bytes_per_worker)
        parts.append(f"{best.name} would take {format_time(best.cost.total_s)}, but needs {needs} per worker.")
    return " ".join(part for part in parts if part)


def _comparison(candidates: tuple[Candidate, ...], choice: Candidate) -> str:
    plain = candidates[0]
    if choice is not plain:
        return (
            f"{choice.name}: {format_time(choice.cost.total_s)} per step against {format_time(plain.cost.total_s)} "
            f"for plain EP, as copies save more token traffic than their weights and gradients cost."
        )
    rivals = [candidate for candidate in candidates[1:] if candidate.fits]
    if not rivals:
        return "ep: no copy is possible here."
    rival = min(rivals, key=lambda candidate: candidate.cost.total_s)
    return (
        f"ep: {format_time(plain.cost.total_s)} per step; the best alternative, {rival.name}, takes "
        f"{format_time(rival.cost.total_s)}, as its copies save less than they cost."
    )


def _threshold(plain: Candidate, break_even: float | None) -> str:
    if break_even is None:
        return "No number of tokens makes it worthwhile to send experts over the WAN."
    if break_even == 0:
        return "Plain EP would lose at any number of tokens."
    return (
        f"Below about {break_even:,.0f} tokens per worker and step no expert should cross the WAN (plain EP); "
        f"this step has {plain.cost.tokens_per_worker:,.0f}."
    )
