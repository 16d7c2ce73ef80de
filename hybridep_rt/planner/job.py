"""What the runtime's own model is told: a step's work, who chooses which experts, and how fast workers are. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.network import Array, Network
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.routing import Routing
from topology.model import Topology

CHUNKED_DCS_MOST = 64


@dataclass(frozen=True, slots=True)
class Compute:
    """How long a worker computes. Seconds that are not known are 0; a rate that is not known is infinite.

    `flops_per_s`: one rate for all workers, or one for each by global number. `pre_expert_flops_per_token`: of a layer,
    forward, in front of its experts; `pre_expert_s_per_token` likewise, and beside these `Workload.pre_expert_s`.
    `backward_factor`: backward kernels against forward ones. `token_codec_s`, `weight_codec_s`, `gradient_codec_s`: to
    encode, or to decode, one element. `exchange_s`: fixed cost of each batch that a DC computes (its own tokens, or a
    chunk of another DC's); `expert_s`, `expert_backward_s`: and of each expert that the batch needs.
    `inside_bytes_per_s`: of a worker in an exchange inside its DC; infinite: what the topology says.
    `dense_parameters`: of the whole model, whose gradients are summed over all DCs at `dense_bytes` each.
    The optimizer takes `optimizer_s`, and `update_s_per_parameter` for each one that a worker has.
    """

    flops_per_s: float | tuple[float, ...] = inf
    pre_expert_flops_per_token: float = 0.0
    pre_expert_s_per_token: float = 0.0
    backward_factor: float = 2.0
    token_codec_s: float = 0.0
    weight_codec_s: float = 0.0
    gradient_codec_s: float = 0.0
    exchange_s: float = 0.0
    expert_s: float = 0.0
    expert_backward_s: float = 0.0
    inside_bytes_per_s: float = inf
    dense_parameters: float = 0.0
    dense_bytes: float = 4.0
    optimizer_s: float = 0.0
    update_s_per_parameter: float = 0.0

    def __post_init__(self) -> None:
        rates = self.flops_per_s if isinstance(self.flops_per_s, tuple) else (self.flops_per_s,)
        if not rates or not min(rates) > 0:
            raise PlanError(f"compute rates must be above 0 FLOP/s, not {self.flops_per_s}")
        for name in self.__slots__:
            value = getattr(self, name)
            bounded = name not in ("flops_per_s", "inside_bytes_per_s")
            if isinstance(value, float) and bounded and not 0 <= value < inf:
                raise PlanError(f"{name} must be a number from 0, not {value}")

    def rates(self, layout: Layout) -> Array:
        """[D,W] FLOP/s, infinite where a DC has fewer than W workers. Raises PlanError for a wrong number of rates."""
        width = max(layout.workers_per_dc)
        rates = np.full((layout.dcs, width), inf)
        listed = self.flops_per_s if isinstance(self.flops_per_s, tuple) else (self.flops_per_s,) * layout.workers
        if len(listed) != layout.workers:
            raise PlanError(f"{len(listed)} compute rates for {layout.workers} workers; allowed: one for each, or one")
        first = 0
        for dc, count in enumerate(layout.workers_per_dc):
            rates[dc, :count] = listed[first : first + count]
            first += count
        return rates


@dataclass(frozen=True, eq=False)
class Job:
    """One optimizer step of a model on a topology. `routing`: one for all layers, or one for each.

    `bandwidth_factor`: of all WAN rates, to ask what if. `drawn`: a network instead of the topology's.

    Raises PlanError where they don't fit each other.
    """

    topology: Topology
    work: Workload
    routing: tuple[Routing, ...]
    compute: Compute = Compute()
    bandwidth_factor: float = 1.0
    drawn: Network | None = None
    network: Network = field(init=False)
    layout: Layout = field(init=False)
    rates: Array = field(init=False)

    def __post_init__(self) -> None:
        network = self.drawn or Network.of(self.topology)
        object.__setattr__(self, "network", network.scaled(self.bandwidth_factor))
        object.__setattr__(self, "layout", Layout(self.topology.workers_per_dc))
        object.__setattr__(self, "rates", self.compute.rates(self.layout))
        if len(self.routing) not in (1, len(self.work.layers)):
            raise PlanError(f"{len(self.routing)} routings for {len(self.work.layers)} layers; allowed: 1, or one each")
        for number, shape in enumerate(self.work.layers):
            self.routing_of(number).check(shape.num_experts, shape.top_k, self.layout.dcs)

    def routing_of(self, layer: int) -> Routing:
        """The samples of a layer."""
        return self.routing[layer if len(self.routing) > 1 else 0]

    def kind(self, layer: int) -> tuple[LayerShape, int]:
        """Layers of equal kind behave alike under equal plans."""
        return self.work.layers[layer], id(self.routing_of(layer))

    @property
    def chunks(self) -> int:
        """Parts of an exchange. With many DCs their visits overlap each other, and chunks change nothing."""
        return self.work.token_chunks if self.layout.dcs <= CHUNKED_DCS_MOST else 1

    @property
    def tokens(self) -> Array:
        """[D] tokens of each DC in one micro-batch."""
        workers = np.array(self.layout.workers_per_dc, float)
        return workers * self.work.tokens_per_worker_per_step / self.work.micro_batches

    @property
    def inside_rate(self) -> tuple[float, float]:
        """Bytes/s and one-way delay of the slowest link inside a DC; (inf, 0) where these are not known.

        A measured rate goes with `Compute.exchange_s`, which has the delay in it.
        """
        if self.compute.inside_bytes_per_s < inf:
            return self.compute.inside_bytes_per_s, 0.0
        levels = self.topology.levels
        if levels is None or len(levels) < 2:
            return inf, 0.0
        links = [level.link for level in levels[1:]]
        return min(link.bandwidth_bytes_per_s for link in links), max(link.rtt_s for link in links) / 2

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer at a worker: dense parameters, and its share of the experts."""
        experts = sum(shape.num_experts * shape.parameters_per_expert for shape in self.work.layers)
        own = self.compute.dense_parameters + experts / self.layout.workers
        return self.compute.optimizer_s + own * self.compute.update_s_per_parameter

    @property
    def pre_expert_s(self) -> Array:
        """[D] forward seconds in front of the experts of a layer, per micro-batch, at a DC's slowest worker."""
        each = self.work.tokens_per_worker_per_step / self.work.micro_batches
        slowest = self.rates.min(axis=1)
        known_s = self.work.pre_expert_s + each * self.compute.pre_expert_s_per_token
        seconds: Array = known_s + each * self.compute.pre_expert_flops_per_token / slowest
        return seconds
