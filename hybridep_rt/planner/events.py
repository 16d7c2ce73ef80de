"""The schedule of one optimizer step: when every stretch of compute and every transfer starts and ends. Pure.

A timed event graph. Each DC has one compute stream, each directed link one stream of tokens; what a stream does comes
in the order of the program (`moe/exchange.py`): dispatch leaves at once, the DC's own tokens are computed, then the
visitors' chunks in fixed order, each answered when it is done. An event happens as soon as what it waits for has
happened, so every time is a maximum of sums, and no time can get later when a link gets faster.

Tokens have priority over experts, experts over gradients, and a link with anything to send is never idle. So the
experts of layer l have come through a link at the latest of (their release, the layers before) plus the bytes of the
layers up to l, tokens of the layers before l included; the layer's own tokens follow them. (The runtime lets these
overtake late experts of the same layer; the layer as a whole ends then at the same time.) Gradients likewise: behind
them come all tokens of the layers that backward still has to pass.

Not modelled: the small share of a link that a waiting class is guaranteed, lost packets, and jitter.

Shapes: P plans at once, D datacenters; [P,D,D] is [source, target].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes, Way
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.site_plan import Flags

PARTS = ("compute", "codecs", "tokens", "experts", "gradients", "dense")
"""What a DC's step consists of: its own work, and waits for tokens, experts, returned gradients and dense sums."""

MICRO_BATCHES_MOST = 6
"""More are not followed one by one: those in the middle repeat the second."""

