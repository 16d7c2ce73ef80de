"""The paper's model over any number of levels: every tuple of domain sizes is tried, the slowest DC decides.

Level l has SF_l workers; one of them holds the tokens and experts of all GPUs below it. Experts that came in at outer
levels are shared on at inner ones. With S_l the domain size, p_l = (SF_l - S_l)/(SF_l - 1), and per MoE layer
    A2A_l = p_l D_l (SF_l-1)/SF_l / B_l        AG_l = (S_l-1) P_l prod(S_j, j<l) / B_l
    Lat_all = max(Lat_PE, sum AG_l) + 2 sum A2A_l
At one level this is `paper.layer_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.makers import divisors
from hybridep_rt.planner.paper import PaperLayer, a2a_bytes, ag_bytes, p_of_size


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """One tuple of domain sizes: what a layer takes, and of it the parts of the paper's formula."""

    sizes: tuple[int, ...]
    layer_s: float
    all_gather_s: float
    all_to_all_s: float


def paper_plans(job: Job, layer: int = 0) -> list[PaperPlan]:
    """Every tuple of domain sizes, fastest first; of equally fast ones the larger sizes."""
    levels = paper_layers(job, layer)
    found = [_plan(levels, sizes) for sizes in product(*(divisors(level.workers) for level in levels))]
    return sorted(found, key=lambda plan: (plan.layer_s, [-size for size in plan.sizes]))


def paper_layers(job: Job, layer: int = 0) -> list[PaperLayer]:
    """D, P_E, G and B of each level: of the DCs, then inside them. Unequal links count as the slowest DC's.

    The paper sends a token once per chosen expert, k times, and has no gradient return.
    """
    shape, work = job.work.layers[layer], job.work
    scaling = job.topology.scaling or (job.layout.dcs,)
    dcs = job.layout.dcs
    workers = job.layout.workers if job.topology.scaling is None else prod(scaling)
    each_token = shape.hidden * work.token_bytes * shape.top_k
    tokens = work.tokens_per_worker_per_step * each_token
    experts = shape.num_experts / workers * shape.parameters_per_expert * work.weight_bytes
    rates = [_slowest_uplink(job), *(level.link.bandwidth_bytes_per_s for level in (job.topology.levels or ())[1:])]
    pre_expert_s = float(job.pre_expert_s.max()) * work.micro_batches
    found, below = [], max(job.layout.workers_per_dc)
    for count, rate in zip(scaling, rates, strict=True):
        found.append(PaperLayer(tokens * below, experts * below, count, rate, pre_expert_s))
        below = below // scaling[len(found)] if len(found) < len(scaling) else below
    assert found[0].workers == dcs
    return found


def _plan(levels: list[PaperLayer], sizes: tuple[int, ...]) -> PaperPlan:
    shares = [p_of_size(size, level.workers) for size, level in zip(sizes, levels, strict=True)]
    gathered = [prod(sizes[:number]) for number in range(len(sizes))]
    all_gather_s = sum(
        ag_bytes(level, p) * more / level.bandwidth_bytes_per_s
        for level, p, more in zip(levels, shares, gathered, strict=True)
        if level.workers > 1
    )
    all_to_all_s = sum(
        a2a_bytes(level, p) / level.bandwidth_bytes_per_s for level, p in zip(levels, shares, strict=True)
    )
    return PaperPlan(sizes, max(levels[0].pre_expert_s, all_gather_s) + 2 * all_to_all_s, all_gather_s, all_to_all_s)


def _slowest_uplink(job: Job) -> float:
    """What the slowest DC can send to all others at once, its links together bounded by its uplink."""
    network = job.network
    if network.dcs == 1:
        return float("inf")
    links = [network.bandwidth[dc][[other for other in range(network.dcs) if other != dc]] for dc in range(network.dcs)]
    slowest = [min(float(rates.sum()), network.uplink[dc], network.downlink[dc]) for dc, rates in enumerate(links)]
    return float(min(slowest))
