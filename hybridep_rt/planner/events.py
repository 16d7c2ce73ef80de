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

Shapes: P plans at once, D datacenters. Links are kept by stage, [P, D, D-1]: [x, s] is the link from DC x to DC
x - 1 - s (mod D), which is also the order in which DC x serves its visitors. `Stages` translates from [source, target].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.stages import StagedLayer, StagedOnce, StagedWay, Stages, staged

PARTS = ("compute", "codecs", "tokens", "experts", "gradients", "dense")
"""What a DC's step consists of: its own work, and waits for tokens, experts, returned gradients and dense sums."""

MICRO_BATCHES_MOST = 6
"""More are not followed one by one: those in the middle repeat the second."""

Recorder = Callable[[str, str, int, Array, Array, Array], None]
"""(stream: compute, visitors, tokens, experts, gradients or dense; kind; layer; start, end, arrival of plan 0): [D] of
compute, [D, chunks * (D-1)] of visitors, else [D, D-1] by stage; -inf where nothing happens."""


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


def run(job: Job, layers: Sequence[LayerTimes], record: Recorder | None = None, *, stretch: int = 0) -> Outcome:
    """Play one step through. All `layers` have the same number of plans as leading axis.

    `stretch`: the middle layer stands for so many more, each of which adds to every time what it added.
    """
    schedule = _Schedule(job, staged(job, layers), record, stretch)
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
    counted = [*layers, *[layers[len(layers) // 2]] * stretch]
    return Outcome(schedule.now, schedule.forward_s, schedule.parts, _sent(job, counted))


class _Schedule:
    def __init__(self, job: Job, layers: Sequence[StagedLayer], record: Recorder | None, stretch: int) -> None:
        plans, dcs = layers[0].weights_encode_s.shape
        self._job = job
        self._layers = layers
        self._stretch = stretch
        self._record = record
        self._stages = Stages(dcs)
        self._delay_s = self._stages.of(job.network.delay_s[None])
        self._pre_s = np.broadcast_to(job.pre_expert_s, (plans, dcs))
        self._link_free = np.full((plans, dcs, dcs - 1), -np.inf)
        self._experts = _Background(self._stages, np.zeros((plans, dcs)), np.zeros_like(self._link_free))
        self._gradients = _Background(self._stages, np.full((plans, dcs), -np.inf), self._link_free)
        self._released: list[Array] = []
        self.now: Array = np.zeros((plans, dcs))
        self.forward_s: Array = self.now
        self.parts: dict[str, Array] = {name: np.zeros((plans, dcs)) for name in PARTS}

    def publish(self) -> None:
        """Encode the weights, layer by layer, after the optimizer step: a step begins with it."""
        for layer, times in enumerate(self._layers):
            self._spend("codecs", "encode weights", layer, times.weights_encode_s * self._count(layer))
            self._released.append(self.now)

    def forward(self, first: bool) -> None:
        """All layers. The first micro-batch waits for the copies' weights."""
        for layer, times in enumerate(self._layers):
            before = self._state()
            self._spend("compute", "pre-expert", layer, self._pre_s)
            weights = times.weights if first and times.has_copies else None
            if weights is not None:
                self._experts.send(weights, self._released[layer])
                self._note_background("experts", layer, weights, self._experts)
            self._exchange(layer, "forward", times.forward, weights, times.weights_decode_s)
            if first and self._copies_anywhere:
                self._experts.yield_to(times.forward)
            self._jump(before, layer)
        if first:
            self.forward_s = self.now

    def backward(self, last: bool) -> None:
        """All layers. After the last micro-batch's, gradients of copies go home."""
        factor = self._job.compute.backward_factor
        for layer in reversed(range(len(self._layers))):
            times, before = self._layers[layer], self._state()
            self._exchange(layer, "backward", times.backward, None, times.weights_decode_s)
            if last and self._copies_anywhere:
                self._gradients.yield_to(times.backward)
            if last and times.has_copies:
                self._spend("codecs", "encode gradients", layer, times.gradients_encode_s)
                self._gradients.send(times.gradients, self.now)
                self._note_background("gradients", layer, times.gradients, self._gradients)
            self._spend("compute", "pre-expert", layer, self._pre_s * factor)
            self._jump(before, layer)

    def repeat(self, before: Array, times: int) -> None:
        """As many more micro-batches, each as long as the one that began at `before`."""
        each = (self.now.max(-1) - before.max(-1))[:, None]
        worked = np.zeros_like(self.now)
        for layer, found in enumerate(self._layers):
            computed = sum(way.own_s + way.visitors_s for way in (found.forward, found.backward))
            worked += self._count(layer) * (self._pre_s * (1 + self._job.compute.backward_factor) + computed)
        worked = np.minimum(worked, each)
        self.parts["compute"] = self.parts["compute"] + times * worked
        self.parts["tokens"] = self.parts["tokens"] + times * (each - worked)
        self.now = self.now + times * each
        self._link_free = self._link_free + times * each[:, :, None]

    def finish(self) -> None:
        """Homes add up what copies returned, then dense gradients are summed, then the optimizer steps."""
        last = len(self._layers) - 1
        self._wait("gradients", self._arrival(self._gradients.link_s + self._delay_s))
        added = [times.gradients_decode_s * self._count(layer) for layer, times in enumerate(self._layers)]
        self._spend("codecs", "add gradients", last, sum(added, np.zeros_like(self.now)))
        self._dense()
        self._spend("compute", "optimizer", last, np.full_like(self.now, self._job.update_s))

    def _count(self, layer: int) -> int:
        """For how many layers a layer stands."""
        return 1 + self._stretch if layer == len(self._layers) // 2 else 1

    def _state(self) -> list[Array]:
        """All times that a layer moves."""
        queues = (self._experts, self._gradients)
        return [self.now, self._link_free, *self.parts.values(), *(time for queue in queues for time in queue.times())]

    def _jump(self, before: list[Array], layer: int) -> None:
        """As if the layer that began at `before` came `stretch` times more."""
        if not self._stretch or self._count(layer) == 1:
            return
        after = [now + self._stretch * _grown(was, now) for was, now in zip(before, self._state(), strict=True)]
        self.now, self._link_free = after[:2]
        self.parts = dict(zip(PARTS, after[2 : 2 + len(PARTS)], strict=True))
        self._experts.set_times(after[-6:-3])
        self._gradients.set_times(after[-3:])

    @property
    def _copies_anywhere(self) -> bool:
        return any(layer.has_copies for layer in self._layers)

    def _exchange(self, layer: int, phase: str, way: StagedWay, weights: StagedOnce | None, decode_s: Array) -> None:
        """Dispatch, own tokens, visitors, answers. `weights`: of the layer, where it still waits for them."""
        self._spend("codecs", "encode tokens", layer, way.encode_s)
        start = np.maximum(self.now[:, :, None], self._link_free)
        if weights is not None:
            start = np.maximum(start, self._experts.through(weights))
            arrival = np.where(weights.sent, self._experts.link_s, -np.inf) + self._delay_s
            self._wait("experts", self._arrival(arrival))
            self._spend("codecs", "decode weights", layer, decode_s)
        self._note_chunks(f"{phase} dispatch", layer, way, start)
        self._spend("compute", f"{phase} own tokens", layer, way.own_s)
        if way.any_visits:
            clocks = self._visits(layer, phase, way, start)
            self._link_free = np.where(way.sends, start + way.out_s, self._link_free)
            self._answers(layer, phase, way, clocks)
        self._spend("codecs", "decode tokens", layer, way.decode_s)

    def _visits(self, layer: int, phase: str, way: StagedWay, start: Array) -> Array:
        """Compute the visitors' chunks in order: when each is done, [P, D, chunks, D-1]. Advances the DCs' clocks.

        Of visitors k with arrival a_k and compute c_k: done_k = C_k + max(now, max over j <= k of a_j - C_(j-1)), where
        C are running sums of c. `way.lead` is a_j - C_(j-1) for a dispatch that starts at 0.
        """
        plans, dcs = self.now.shape
        begun = self._stages.visitors(start)
        if self._job.chunks > 1:
            begun = np.tile(begun, (1, 1, self._job.chunks))
        latest = np.maximum.accumulate(begun + way.lead, axis=-1)
        clock = way.total_s + np.maximum(self.now[:, :, None], latest)
        if self._record is not None:
            each_s = np.diff(way.total_s, prepend=0.0)
            self._note("visitors", f"{phase} visitors", layer, clock - each_s, clock, clock)
        self.parts["compute"] = self.parts["compute"] + way.visitors_s
        self.parts["tokens"] = self.parts["tokens"] + clock[:, :, -1] - way.visitors_s - self.now
        self.now = clock[:, :, -1]
        return clock.reshape(plans, dcs, -1, dcs - 1)

    def _answers(self, layer: int, phase: str, way: StagedWay, clocks: Array) -> None:
        """Each chunk is answered when it is computed; a DC goes on when all answers to its own tokens are there."""
        chunks = clocks.shape[2]
        free = self._link_free
        each_s = way.back_s / chunks
        for chunk in range(chunks):
            free = np.maximum(free, clocks[:, :, chunk, :]) + each_s
            if self._record is not None:
                through = np.where(way.answers, free, -np.inf)
                self._note("tokens", f"{phase} answers", layer, through - each_s, through, through + self._delay_s)
        self._link_free = np.where(way.answers, free, self._link_free)
        self._wait("tokens", self._arrival(np.where(way.answers, free + self._delay_s, -np.inf)))

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
            begin = np.broadcast_to(ready[:, :, None], self._link_free.shape)
            through = begin + self._stages.of(job.network.wire_s(volumes)[None])
            self._note("dense", "dense sums", 0, begin, through, through + self._delay_s)
            ready = np.maximum(ready, self._arrival(through + self._delay_s))
        self._wait("dense", ready)

    def _arrival(self, arrival: Array) -> Array:
        """When the last of what comes to each DC is there, [P,D]."""
        latest: Array = self._stages.visitors(arrival).max(-1, initial=-np.inf)
        return latest

    def _spend(self, part: str, kind: str, layer: int, seconds: Array) -> None:
        before, self.now = self.now, self.now + seconds
        self.parts[part] = self.parts[part] + seconds
        self._note("compute", kind, layer, before, self.now, self.now)

    def _wait(self, part: str, until: Array) -> None:
        before, self.now = self.now, np.maximum(self.now, until)
        self.parts[part] = self.parts[part] + self.now - before

    def _note_background(self, stream: str, layer: int, what: StagedOnce, queue: _Background) -> None:
        if self._record is None:
            return
        through = np.where(what.sent, queue.link_s, -np.inf)
        self._note(stream, stream, layer, through - what.link_s, through, through + self._delay_s)

    def _note_chunks(self, kind: str, layer: int, way: StagedWay, start: Array) -> None:
        chunks = self._job.chunks
        for chunk in range(chunks if self._record is not None else 0):
            begin, through = start + way.out_s * chunk / chunks, start + way.out_s * (chunk + 1) / chunks
            begin, through = (np.where(way.sends, values, -np.inf) for values in (begin, through))
            self._note("tokens", kind, layer, begin, through, through + self._delay_s)

    def _note(self, stream: str, kind: str, layer: int, start: Array, end: Array, arrival: Array) -> None:
        if self._record is not None:
            self._record(stream, kind, layer, *(np.broadcast_to(t, end.shape)[0] for t in (start, end, arrival)))


class _Background:
    """When experts (or gradients) that were sent so far are through each link, uplink and downlink, behind all tokens
    that go before them: a resource that has anything to send is never idle, so its bytes say when."""

    def __init__(self, stages: Stages, dc_s: Array, link_s: Array) -> None:
        self._stages = stages
        self._up_s = self._down_s = dc_s
        self.link_s = link_s

    def times(self) -> tuple[Array, Array, Array]:
        """Of links, uplinks and downlinks."""
        return self.link_s, self._up_s, self._down_s

    def set_times(self, times: Sequence[Array]) -> None:
        """Back to, or on to, what `times` gave."""
        self.link_s, self._up_s, self._down_s = times

    def yield_to(self, way: StagedWay) -> None:
        """A layer's tokens come before all that is sent from now on."""
        self.link_s = self.link_s + way.wire_s
        self._up_s, self._down_s = self._up_s + way.up_s, self._down_s + way.down_s

    def send(self, what: StagedOnce, released: Array) -> None:
        """Queue what each DC has from `released` [P,D] on."""
        link_s = np.maximum(self.link_s, released[:, :, None]) + what.link_s
        self._up_s = np.where(what.ups, np.maximum(self._up_s, released) + what.up_s, self._up_s)
        self._down_s = np.where(what.downs, np.maximum(self._down_s, released.min()) + what.down_s, self._down_s)
        shared_s = np.maximum(self._up_s[:, :, None], self._stages.targets(self._down_s))
        self.link_s = np.where(what.sent, np.maximum(link_s, shared_s), self.link_s)

    def through(self, what: StagedOnce) -> Array:
        """When each link, with the uplink and downlink it shares, has carried `what`; -inf where it carries none."""
        up_s, down_s = (
            np.where(some, seconds, -np.inf) for some, seconds in ((what.ups, self._up_s), (what.downs, self._down_s))
        )
        shared_s = np.maximum(up_s[:, :, None], self._stages.targets(down_s))
        through: Array = np.maximum(np.where(what.sent, self.link_s, -np.inf), shared_s)
        return through


def _grown(was: Array, now: Array) -> Array:
    """By how much times grew; 0 where there was none before."""
    return np.subtract(now, was, out=np.zeros_like(now), where=np.isfinite(was))


def _sent(job: Job, layers: Sequence[LayerTimes]) -> dict[str, Array]:
    sent = {name: np.zeros_like(layers[0].weights_bytes) for name in ("tokens", "weights", "gradients")}
    for layer in {id(layer): layer for layer in layers}.values():
        count = sum(other is layer for other in layers)
        for way in (layer.forward, layer.backward):
            sent["tokens"] += job.work.micro_batches * count * (way.out_bytes + way.back_bytes)
        sent["weights"] += count * layer.weights_bytes
        sent["gradients"] += count * layer.gradients_bytes
    return sent
