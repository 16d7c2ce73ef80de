"""Any number of DCs, alike or drawn, and one training step on them by the planner's model. Pure.

DCs and workers count as in `planner`. Compute is drawn from nothing: all workers are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridep_rt.errors import PlanError
from hybridep_rt.planner import routing
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.events import Outcome
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.site_plan import (
    SitePlan,
    Spread,
    canonical_spread,
    consecutive,
    domain,
    plain,
    site_plan,
)
from hybridep_rt.simulate.fair import FairNetwork
from topology.model import Datacenter, Host, Level, Link, LinkTable, Topology

DP_BYTES = 2.0
"""Of a gradient element in an all-reduce of bfloat16."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Bytes on the wire: per token element, and per expert parameter of weights and gradients."""

    name: str
    token_bytes: float
    weight_bytes: float
    gradient_bytes: float


CODECS = (
    Codec("raw", 2.0, 2.0, 2.0),
    Codec("1.11", 2.0, 0.555, 0.555),
    Codec("0.61", 1.0, 0.305, 0.305),
    Codec("0.345", 2.0, 0.1725, 0.1725),
)


IDLE = Compute()
"""Compute that takes no time."""


@dataclass(frozen=True)
class Scenario:
    """`rate_spread`, `rtt_spread`: sigma of log-normal factors, one for each DC's uplink, downlink and link, and RTT.

    `bandwidth`: of a DC's uplink, its downlink and each link, bytes/s. `zipf`: exponent of experts' popularity, 0 is
    uniform. `tokens`: per worker and step. Raises PlanError for a scenario that makes no sense.
    """

    shape: LayerShape
    layers: int
    dcs: int
    workers: int
    bandwidth: float
    rtt_s: float
    tokens: float
    codec: Codec = CODECS[0]
    compute: Compute = IDLE
    rate_spread: float = 0.0
    rtt_spread: float = 0.0
    zipf: float = 0.0
    token_chunks: int = 4
    inside_bandwidth: float = 16e9
    samples: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.dcs, self.workers, self.layers, self.samples) < 1 or not self.bandwidth > 0:
            raise PlanError("a scenario needs DCs, workers, layers, samples and a bandwidth above 0")
        if not (self.rtt_s >= 0 and 0 <= self.rate_spread <= 3 and 0 <= self.rtt_spread <= 3):
            raise PlanError("a scenario needs a round trip from 0 and spreads from 0 to 3")

    @cached_property
    def topology(self) -> Topology:
        """The DCs as they would be without spread."""
        link = Link(self.bandwidth, self.rtt_s)
        dc = [
            Datacenter(f"dc{n}", (Host(f"dc{n}", None, self.workers),), None, None, self.bandwidth, self.bandwidth)
            for n in range(self.dcs)
        ]
        inside = Link(self.inside_bandwidth, 20e-6)
        levels = (Level("dc", self.dcs, link), Level("gpu", self.workers, inside))
        return Topology("simulated", tuple(dc), LinkTable(self.dcs, {}, link), levels)

    @cached_property
    def network(self) -> FairNetwork:
        """The drawn network."""
        rng = np.random.default_rng(self.seed)
        pairs = (self.dcs, self.dcs)
        bandwidth = self.bandwidth * np.exp(self.rate_spread * rng.standard_normal(pairs))
        rtt_s = self.rtt_s * np.exp(self.rtt_spread * rng.standard_normal(pairs))
        limits = self.bandwidth * np.exp(self.rate_spread * rng.standard_normal((2, self.dcs)))
        np.fill_diagonal(bandwidth, np.inf)
        np.fill_diagonal(rtt_s, 0.0)
        return FairNetwork(bandwidth, (rtt_s + rtt_s.T) / 4, limits[0], limits[1])

    @cached_property
    def job(self) -> Job:
        """The step."""
        shape, codec = self.shape, self.codec
        work = Workload(
            (shape,) * self.layers,
            self.tokens,
            codec.token_bytes,
            codec.weight_bytes,
            codec.gradient_bytes,
            token_chunks=self.token_chunks,
        )
        if self.zipf:
            chosen = routing.zipf(shape.num_experts, shape.top_k, self.zipf, samples=self.samples, seed=self.seed)
        else:
            chosen = routing.uniform(shape.num_experts, shape.top_k, samples=self.samples, seed=self.seed)
        return Job(self.topology, work, (chosen,), self.compute, drawn=self.network)

    @cached_property
    def spread(self) -> Spread:
        """Of experts over workers: contiguous blocks over DCs, round robin inside."""
        return spread_evenly(self.job, self.shape.num_experts)


