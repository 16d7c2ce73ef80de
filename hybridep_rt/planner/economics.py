"""What a plan costs: bytes on each WAN link by class, seconds per optimizer step, memory for copies.

For DC d and DC r, with n experts of r serving d's tokens (uniform routing, k distinct of E experts per token):
    q[d,r]       = 1 - C(E-n, k) / C(E, k)              a token crosses to a DC once, whatever it needs there
    tokens d->r  = 2*N[d]*q[d,r]*H*b + 2*N[r]*q[r,d]*H*b    dispatch and its gradient, results and their gradient
                   + metadata: 10 B per routed choice forward, 4 B backward
    weights d->r = (experts homed in d that r holds) * parameters * b_w
    gradients r->d likewise with b_g: they are the larger half of most plans' expert bytes
Seconds of one exchange: V/B on its slowest link, and within each DC's uplink and downlink. A pair of exchanges (there
and back) of o and b seconds with c chunks in flight takes max(o + b + rtt/2, o + b/c + rtt): with c = 1 the wire idles
for a round trip, with more chunks results travel while later tokens still leave. Tokens block compute, so nothing
hides them. Weights and gradients are V/B + rtt/2 each, less what the compute in front of the experts hides.
Dense gradients cost the same under every plan and are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb
from operator import mul

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.plan import LayerPlan, Layout
from topology.model import Topology
from topology.units import format_size, format_time

CHOICE_FORWARD_BYTES = 10
"""Row (4 B), expert number (2 B) and gate weight (4 B) of one routed choice that crosses."""
CHOICE_BACKWARD_BYTES = 4
"""The gate weight's gradient, on its way back."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MoE layer: E experts of hidden width H and inner width F, k of them per token."""

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    parameters_per_expert: int

    def __post_init__(self) -> None:
        if min(self.hidden, self.ffn, self.num_experts, self.top_k, self.parameters_per_expert) < 1:
            raise PlanError(f"every size of a layer must be at least 1: {self}")
        if self.top_k > self.num_experts:
            raise PlanError(f"top-k {self.top_k} must be at most the number of experts, {self.num_experts}")