Recorder = Callable[[str, str, int, Array, Array, Array], None]
"""(stream: compute, tokens, experts, gradients or dense; kind; layer; start, end, arrival), [D] or [D,D] of plan 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """`step_s` [P]; `end_s` [P,D]; `parts` [P,D] by name of PARTS, which add up to `end_s`; `forward_s` [P,D].

    `sent_bytes` [P,D,D] by "tokens", "weights" and "gradients", of the whole step.
    """

    end_s: Array
    forward_s: Array
    parts: dict[str, Array]
    sent_bytes: dict[str, Array]

    @property
    def step_s(self) -> Array:
        """When the last DC is done."""
        latest: Array = self.end_s.max(-1)
        return latest


def run(job: Job, layers: Sequence[LayerTimes], record: Recorder | None = None) -> Outcome:
    """Play one step through. All `layers` have the same number of plans as leading axis."""
    schedule = _Schedule(job, layers, record)
    schedule.publish()
    count = job.work.micro_batches
    followed = min(count, MICRO_BATCHES_MOST)
    for micro_batch in range(followed):
        before = schedule.now.copy()
        schedule.forward(first=micro_batch == 0)
        schedule.backward(last=micro_batch == followed - 1)
        if micro_batch == 1 and count > followed:
            schedule.repeat(before, count - followed)
    schedule.finish()
    return Outcome(schedule.now, schedule.forward_s, schedule.parts, _sent(job, layers))


class _Schedule:
    def __init__(self, job: Job, layers: Sequence[LayerTimes], record: Recorder | None) -> None:
        plans, dcs = layers[0].weights_encode_s.shape
        self._job = job
        self._layers = layers
        self._record = record
        self._delay_s = job.network.delay_s
        self._pre_s = np.broadcast_to(job.pre_expert_s, (plans, dcs))
        self._here = np.arange(dcs)
        self._visitor = (self._here[:, None] - np.arange(1, dcs)) % dcs if dcs > 1 else np.zeros((1, 0), np.int64)
        self._pairs = np.zeros((plans, dcs, dcs))
        self._link_free = self._pairs - np.inf
        self._experts_free = self._pairs.copy()
        self._gradients_free = self._pairs - np.inf
        self._released: list[Array] = []
        self.now: Array = np.zeros((plans, dcs))
        self.forward_s: Array = self.now
        self.parts: dict[str, Array] = {name: np.zeros((plans, dcs)) for name in PARTS}

    def publish(self) -> None:
        """Encode the weights, layer by layer, after the optimizer step: a step begins with it."""
        for layer, times in enumerate(self._layers):
            self._spend("codecs", "encode weights", layer, times.weights_encode_s)
            self._released.append(self.now)

    def forward(self, first: bool) -> None:
        """All layers. The first micro-batch waits for the copies' weights."""
        for layer, times in enumerate(self._layers):
            self._spend("compute", "pre-expert", layer, self._pre_s)
            experts = self._experts(layer, times) if first and times.has_copies else None
            self._exchange(layer, "forward", times.forward, experts, times.weights_decode_s)
            if first:
                self._experts_free = self._experts_free + times.forward.out_s + times.forward.back_s
        if first:
            self.forward_s = self.now

    def backward(self, last: bool) -> None:
        """All layers. After the last micro-batch's, gradients of copies go home."""
        factor = self._job.compute.backward_factor
        for layer in reversed(range(len(self._layers))):
            times = self._layers[layer]
            self._exchange(layer, "backward", times.backward, None, times.weights_decode_s)
            if last:
                self._gradients_free = self._gradients_free + times.backward.out_s + times.backward.back_s
                if times.has_copies:
                    self._return(layer, times)
            self._spend("compute", "pre-expert", layer, self._pre_s * factor)

    def repeat(self, before: Array, times: int) -> None:
        """As many more micro-batches, each as long as the one that began at `before`."""
        each = (self.now.max(-1) - before.max(-1))[:, None]
        worked = self._pre_s * (1 + self._job.compute.backward_factor) * len(self._layers)
        worked = worked + sum(_computed(way) for layer in self._layers for way in (layer.forward, layer.backward))
        worked = np.minimum(worked, each)
        self.parts["compute"] = self.parts["compute"] + times * worked
        self.parts["tokens"] = self.parts["tokens"] + times * (each - worked)
        self.now = self.now + times * each
        self._link_free = self._link_free + times * each[:, :, None]

    def finish(self) -> None:
        """Homes add up what copies returned, then dense gradients are summed, then the optimizer steps."""
        last = len(self._layers) - 1
        arrival = (self._gradients_free + self._delay_s).max(-2)
        self._wait("gradients", np.where(np.isfinite(arrival), arrival, 0.0))
        self._spend("codecs", "add gradients", last, sum((t.gradients_decode_s for t in self._layers), self.now * 0))
        self._dense()
        self._spend("compute", "optimizer", last, np.full_like(self.now, self._job.compute.optimizer_s))

    def _experts(self, layer: int, times: LayerTimes) -> Array:
        """When the layer's weights have come through each link; -inf where none travel."""
        sent = times.weights_bytes > 0
        free = np.maximum(self._experts_free, self._released[layer][:, :, None]) + times.weights_s
        self._experts_free = np.where(sent, free, self._experts_free)
        through = np.where(sent, free, -np.inf)
        self._note("experts", "experts", layer, through - times.weights_s, through, through + self._delay_s)
        return through

    def _return(self, layer: int, times: LayerTimes) -> None:
        self._spend("codecs", "encode gradients", layer, times.gradients_encode_s)
        sent = times.gradients_bytes > 0
        free = np.maximum(self._gradients_free, self.now[:, :, None]) + times.gradients_s
        self._gradients_free = np.where(sent, free, self._gradients_free)
        through = np.where(sent, free, -np.inf)
        self._note("gradients", "gradients", layer, through - times.gradients_s, through, through + self._delay_s)

    def _exchange(self, layer: int, phase: str, way: Way, experts: Array | None, decode_s: Array) -> None:
        """Dispatch, own tokens, visitors, answers. `experts` [P,D,D]: what local compute and the links wait for."""
        self._spend("codecs", "encode tokens", layer, way.encode_s)
        start = np.maximum(self.now[:, :, None], self._link_free)
        if experts is not None:
            start = np.maximum(start, experts)
            self._wait("experts", (experts + self._delay_s).max(-2))
            self._spend("codecs", "decode weights", layer, decode_s)
        self._note_chunks(f"{phase} dispatch", layer, way, start)
        own_s = way.compute_s[:, self._here, self._here] + self._job.compute.exchange_s
        self._spend("compute", f"{phase} own tokens", layer, own_s)
        if way.visits.any():
            clocks = self._visits(layer, phase, way, start)
            self._link_free = np.where(way.visits, start + way.out_s, self._link_free)
            self._answers(layer, phase, way, clocks)
        self._spend("codecs", "decode tokens", layer, way.decode_s)

    def _visits(self, layer: int, phase: str, way: Way, start: Array) -> Array:
        """Compute the visitors' chunks in order: when each is done, [P, D, chunks, D-1]. Advances the DCs' clocks."""
        chunks = self._job.work.token_chunks
        shape = (*self.now.shape, chunks, self._visitor.shape[1])
        part = (np.arange(chunks) + 1.0)[:, None] / chunks
        came = self._from_visitors(way.visits)[:, :, None, :]
        first, wire_s, delay_s, compute_s = (
            self._from_visitors(values)[:, :, None, :] for values in (start, way.out_s, self._delay_s, way.compute_s)
        )
        arrival = np.where(came, first + part * wire_s + delay_s, -np.inf).reshape(*self.now.shape, -1)
        each = np.where(came, compute_s / chunks + self._job.compute.exchange_s, 0.0)
        each = np.broadcast_to(each, shape).reshape(*self.now.shape, -1)
        total = each.cumsum(-1)
        latest = np.maximum.accumulate(arrival - (total - each), axis=-1)
        clock = total + np.maximum(self.now[:, :, None], latest)
        self._note("visitors", f"{phase} visitors", layer, clock - each, clock, clock)
        self.parts["compute"] = self.parts["compute"] + total[:, :, -1]
        self.parts["tokens"] = self.parts["tokens"] + clock[:, :, -1] - total[:, :, -1] - self.now
        self.now = clock[:, :, -1]
        return clock.reshape(shape)

    def _answers(self, layer: int, phase: str, way: Way, clocks: Array) -> None:
        """Each chunk is answered when it is computed; a DC goes on when all answers to its own tokens are there."""
        here, visitor = self._here[:, None], self._visitor
        chunks = self._job.work.token_chunks
        free = self._link_free[:, here, visitor]
        wire_s = way.back_s[:, here, visitor]
        answered = np.swapaxes(way.visits, -1, -2)
        through = np.full_like(self._pairs, -np.inf)
        for chunk in range(chunks):
            free = np.maximum(free, clocks[:, :, chunk, :]) + wire_s / chunks
            through[:, here, visitor] = free
            through = np.where(answered, through, -np.inf)
            arrival = through + self._delay_s
            self._note("tokens", f"{phase} answers", layer, through - way.back_s / chunks, through, arrival)
        self._link_free = np.where(answered, through, self._link_free)
        self._wait("tokens", arrival.max(-2))

    def _dense(self) -> None:
        """Each DC's sums go to the owners of their units, the totals come back: two exchanges, one after the other."""
        job = self._job
        workers = np.array(job.layout.workers_per_dc, float)
        dense = job.compute.dense_parameters * job.compute.dense_bytes
        if job.layout.dcs == 1 or not dense:
            return
        to_owner = np.tile(dense * workers / workers.sum(), (job.layout.dcs, 1))
        np.fill_diagonal(to_owner, 0.0)
        ready = self.now
        for volumes in (to_owner, to_owner.T):
            through = ready[:, :, None] + job.network.wire_s(volumes)
            self._note("dense", "dense sums", 0, *_where(volumes > 0, ready[:, :, None], through, self._delay_s))
            ready = np.maximum(ready, (through + self._delay_s).max(-2))
        self._wait("dense", ready)

    def _from_visitors(self, values: NDArray[Any]) -> NDArray[Any]:
        """[..., source, target] -> [P, D, D-1]: at each DC, from its visitors in the order in which it serves them."""
        taken = values[..., self._visitor, self._here[:, None]]
        return taken if values.ndim == 3 else taken[None]

    def _spend(self, part: str, kind: str, layer: int, seconds: Array) -> None:
        before, self.now = self.now, self.now + seconds
        self.parts[part] = self.parts[part] + seconds
        self._note("compute", kind, layer, before, self.now, self.now)

    def _wait(self, part: str, until: Array) -> None:
        before, self.now = self.now, np.maximum(self.now, until)
        self.parts[part] = self.parts[part] + self.now - before

    def _note_chunks(self, kind: str, layer: int, way: Way, start: Array) -> None:
        chunks = self._job.work.token_chunks
        for chunk in range(chunks if self._record is not None else 0):
            begin, through = start + way.out_s * chunk / chunks, start + way.out_s * (chunk + 1) / chunks
            self._note("tokens", kind, layer, *_where(way.visits, begin, through, self._delay_s))

    def _note(self, stream: str, kind: str, layer: int, start: Array, end: Array, arrival: Array) -> None:
        if self._record is not None:
            self._record(stream, kind, layer, *(np.broadcast_to(t, end.shape)[0] for t in (start, end, arrival)))


def _computed(way: Way) -> Array:
    """[P,D] seconds that each DC computes, its own tokens and visitors."""
    total: Array = way.compute_s.sum(-2)
    return total


def _where(present: Flags, start: Array, through: Array, delay_s: Array) -> tuple[Array, Array, Array]:
    """-inf where nothing travels."""
    start, through = (np.where(present, values, -np.inf) for values in np.broadcast_arrays(start, through))
    return start, through, through + delay_s


def _sent(job: Job, layers: Sequence[LayerTimes]) -> dict[str, Array]:
    ways = [way for layer in layers for way in (layer.forward, layer.backward)]
    zero = np.zeros_like(layers[0].weights_bytes)
    return {
        "tokens": job.work.micro_batches * sum((way.out_bytes + way.back_bytes for way in ways), zero),
        "weights": sum((layer.weights_bytes for layer in layers), zero),
        "gradients": sum((layer.gradients_bytes for layer in layers), zero),
    }