def spread_evenly(job: Job, experts: int) -> Spread:
    """Homes so that every DC has its share, also where there are fewer experts than workers."""
    layout = job.layout
    per_dc = [(expert * layout.dcs // experts, expert) for expert in range(experts)]
    seen: dict[int, int] = {}
    homes = []
    for dc, _ in per_dc:
        local = seen.get(dc, 0)
        seen[dc] = local + 1
        homes.append(layout.first(dc) + local % layout.workers_per_dc[dc])
    return canonical_spread(layout, experts, tuple(homes))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a plan gives: seconds of the step, mean seconds of its parts, bytes on the mean and the busiest uplink."""

    plan: str
    step_s: float
    parts_s: dict[str, float]
    uplink_bytes: float
    busiest_uplink_bytes: float


def simulate(scenario: Scenario, plan: str) -> Result:
    """`plan`: ep, domains:S, replicate, p:SHARE or dp. Raises PlanError for another, or one that doesn't fit."""
    if plan == "dp":
        scenario = _data_parallel(scenario)
    site = _site_plan(scenario, plan)
    outcome = Predictor(scenario.job).predict([(site,) * scenario.layers])
    return _result(plan, scenario, outcome)


def _data_parallel(scenario: Scenario) -> Scenario:
    """Every DC has all experts and their optimizer states; their gradients are summed like dense ones."""
    shared = scenario.shape.parameters_per_expert * scenario.shape.num_experts * scenario.layers
    compute = scenario.compute
    total_bytes = compute.dense_parameters * compute.dense_bytes + shared * DP_BYTES
    parameters = compute.dense_parameters + shared
    free = Codec("none", scenario.codec.token_bytes, 0.0, 0.0)
    summed = replace(compute, dense_parameters=parameters, dense_bytes=total_bytes / parameters)
    return replace(scenario, codec=free, compute=summed)


def _site_plan(scenario: Scenario, plan: str) -> SitePlan:
    name, _, value = plan.partition(":")
    try:
        if plan == "ep":
            return plain(scenario.spread)
        if plan in ("replicate", "dp"):
            return domain(scenario.spread, consecutive(scenario.dcs, scenario.dcs))
        if name == "domains" and scenario.dcs % int(value) == 0:
            return domain(scenario.spread, consecutive(scenario.dcs, int(value)))
        if name == "p" and 0 <= float(value) <= 1:
            return _share(scenario, float(value))
    except (ValueError, ZeroDivisionError):
        pass
    raise PlanError(f"plan {plan!r}; allowed: ep, domains:S where S divides {scenario.dcs}, replicate, p:0..1, dp")


def _share(scenario: Scenario, p: float) -> SitePlan:
    """Each DC holds 1 - p of the experts of others: those of the DCs that follow it."""
    spread, here = scenario.spread, np.arange(scenario.dcs)[:, None]
    distance = (spread.home - here) % scenario.dcs
    rank = np.argsort(np.argsort(distance, axis=1, kind="stable"), axis=1, kind="stable")
    own = (distance == 0).sum(1, keepdims=True)
    copied = np.round((1 - p) * (len(spread.home) - own))
    held = rank < own + copied
    return site_plan(spread, held, np.where(held, here, spread.home))


def _result(plan: str, scenario: Scenario, outcome: Outcome) -> Result:
    sent = sum(outcome.sent_bytes.values(), np.zeros_like(outcome.sent_bytes["tokens"]))[0]
    dense = scenario.job.compute.dense_parameters * scenario.job.compute.dense_bytes
    uplinks: Array = sent.sum(1) + 2 * dense * (scenario.dcs - 1) / scenario.dcs
    parts = {name: float(seconds[0].mean()) for name, seconds in outcome.parts.items()}
    return Result(plan, float(outcome.step_s[0]), parts, float(uplinks.mean()), float(uplinks.max()))