@dataclass(frozen=True, slots=True)
class Workload:
    """What one optimizer step has to do.

    `tokens_per_worker_per_step`: of all micro-batches together. `token_bytes`: per element of a token vector on the
    wire. `weight_bytes`, `gradient_bytes`: per expert parameter on the wire, in the codecs in use. `token_chunks`: the
    parts in which an exchange is pipelined. `pre_expert_s`: compute per layer that can hide expert traffic, once per
    step for weights and once for gradients. `copy_bytes`: memory per parameter of a copy (float32 weights and
    gradient by default). `home_bytes`: memory per parameter of an expert that others hold, at its home (what a delta
    codec remembers), `subscriber_bytes` likewise for each DC that holds it.
    """

    layers: tuple[LayerShape, ...]
    tokens_per_worker_per_step: float
    token_bytes: float = 2.0
    weight_bytes: float = 2.0
    gradient_bytes: float = 2.0
    micro_batches: int = 1
    token_chunks: int = 1
    pre_expert_s: float = 0.0
    copy_bytes: float = 8.0
    home_bytes: float = 0.0
    subscriber_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a workload needs at least one layer")
        if self.micro_batches < 1 or self.token_chunks < 1:
            raise PlanError("micro_batches and token_chunks must be at least 1")
        amounts = ("tokens_per_worker_per_step", "token_bytes", "weight_bytes", "gradient_bytes", "pre_expert_s")
        for name in (*amounts, "copy_bytes", "home_bytes", "subscriber_bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise PlanError(f"{name} must be a number from 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Expected bytes of one optimizer step on one directed link."""

    tokens: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        """All classes together."""
        return self.tokens + self.weights + self.gradients


@dataclass(frozen=True, slots=True)
class Exchange:
    """`count` pairs of exchanges per micro-batch: seconds there and back for one token per worker, and the rtt."""

    count: int
    out_s: float
    back_s: float
    rtt_s: float

    def seconds(self, tokens: float, chunks: int) -> float:
        """Of all pairs, with `tokens` per worker in each."""
        out_s, back_s = tokens * self.out_s, tokens * self.back_s
        wire_s = out_s + back_s + self.rtt_s / 2
        return self.count * max(wire_s, out_s + back_s / chunks + self.rtt_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """The terms of one plan under one workload. `links` has every directed link that carries something.

    `inside_s` is the time of links inside DCs, known for symmetric trees only: for tokens (per token and worker) and
    for copies beyond a DC's first. `copy_bytes_per_worker`: memory for copies, and for what their homes keep of them,
    of the worker with most.
    """

    links: Mapping[Pair, LinkBytes]
    exchanges: tuple[Exchange, ...]
    tokens_per_worker: float
    micro_batches: int
    token_chunks: int
    weights_s: float
    gradients_s: float
    hidden_s: float
    inside_token_s: float
    inside_copies_s: float
    copy_bytes_per_worker: float

    @property
    def tokens_s(self) -> float:
        """Seconds per step in which compute waits for tokens on the WAN."""
        return self._tokens_s(self.tokens_per_worker)

    @property
    def experts_s(self) -> float:
        """Seconds of expert traffic, weights and gradients, hidden or not."""
        return self.weights_s + self.gradients_s

    @property
    def inside_s(self) -> float:
        """Seconds on links inside DCs."""
        return self.tokens_per_worker * self.inside_token_s + self.inside_copies_s

    @property
    def total_s(self) -> float:
        """What the step is expected to wait for: tokens + experts - hidden + inside."""
        return self.total_at(self.tokens_per_worker)

    def total_at(self, tokens_per_worker: float) -> float:
        """`total_s` if the step had that many tokens per worker."""
        inside_s = tokens_per_worker * self.inside_token_s + self.inside_copies_s
        return self._tokens_s(tokens_per_worker) + self.experts_s - self.hidden_s + inside_s

    def describe(self) -> str:
        """All terms of `total_s`, the busiest DC's uplink and the memory for copies, for people."""
        sources = {source for source, _ in self.links}
        uplink = max(map(self.uplink_bytes, sources), default=0.0)
        return (
            f"tokens {format_time(self.tokens_s)} + weights {format_time(self.weights_s)} + gradients "
            f"{format_time(self.gradients_s)} - hidden {format_time(self.hidden_s)} + inside DCs "
            f"{format_time(self.inside_s)} = {format_time(self.total_s)} per step; busiest uplink "
            f"{format_size(uplink)}, copies {format_size(self.copy_bytes_per_worker)} per worker"
        )

    def uplink_bytes(self, dc: int) -> float:
        """Bytes per step that leave a DC."""
        return sum(link.total for (source, _), link in self.links.items() if source == dc)

    def _tokens_s(self, tokens_per_worker: float) -> float:
        each = tokens_per_worker / self.micro_batches
        return self.micro_batches * sum(exchange.seconds(each, self.token_chunks) for exchange in self.exchanges)


@lru_cache(maxsize=4096)
def crossing_probability(num_experts: int, remote: int, top_k: int) -> float:
    """q = 1 - C(E-n, k)/C(E, k): chance that a token's k distinct experts include one of n, under uniform routing."""
    return 1 - comb(num_experts - remote, top_k) / comb(num_experts, top_k)


def price(layers: Iterable[LayerPlan], topology: Topology, work: Workload) -> Cost:
    """The cost of any plan, one LayerPlan per layer of the workload. Raises PlanError where the sizes disagree."""
    layout = Layout(topology.workers_per_dc)
    counted = Counter(_matched(layers, work.layers))
    totals: defaultdict[Pair, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    exchanges: list[Exchange] = []
    inside_token_s = inside_copies_s = 0.0
    memory: defaultdict[int, float] = defaultdict(float)
    for (plan, shape), count in counted.items():
        crossings = _crossings(plan, layout, shape)
        forward = _exchange(crossings, shape, work, there=CHOICE_FORWARD_BYTES, back=0)
        backward = _exchange(crossings, shape, work, there=0, back=CHOICE_BACKWARD_BYTES)
        exchanges += [_pair(count, *way, topology) for way in (forward, backward) if way[0]]
        for volumes in (*forward, *backward):
            for pair, volume in volumes.items():
                totals[pair][0] += count * work.tokens_per_worker_per_step * volume
        for (source, target), experts in _copies_between(plan, layout).items():
            parameters = count * experts * shape.parameters_per_expert
            totals[source, target][1] += parameters * work.weight_bytes
            totals[target, source][2] += parameters * work.gradient_bytes
        for worker, bytes_per_parameter in _memory(plan, layout, work).items():
            memory[worker] += count * shape.parameters_per_expert * bytes_per_parameter
        token_s, copy_s = _inside(plan, layout, shape, topology, work)
        inside_token_s, inside_copies_s = inside_token_s + count * token_s, inside_copies_s + count * copy_s
    links = {pair: LinkBytes(*volumes) for pair, volumes in sorted(totals.items())}
    weights_s = _one_way_s({pair: link.weights for pair, link in links.items()}, topology)
    gradients_s = _one_way_s({pair: link.gradients for pair, link in links.items()}, topology)
    cover_s = len(work.layers) * work.pre_expert_s
    return Cost(
        links=links,
        exchanges=tuple(exchanges),
        tokens_per_worker=work.tokens_per_worker_per_step,
        micro_batches=work.micro_batches,
        token_chunks=work.token_chunks,
        weights_s=weights_s,
        gradients_s=gradients_s,
        hidden_s=min(weights_s, cover_s) + min(gradients_s, cover_s),
        inside_token_s=inside_token_s,
        inside_copies_s=inside_copies_s,
        copy_bytes_per_worker=max(memory.values(), default=0.0),
    )


def _matched(layers: Iterable[LayerPlan], shapes: tuple[LayerShape, ...]) -> Iterator[tuple[LayerPlan, LayerShape]]:
    plans = tuple(layers)
    if len(plans) != len(shapes):
        raise PlanError(f"the plan has {len(plans)} layers, the workload {len(shapes)}")
    for number, (plan, shape) in enumerate(zip(plans, shapes, strict=True)):
        if plan.num_experts != shape.num_experts:
            raise PlanError(f"layer {number}: the plan has {plan.num_experts} experts, the model {shape.num_experts}")
        yield plan, shape


def _crossings(plan: LayerPlan, layout: Layout, shape: LayerShape) -> dict[Pair, tuple[float, float]]:
    """Per (d, r): expected (tokens, routed choices) that cross, for one token at each worker of d."""
    crossings = {}
    for dc, row in enumerate(plan.route):
        for target, experts in Counter(row).items():
            if target != dc:
                tokens = crossing_probability(shape.num_experts, experts, shape.top_k)
                choices = shape.top_k * experts / shape.num_experts
                workers = layout.workers_per_dc[dc]
                crossings[dc, target] = (workers * tokens, workers * choices)
    return crossings


def _exchange(
    crossings: Mapping[Pair, tuple[float, float]], shape: LayerShape, work: Workload, *, there: int, back: int
) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """Bytes by link of the way there and the way back, for one token per worker."""
    vector = shape.hidden * work.token_bytes
    out = {pair: tokens * vector + choices * there for pair, (tokens, choices) in crossings.items()}
    home = {(r, d): tokens * vector + choices * back for (d, r), (tokens, choices) in crossings.items()}
    return out, home


def _pair(count: int, out: Mapping[Pair, float], back: Mapping[Pair, float], topology: Topology) -> Exchange:
    rtt_s = max(topology.links[pair].rtt_s for pair in out)
    return Exchange(count, _wire_s(out, topology), _wire_s(back, topology), rtt_s)


def _one_way_s(volumes: Mapping[Pair, float], topology: Topology) -> float:
    """Seconds until the last byte has arrived; 0 where there are none."""
    delay_s = max((topology.links[pair].rtt_s / 2 for pair, volume in volumes.items() if volume), default=0.0)
    return _wire_s(volumes, topology) + delay_s


def _wire_s(volumes: Mapping[Pair, float], topology: Topology) -> float:
    """Seconds until the last link, uplink and downlink has carried its bytes, all at once."""
    up: defaultdict[int, float] = defaultdict(float)
    down: defaultdict[int, float] = defaultdict(float)
    slowest = 0.0
    for (source, target), volume in volumes.items():
        slowest = max(slowest, volume / topology.links[source, target].bandwidth_bytes_per_s)
        up[source] += volume
        down[target] += volume
    for number, dc in enumerate(topology.datacenters):
        for volume, limit in ((up[number], dc.uplink_bytes_per_s), (down[number], dc.downlink_bytes_per_s)):
            slowest = max(slowest, volume / limit if limit else 0.0)
    return slowest


def _copies_between(plan: LayerPlan, layout: Layout) -> Counter[Pair]:
    """(home's DC, subscribing DC) -> experts. An expert crosses once per DC, however many workers hold it there."""
    dc_of = [dc for dc, count in enumerate(layout.workers_per_dc) for _ in range(count)]
    return Counter(
        (dc_of[home], dc)
        for home, holders in zip(plan.home, plan.holders, strict=True)
        for dc in {dc_of[holder] for holder in holders} - {dc_of[home]}
    )


def _memory(plan: LayerPlan, layout: Layout, work: Workload) -> dict[int, float]:
    """Bytes at each worker, for one parameter per expert."""
    memory: defaultdict[int, float] = defaultdict(float)
    dc_of = [dc for dc, count in enumerate(layout.workers_per_dc) for _ in range(count)]
    for home, holders in zip(plan.home, plan.holders, strict=True):
        others = [holder for holder in holders if holder != home]
        for holder in others:
            memory[holder] += work.copy_bytes
        if others:
            foreign = {dc_of[holder] for holder in others} - {dc_of[home]}
            memory[home] += work.home_bytes + work.subscriber_bytes * len(foreign)
    return memory


def _inside(
    plan: LayerPlan, layout: Layout, shape: LayerShape, topology: Topology, work: Workload
) -> tuple[float, float]:
    """Seconds of DC 0's busiest worker on links inside the DC: per token at each worker, and for copies.

    In a symmetric tree the other DCs look the same. Where the tree is uneven these links are not known: (0, 0).
    """
    if topology.levels is None or layout.workers_per_dc[0] == 1:
        return 0.0, 0.0
    strides = tuple(accumulate((level.count for level in reversed(topology.levels[1:])), mul, initial=1))[-2::-1]
    rates = [level.link.bandwidth_bytes_per_s for level in topology.levels[1:]]

    def rate(a: int, b: int) -> float:
        level = next(level for level, stride in enumerate(strides) if a // stride != b // stride)
        return rates[level]

    vector = 4 * shape.hidden * work.token_bytes
    coded = shape.parameters_per_expert * (work.weight_bytes + work.gradient_bytes)
    token_s, copy_s = [], []
    for worker in range(layout.workers_per_dc[0]):
        servers = [Counter(s for s, to in zip(plan.serve[worker], row, strict=True) if to == 0) for row in plan.route]
        token_s.append(
            sum(
                vector * crossing_probability(shape.num_experts, experts, shape.top_k) / rate(worker, server)
                for row in servers
                for server, experts in row.items()
                if server != worker
            )
        )
        firsts = [layout.locate(home)[1] for home, held in zip(plan.home, plan.holders, strict=True) if worker in held]
        copy_s.append(sum(coded / rate(worker, first) for first in firsts if first != worker))
    return max(token_s), max(copy_s)
