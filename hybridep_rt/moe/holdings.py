"""The experts that one worker computes: its own, and copies of others' that arrive before use and send gradients home.

Weights of an expert leave its home once per optimizer step and DC, enter a DC at its gateway and spread inside.
Gradients go back the same way: summed inside the DC at the gateway, sent home, added up there in the order of DCs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from itertools import chain, cycle

import torch

from hybridep_rt.codecs.buffers import as_bytes
from hybridep_rt.codecs.codec import Codec, Codecs, cut_frames, follow, make_codec, options_of
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.codecs.outgoing import Outgoing
from hybridep_rt.codecs.shared import SharedResidual
from hybridep_rt.codecs.streams import joining_payload
from hybridep_rt.codecs.update import Step, Update, update_and_encode
from hybridep_rt.errors import CodecError
from hybridep_rt.metrics import CodecFigures
from hybridep_rt.moe.arrivals import Arrivals
from hybridep_rt.moe.copy_error import copy_error
from hybridep_rt.moe.exact_copies import exact_copies
from hybridep_rt.moe.experts import Apply, weighted_sum
from hybridep_rt.moe.memory import layer_memory
from hybridep_rt.moe.moments import HomeMoment
from hybridep_rt.moe.shared import SharedWeights
from hybridep_rt.moe.streams import Streams, WeightStreams
from hybridep_rt.moe.tables import LayerTables
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Bytes, Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.background import Background
from hybridep_rt.runtime.collectives import Collectives
from hybridep_rt.trace import Recorder
from hybridep_rt.transport.ports import SiteGroup, WanPort


class Stage(Enum):
    """Of the gradients since the last step: none yet, being summed up here, or on their way home."""

    CLEAN = 0
    USED = 1
    RETURNED = 2


class Holdings:
    """Homes and copies of one layer at one worker.

    `parameters[e]` are the tensors of the experts homed here; `like` gives dtype and device of the copies. `codecs` are
    in use now, `ahead` after a warm-up.
    """

    def __init__(
        self,
        layer: int,
        tables: LayerTables,
        apply: Apply,
        shapes: Sequence[tuple[int, int]],
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        *,
        like: torch.Tensor,
        site: SiteGroup,
        wan: WanPort,
        codecs: Codecs,
        ahead: Codecs,
        collectives: Collectives,
        background: Background,
        trace: Recorder,
    ) -> None:
        self._layer = layer
        self._tables = tables
        self._apply = apply
        self._shapes = shapes
        self._parameters = parameters
        self._like = like
        self._site = site
        self._wan = wan
        self._trace = trace
        self._leaves = {e: self._new_leaves() for e in tables.copies}
        self._collectives = collectives
        self._mean = self._mean_for(codecs.weights)
        self._weights = WeightStreams(codecs.weights, tables.passing, len(shapes))
        self._ahead = ahead.gradients
        self._moments: dict[tuple[int, int], HomeMoment] = {}
        self._incoming = self._incoming_gradients(codecs.gradients)
        self._outgoing = {e: self._new_outgoing() for e in tables.gateway_of}
        self.carried: dict[int, list[torch.Tensor]] = {}
        """Gradients of experts homed here that streams owed when they ended: part of the next sum."""
        self._arrivals = Arrivals(layer, wan, background, self._take_in)
        self._arrivals.rebind(tables.entering)
        self._arrived: dict[int, dict[int, memoryview]] = defaultdict(dict)
        self._copy_version = 0
        self._version = 0
        self._due = 0
        self._published: dict[int, dict[int, list[Bytes]]] = {}
        self._joining: dict[int, list[Bytes]] = {}
        self._stage = Stage.CLEAN
        self._site_sums: dict[int, list[torch.Tensor]] = {}

    def rebind(self, tables: LayerTables, parameters: Mapping[int, Sequence[torch.nn.Parameter]]) -> None:
        """Go on under another plan, when neither weights nor gradients are on their way.

        Copies and streams that both plans have stay as they are; all others are freed, or begin anew.
        """
        copies = {*self._tables.copies} & {*tables.copies}
        # An expert that nobody else holds any more begins anew with its next receiver: its stream is not kept up.
        homes = {e for e in tables.homes if e in self._parameters and tables.is_published(e)}
        self._tables, self._parameters = tables, parameters
        self._arrivals.rebind(tables.entering)
        self.carried = {e: owed for e, owed in self.carried.items() if e in parameters}
        self._leaves = {e: self._leaves[e] if e in copies else self._new_leaves() for e in tables.copies}
        self._weights.rebind(tables.passing, copies | homes, self._version)
        if self._mean is not None:
            self._mean.rebind(parameters)
            if self._mean.number:
                self._weights.share(self._mean.tensors, self._mean.number)
        self._outgoing = {e: self._outgoing.get(e) or self._new_outgoing() for e in tables.gateway_of}
        moments, incoming = self._moments, self._incoming_gradients(self._gradient_spec)
        self._incoming = {stream: self._incoming.get(stream, made) for stream, made in incoming.items()}
        self._moments = {tensor: moments.get(tensor, made) for tensor, made in self._moments.items()}

    def home_streams(self, expert: int) -> dict[str, Sequence[object]]:
        """What this worker remembers about an expert that is homed here, by names that are the same at any home."""
        sources = self._tables.subscribers[expert]
        found: dict[str, Sequence[object]] = {
            f"returns.{each.dc}.{each.worker}": self._incoming[expert, each] for each in sources
        }
        found["weights"] = self._weights.of(expert, self._version)
        found["moments"] = [self._moments.get((expert, number)) for number in range(len(self._shapes))]
        return found

    @property
    def homes(self) -> tuple[int, ...]:
        """The experts that are homed here."""
        return self._tables.homes

    @property
    def outgoing(self) -> Mapping[int, Sequence[Outgoing]]:
        """The streams of gradients that this worker sends to other DCs, by expert."""
        return self._outgoing

    @property
    def is_settled(self) -> bool:
        """Whether no gradients wait to be collected."""
        return self._stage is Stage.CLEAN

    def memory(self, codecs: Codecs) -> dict[str, int]:
        """See `layer_memory`."""
        parameters = sum(rows * columns for rows, columns in self._shapes)
        return layer_memory(self._tables, parameters, codecs, self._like.dtype)

    def change_codecs(self, codecs: Codecs) -> None:
        """Use other codecs from the next `publish` and the next gradient on. Every worker does so between two steps."""
        if self._weights.change(codecs.weights, self._version + 1):
            if self._mean is not None:
                self._mean.finish()
            self._mean = self._mean_for(codecs.weights)
        for outgoing in chain.from_iterable(self._outgoing.values()):
            outgoing.change(codecs.gradients)
        self._ahead = codecs.gradients
        if codecs.gradients != self._gradient_spec:
            before, self._incoming = self._incoming, self._incoming_gradients(codecs.gradients)
            for stream, incoming in self._incoming.items():
                for codec, other in zip(incoming, before[stream], strict=True):
                    follow(codec, other)

    def codec_figures(self) -> CodecFigures:
        """What codecs did to this worker's experts: a pass or two over the memory of those that others hold."""
        streams = chain.from_iterable(
            zip(self._weights.of(e, self._version), self._parameters[e], strict=True)
            for e in filter(self._tables.is_published, self._tables.homes)
        )
        owed = (each.owed_norm() for each in chain.from_iterable(self._outgoing.values()))
        return CodecFigures(copy_error(streams), math.hypot(*owed))

    @contextmanager
    def exact_copies(self, at: Position) -> Iterator[None]:
        """Inside, copies are what their homes have. All workers enter at once, and nothing is trained inside."""
        self.refresh()
        coded = self._leaves
        exact = exact_copies(
            self._tables, self._shapes, self._parameters, like=self._like, site=self._site, wan=self._wan, at=at
        )
        self._leaves = coded | exact
        try:
            yield
        finally:
            self._leaves = coded

    def publish(self, step: Step | None = None, *, lag: int = 0) -> None:
        """Encode the weights of the experts homed here and send them to every DC that subscribes. Does not wait.

        `step`: of the optimizer, makes each expert's update, which is in the pass over memory that encodes it. `lag`:
        how many versions copies may be behind in the next forward; those it does not need yet stay where they are.
        """
        self._version += 1
        if self._mean is not None:
            self._renew(self._mean)
        published = self._published[self._version] = {}
        for expert in self._tables.homes:
            updates = [self._update(step, expert, number) for number in range(len(self._shapes))]
            if not self._tables.is_published(expert):
                for update in filter(None, updates):
                    update.run()
                continue
            codecs = self._weights.of(expert, self._version)
            with self._span("encode", "weights", expert):
                published[expert] = [
                    update_and_encode(codec, tensor, update)
                    for codec, tensor, update in zip(codecs, self._parameters[expert], updates, strict=True)
                ]
            if lag:
                # The parameters change again before this has to be out.
                published[expert] = list(map(bytes, published[expert]))
            self._send_weights(self._tables, expert, published[expert], self._weights_at(self._version))
        if self._mean is not None:
            self._mean.after_publish(self._version)
        self._due = max(self._due, self._version - lag)
        self._arrivals.open(self._due)

    def publish_to(self, joining: LayerTables, at: Position) -> None:
        """Send those who hold new copies, as `joining` says, what the other copies have. Does not wait."""
        for expert in filter(joining.is_published, joining.homes):
            codecs = self._weights.of(expert, self._version)
            self._joining[expert] = [
                joining_payload(codec, tensor) for codec, tensor in zip(codecs, self._parameters[expert], strict=True)
            ]
            self._send_weights(joining, expert, self._joining[expert], at)

    def refresh_from(self, joining: LayerTables, at: Position) -> None:
        """Wait for what `publish_to` sent here. A collective of the DC where copies move inside it."""
        arrived: dict[int, Sequence[Bytes]] = dict(self._joining)
        self._joining = {}
        for expert in joining.gateway_of:
            message = self._wan.receive(joining.home_of[expert], f"experts/{self._layer}", at._replace(chunk=expert))
            arrived[expert] = [message.payload]
        self._spread_weights(joining, self._version, arrived, at)
        for expert in joining.copies:
            self._decode_weights(self._version, expert, memoryview(b"".join(arrived[expert])))

    def settle(self) -> None:
        """Wait for all that is on its way, also what copies that are behind would not need yet."""
        self._due = self._version
        self.refresh()

    def refresh(self) -> None:
        """Wait until the copies have the weights of the last `publish`, or those that it lets be behind."""
        for expert in self._tables.homes:
            self._leaves[expert] = [
                self._home_leaf(parameter, old)
                for parameter, old in zip(
                    self._parameters[expert], self._leaves.get(expert, self._parameters[expert]), strict=True
                )
            ]
        self._receive_until(self._due)

    def compute(
        self, x_NH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor
    ) -> torch.Tensor:
        """See `weighted_sum`."""
        if torch.is_grad_enabled():
            self._stage = Stage.USED
        with self._trace.span("compute", f"experts of layer {self._layer}"):
            return weighted_sum(self._apply, self._leaves, x_NH, row_P, expert_P, weight_P)

    def return_gradients(self, step: int) -> None:
        """Sum the copies' gradients inside the DC and send them home. Does not wait for the WAN.

        Nothing happens where the layer was not used since the last `collect`.
        """
        if self._mean is not None:
            self._mean.in_backward()
        if self._stage is not Stage.USED:
            return
        self._stage = Stage.RETURNED
        at = Position(step, 0, self._layer, Phase.GRADIENT_RETURN)
        self._site_sums = self._gather_gradients(at)
        for expert in self._tables.gateway_of:
            outgoing = self._outgoing[expert]
            total = self._site_sums.get(expert)
            if total is None and any(each.carries for each in outgoing):
                total = [self._like.new_zeros(shape) for shape in self._shapes]
            payload: list[Bytes] = []
            if total is not None:
                with self._span("encode", "gradient", expert):
                    payload = [each.encode(tensor) for each, tensor in zip(outgoing, total, strict=True)]
            self._wan.send(
                self._tables.home_of[expert],
                f"gradients/{self._layer}",
                at._replace(chunk=expert),
                payload,
                traffic=Traffic.GRADIENTS,
                counts=(int(total is not None),),
                urgency=-self._layer,
            )

    def collect(self, step: int, divisor: int) -> None:
        """Wait for the gradients of all copies; add the sum over all DCs / `divisor` to the parameters' `.grad`."""
        if self._stage is not Stage.RETURNED:
            return
        self._stage = Stage.CLEAN
        at = Position(step, 0, self._layer, Phase.GRADIENT_RETURN)
        for expert in self._tables.homes:
            parts = []
            for source in sorted((self._tables.me, *self._tables.subscribers[expert])):
                if source == self._tables.me:
                    part = self._site_sums.get(expert)
                else:
                    part = self._receive_gradient(expert, at._replace(chunk=expert), source)
                if part is not None:
                    parts.append(part)
            if expert in self.carried:
                parts.append(self.carried.pop(expert))
            own = self._site_sums.get(expert)
            for number, parameter in enumerate(self._parameters[expert]):
                if not parameter.requires_grad:
                    continue
                moment = self._moments.get((expert, number))
                if moment is not None and own is not None:
                    moment.observe(own[number])
                # The terms are this worker's own to overwrite: what its leaves collected, or what was just received.
                total = parts[0][number] if parts else torch.zeros_like(parameter)
                for part in parts[1:]:
                    total.add_(part[number])
                if divisor > 1:
                    total.div_(divisor)
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
                if moment is not None:
                    streams = [self._incoming[expert, source][number] for source in self._tables.subscribers[expert]]
                    moment.add_up(streams, divisor, parameter.grad)
        self._site_sums = {}

    def _update(self, step: Step | None, expert: int, number: int) -> Update | None:
        if step is None:
            return None
        parameter, moment = self._parameters[expert][number], self._moments.get((expert, number))
        return step(parameter, None if moment is None else moment.of(parameter.grad))

    def _mean_for(self, spec: str) -> SharedWeights | None:
        if spec.partition(":")[0] != SharedResidual.NAME:
            return None
        return SharedWeights(
            self._layer,
            len(self._tables.route),
            self._shapes,
            self._parameters,
            period=int(options_of(spec)["t_shared"]),
            device=self._like.device,
            collectives=self._collectives,
        )

    def _renew(self, mean: SharedWeights) -> None:
        """Take the mean that is due with this version, when all that was told apart from the last one is decoded."""
        if mean.before_publish(self._version):
            self._receive_until(self._version - 1)
            self._weights.share(mean.tensors, mean.number)

    def _home_leaf(self, parameter: torch.nn.Parameter, old: torch.Tensor) -> torch.Tensor:
        """A leaf over the parameter's memory, whose `.grad` collects what is not summed over all DCs yet."""
        if old is not parameter and old.data_ptr() == parameter.data_ptr():
            return old
        leaf = parameter.detach().requires_grad_(parameter.requires_grad)
        leaf.grad = None if old is parameter else old.grad
        return leaf

    def _receive_until(self, last: int) -> None:
        while self._copy_version < last:
            self._copy_version += 1
            version = self._copy_version
            self._arrivals.finish(version)
            arrived: dict[int, Sequence[Bytes]] = dict(self._published.pop(version))
            arrived.update((expert, [payload]) for expert, payload in self._arrived.pop(version, {}).items())
            self._spread_weights(self._tables, version, arrived, self._weights_at(version))
            for expert in self._tables.copies:
                if expert not in self._tables.gateway_of:
                    self._decode_weights(version, expert, memoryview(b"".join(arrived[expert])))

    def _send_weights(self, tables: LayerTables, expert: int, payload: list[Bytes], at: Position) -> None:
        for to in tables.subscribers[expert]:
            self._wan.send(
                to,
                f"experts/{self._layer}",
                at._replace(chunk=expert),
                payload,
                traffic=Traffic.EXPERTS,
                urgency=self._layer,
            )

    def _take_in(self, version: int, expert: int, payload: memoryview) -> None:
        """Weights have arrived from another DC. Called by the background thread if nobody waits for them yet."""
        if any(expert in experts for experts in self._tables.weight_spread):
            self._arrived[version][expert] = payload
        if expert in self._leaves:
            self._decode_weights(version, expert, payload)

    def _spread_weights(
        self, tables: LayerTables, version: int, arrived: dict[int, Sequence[Bytes]], at: Position
    ) -> None:
        """Hand on inside the DC what others hold too, and add what others hand on to `arrived`.

        This stays with the training thread: its order has to be the same at all workers, and that of arrival isn't.
        """
        if tables.site_spreads:
            parcels = [
                (self._joined(chain.from_iterable(arrived[e] for e in experts)),) for experts in tables.weight_spread
            ]
            received = self._site.exchange(at, parcels)
            for experts, (blob,) in zip(tables.weight_gather, received, strict=True):
                arrived.update(self._split_weights(version, experts, memoryview(as_bytes(blob))))

    def _split_weights(self, version: int, experts: Sequence[int], blob: memoryview) -> dict[int, Sequence[Bytes]]:
        """What a neighbour handed over: the payloads of several experts, tensor by tensor."""
        codecs = [codec for e in experts for codec in self._weights.of(e, version)]
        parts = self._cut(codecs, blob)
        width = len(self._shapes)
        return {e: parts[n * width : (n + 1) * width] for n, e in enumerate(experts)}

    def _decode_weights(self, version: int, expert: int, payload: memoryview) -> None:
        with torch.no_grad(), self._span("decode", "weights", expert):
            for codec, leaf, part in self._parts(self._weights.of(expert, version), self._leaves[expert], payload):
                try:
                    codec.decode(part, leaf)
                except CodecError as error:
                    raise CodecError(f"weights of expert {expert}, layer {self._layer}: {error}") from error

    def _receive_gradient(self, expert: int, at: Position, source: Address) -> list[torch.Tensor] | None:
        message = self._wan.receive(source, f"gradients/{self._layer}", at)
        if message.counts == (0,):
            return None
        tensors = [torch.empty_like(parameter) for parameter in self._parameters[expert]]
        with self._span("decode", "gradient", expert):
            for codec, tensor, part in self._parts(self._incoming[expert, source], tensors, message.payload):
                codec.decode(part, tensor.detach())
        return tensors

    def _gather_gradients(self, at: Position) -> dict[int, list[torch.Tensor]]:
        """Sums inside the DC, in the order of its workers, at the home or the gateway of each expert."""
        own = {e: gradient for e in self._tables.held if (gradient := self._take_gradient(e)) is not None}
        by_worker = [own if worker == self._site.index else {} for worker in range(self._site.size)]
        if self._tables.site_spreads:
            self._exchange_gradients(own, by_worker, at)
        sums: dict[int, list[torch.Tensor]] = {}
        for expert in (*self._tables.homes, *self._tables.gateway_of):
            parts = [gradients[expert] for gradients in by_worker if expert in gradients]
            if parts:
                sums[expert] = [sum(tensors[1:], tensors[0]) for tensors in zip(*parts, strict=True)]
        return sums

    def _exchange_gradients(
        self, own: Mapping[int, list[torch.Tensor]], by_worker: list[dict[int, list[torch.Tensor]]], at: Position
    ) -> None:
        """Hand each gradient to the worker its weights came from; put what arrives into `by_worker`."""
        parcels = []
        for experts in self._tables.weight_gather:
            flags = torch.tensor([e in own for e in experts], dtype=torch.uint8, device=self._like.device)
            values = [tensor.reshape(-1) for e in experts if e in own for tensor in own[e]]
            parcels.append((flags, torch.cat([*values, self._like.new_empty(0)])))
        received = self._site.exchange(at, parcels)
        for worker, (flags, values_from) in enumerate(received):
            spread = self._tables.weight_spread[worker]
            present = [e for e, flag in zip(spread, flags.tolist(), strict=True) if flag]
            by_worker[worker].update(zip(present, self._unflatten(values_from, len(present)), strict=True))

    def _take_gradient(self, expert: int) -> list[torch.Tensor] | None:
        leaves = self._leaves[expert]
        gradient = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        present = [tensor for tensor in gradient if tensor is not None]
        return present if len(present) == len(leaves) else None

    def _unflatten(self, values: torch.Tensor, experts: int) -> list[list[torch.Tensor]]:
        sizes = [rows * columns for rows, columns in self._shapes] * experts
        if len(values) != sum(sizes):
            raise CodecError(f"{len(values)} gradient values where {sum(sizes)} were expected")
        tensors = [part.view(shape) for part, shape in zip(values.split(sizes), [*self._shapes] * experts, strict=True)]
        width = len(self._shapes)
        return [tensors[i : i + width] for i in range(0, len(tensors), width)]

    def _joined(self, buffers: Iterable[Bytes]) -> torch.Tensor:
        data = bytearray().join(buffers)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.to(self._like.device)

    def _parts(
        self, codecs: Streams, tensors: Sequence[torch.Tensor], payload: memoryview
    ) -> Iterable[tuple[Codec, torch.Tensor, memoryview]]:
        return zip(codecs, tensors, self._cut(codecs, payload), strict=True)

    def _cut(self, codecs: Streams, payload: memoryview) -> list[memoryview]:
        """The payloads of the tensors of one expert or several, in order."""
        sizes = cycle(rows * columns for rows, columns in self._shapes)
        return cut_frames(payload, list(zip(codecs, sizes, strict=False)), self._like.dtype)

    def _incoming_gradients(self, spec: str) -> dict[tuple[int, Address], Streams]:
        """Codecs of what each subscribing DC returns, for the experts homed here."""
        self._gradient_spec = spec
        self._moments = {
            (expert, number): HomeMoment(moment)
            for expert, sources in self._tables.subscribers.items()
            for number, codec in enumerate(self._made(spec))
            if sources and isinstance(codec, Feedback) and (moment := codec.new_moment()) is not None
        }
        subscribers = self._tables.subscribers.items()
        return {(e, source): self._made(spec) for e, sources in subscribers for source in sources}

    def _made(self, spec: str) -> Streams:
        return [make_codec(spec) for _ in self._shapes]

    def _new_leaves(self) -> list[torch.Tensor]:
        dtype, device = self._like.dtype, self._like.device
        return [torch.zeros(shape, dtype=dtype, device=device).requires_grad_() for shape in self._shapes]

    def _new_outgoing(self) -> list[Outgoing]:
        return [Outgoing(self._gradient_spec, self._ahead) for _ in self._shapes]

    def _span(self, lane: str, what: str, expert: int) -> AbstractContextManager[None]:
        return self._trace.span(lane, f"{what} of layer {self._layer}, expert {expert}")

    def _weights_at(self, version: int) -> Position:
        return Position(version, 0, self._layer, Phase.EXPERTS)
