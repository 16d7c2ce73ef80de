"""How fast this worker computes a model's experts and what is in front of them, codes, and exchanges inside its DC.

Measured with the functions that a training step uses, at all workers at once, as they may share cores.
Shapes: T tokens, H hidden, K experts per token, E experts, P (row, expert) pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.moe.experts import Apply, expert_kind, initial_tensors, weighted_sum
from hybridep_rt.moe.layer import emulated_expert
from hybridep_rt.moe.spread import Batch, spread_forward
from hybridep_rt.planner.calibration import CodecFigures, Figure, SiteFigures
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.gradients import all_finite
from hybridep_rt.runtime.session import Runtime

ROUNDS = 3
_PAIRS_MOST = 8192
_ROWS_LEAST = 256
_CODED = 1 << 18
"""Elements that codecs are timed with."""
_AT = Position(0, 0, -1, Phase.DISPATCH, training=False)


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: a layer, how many tokens a worker has per micro-batch, and the rest of the layer's FLOPs."""

    shape: LayerShape
    matrices: int
    tokens: int
    pre_expert_flops_per_token: float


def measure_site(runtime: Runtime, load: Load) -> SiteFigures:
    """At this worker. All workers call it."""
    runtime.barrier()
    few, many = (_experts(runtime, load, few=few) for few in (True, False))
    forward_s, backward_s = many.without(few)
    pre_s = _pre_expert(runtime, load)
    runtime.barrier()
    return SiteFigures(
        Figure.of(many.flops / seconds for seconds in forward_s),
        Figure.of(back_s / seconds for back_s, seconds in zip(backward_s, forward_s, strict=True)),
        Figure.of(seconds / few.count for seconds in few.forward_s),
        Figure.of(seconds / few.count for seconds in few.backward_s),
        Figure.of(seconds / load.tokens for seconds in pre_s),
        Figure.of(_timed(partial(_small_exchange, runtime, load.shape))),
        _update(runtime, load.shape),
        _inside(runtime, load) if runtime.site_size > 1 else None,
    )


def measure_codecs(runtime: Runtime, specs: Iterable[tuple[str, str]], hidden: int) -> dict[str, CodecFigures]:
    """Seconds per element of each (kind, codec), by KIND=CODEC."""
    runtime.barrier()
    return {f"{kind}={spec}": _codec(spec, hidden) for kind, spec in specs}


@dataclass(frozen=True, slots=True)
class _Experts:
    """What a worker computes for its own DC's tokens: FLOPs forward, and seconds of each round."""

    count: int
    flops: float
    forward_s: list[float]
    backward_s: list[float]

    def without(self, few: _Experts) -> tuple[list[float], list[float]]:
        """Seconds forward and backward without what the same experts take for a token each; at least half stays."""
        ways = (self.forward_s, few.forward_s), (self.backward_s, few.backward_s)
        forward_s, backward_s = ([max(each - median(fixed), each / 2) for each in whole] for whole, fixed in ways)
        return forward_s, backward_s


def _experts(runtime: Runtime, load: Load, *, few: bool) -> _Experts:
    """`few`: with one token for each expert, instead of as many as a micro-batch has, at least `_ROWS_LEAST`."""
    shape = load.shape
    count = max(1, shape.num_experts // runtime.world_size)
    here = round(runtime.site_size * load.tokens * shape.top_k / shape.num_experts)
    rows = 1 if few else max(_ROWS_LEAST, here)
    pairs = min(_PAIRS_MOST, count * rows)
    kind = expert_kind("swiglu" if load.matrices == 3 else "gelu")
    apply: Apply = kind.apply if runtime.emulated is None else partial(emulated_expert, runtime.emulated)
    held = {
        e: [tensor.requires_grad_() for tensor in initial_tensors(kind, shape.hidden, shape.ffn, e)]
        for e in range(count)
    }
    expert_P = torch.arange(pairs) % count
    forward_s, backward_s = [], []
    for _ in range(ROUNDS + 1):
        x = torch.ones(pairs, shape.hidden, requires_grad=True)
        weight_P = torch.ones(pairs, requires_grad=True)
        started = time.perf_counter()
        y = weighted_sum(apply, held, x, torch.arange(pairs), expert_P, weight_P)
        between = time.perf_counter()
        torch.autograd.backward([y], [torch.ones_like(y)])
        forward_s.append(between - started)
        backward_s.append(time.perf_counter() - between)
    return _Experts(count, 2.0 * pairs * shape.parameters_per_expert, forward_s[1:], backward_s[1:])


def _pre_expert(runtime: Runtime, load: Load) -> list[float]:
    """Square matrices of the hidden size, as many as make the FLOPs."""
    hidden = load.shape.hidden
    count = max(1, round(load.pre_expert_flops_per_token / (2 * hidden**2)))
    module = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(count)))
    x = torch.ones(load.tokens, hidden)
    return _timed(lambda: runtime.kernel(module, x, load.tokens * load.pre_expert_flops_per_token))


def _small_exchange(runtime: Runtime, shape: LayerShape) -> None:
    serve_E = torch.arange(shape.num_experts) % runtime.site_size
    one = torch.ones(1, dtype=torch.int64)
    batch = Batch(torch.ones(1, shape.hidden), torch.zeros_like(one), torch.zeros_like(one), torch.ones(1))
    spread_forward(runtime.site, serve_E, lambda x, row, expert, weight: x, batch, _AT)


def _update(runtime: Runtime, shape: LayerShape) -> Figure:
    """AdamW's step over the experts of one worker, with the look for values that aren't finite; per parameter."""
    count = max(1, shape.num_experts // runtime.world_size)
    parameters = [nn.Parameter(torch.ones(shape.parameters_per_expert)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    elements = count * shape.parameters_per_expert

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        all_finite(parameters)
        optimizer.step()

    return Figure.of(seconds / elements for seconds in _timed(step))


def _inside(runtime: Runtime, load: Load) -> Figure:
    """Bytes that a worker gives to others, per second of an exchange of as many rows as a micro-batch has."""
    others = runtime.site_size - 1
    rows = max(64, load.tokens // runtime.site_size)
    parcels = [(torch.ones(rows, load.shape.hidden),)] * runtime.site_size
    sent = others * rows * load.shape.hidden * parcels[0][0].itemsize
    return Figure.of(sent / seconds for seconds in _timed(lambda: runtime.site.exchange(_AT, parcels)))


def _codec(spec: str, width: int) -> CodecFigures:
    values = torch.linspace(-1, 1, _CODED // width * width or width)
    sender, receiver = make_codec(spec, width=width), make_codec(spec, width=width)
    into = torch.zeros_like(values)
    encode_s, decode_s = [], []
    for number in range(ROUNDS + 2):  # the first of some is a key frame, and compiles
        changed = values * (1 + 0.01 * number)
        started = time.perf_counter()
        payload = sender.encode(changed)
        between = time.perf_counter()
        receiver.decode(payload, into)
        encode_s.append((between - started) / len(values))
        decode_s.append((time.perf_counter() - between) / len(values))
    return CodecFigures(Figure.of(encode_s[2:]), Figure.of(decode_s[2:]))


def _timed(work: Callable[[], object]) -> list[float]:
    """Seconds of some rounds after one that warms up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]
