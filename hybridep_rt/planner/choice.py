"""The search's answer as a Plan that the executor obeys, for `--plan auto`. Pure."""

from __future__ import annotations

from dataclasses import replace

from hybridep_rt.planner.auto import SAME
from hybridep_rt.planner.explain import reason, why_lost
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.plan import LayerPlan, Plan
from hybridep_rt.planner.plan_spec import make_layer, parse_plan_spec
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import Found, Option, search
from hybridep_rt.planner.site_plan import to_layer
from topology.units import format_time


def automatic(job: Job, *, epoch: int = 0, memory_budget_bytes: float | None = None) -> Plan:
    """The fastest plan, or one with fewer copies that is as fast as far as the model can tell (`SAME`).

    Deterministic on one machine; sums of other processors may differ in their last bits, so that one worker decides for
    all.
    """
    found = search(Predictor(job), memory_budget_bytes=memory_budget_bytes)
    chosen = settled(found)
    found = replace(found, choice=chosen)
    terms = tuple(
        f"{'->' if option is chosen else '  '} {option.name}: {format_time(option.step_s)} per step; "
        + ("chosen" if option is chosen else why_lost(option, chosen))
        for option in ([] if chosen in found.named else [chosen]) + list(found.named)
    )
    return Plan(epoch, job.layout, layer_plans(chosen, job), reason(found), terms)


def settled(found: Found) -> Option:
    """Of all options that are about as fast as the fastest, the one with fewest copies."""
    near = [o for o in (found.choice, *found.named) if o.fits and o.step_s <= found.choice.step_s * (1 + SAME)]
    return min(near, key=lambda option: option.copy_bytes)


def layer_plans(option: Option, job: Job) -> tuple[LayerPlan, ...]:
    """The executor's tables of an option; one that spreads work its own way inside DCs is made again by its name."""
    if option.canonical:
        made = {id(layer): to_layer(layer, job.layout) for layer in option.layers}
        return tuple(made[id(layer)] for layer in option.layers)
    spec = parse_plan_spec(option.name)
    return tuple(make_layer(spec, job.layout, shape.num_experts, job.topology.scaling) for shape in job.work.layers)
