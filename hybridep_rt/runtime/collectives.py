"""Sums over all workers of all DCs: inside the DC first, then between the DCs, then back inside.

A vector is cut into one unit per worker of the job. In each DC one worker sums its DC's values of a unit and sends
them to the unit's owner; the owner adds the DCs up and sends the total to one worker per DC, which spreads it. Each
DC's uplink carries 2 (D-1)/D of the vector. Terms are added in the order of (DC, worker), whatever arrives first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.dense import Exact
from hybridep_rt.codecs.outgoing import Outgoing
from hybridep_rt.errors import CodecError
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Bytes, Message, Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.transport.ports import SiteGroup, WanPort

_EXACT = Exact()

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Unit:
    """The elements first..last-1, owned by one worker."""

    owner: Address
    first: int
    last: int

    @property
    def elements(self) -> int:
        """How many there are; maybe none."""
        return self.last - self.first


def units_of(elements: int, layout: Layout) -> list[Unit]:
    """Near-equal consecutive shares, one for each worker of the job."""
    workers = layout.workers
    return [
        Unit(Address(*layout.locate(n)), elements * n // workers, elements * (n + 1) // workers) for n in range(workers)
    ]


_TOTAL = "total."


def _split(name: str) -> tuple[str, str]:
    dc, worker, rest = name.split(".", 2)
    return f"{dc}.{worker}.", rest


class VectorCodecs:
    """How one vector travels that is summed again and again.

    A DC's sum of a unit is one stream, the unit's total another: each has its own error feedback at its sender.
    """

    def __init__(self, spec: str = "exact") -> None:
        self._spec = spec
        self._sums: dict[Address, Outgoing] = {}
        self.total = Outgoing(spec)
        self.decoder = make_codec(spec)

    def sum_to(self, owner: Address) -> Outgoing:
        """The stream of this DC's sums of the unit that `owner` has."""
        if owner not in self._sums:
            self._sums[owner] = Outgoing(self._spec)
        return self._sums[owner]

    def change(self, spec: str) -> None:
        """Use another codec from the next sum on; what is still owed is added to it. Every worker has to call it."""
        for outgoing in (self.total, *self._sums.values()):
            outgoing.change(spec)
        self._spec, self.decoder = spec, make_codec(spec)

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: what every stream that leaves here remembers."""
        streams = {_TOTAL: self.total} | {f"{to.dc}.{to.worker}.": stream for to, stream in self._sums.items()}
        return {prefix + name: part for prefix, stream in streams.items() for name, part in stream.state().items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        streams: dict[str, dict[str, torch.Tensor]] = {}
        for name, part in state.items():
            prefix, rest = (_TOTAL, name.removeprefix(_TOTAL)) if name.startswith(_TOTAL) else _split(name)
            streams.setdefault(prefix, {})[rest] = part
        for prefix, found in streams.items():
            stream = self.total if prefix == _TOTAL else self.sum_to(Address(*map(int, prefix.split(".")[:2])))
            stream.load_state(found)

    def owed_norm(self) -> float:
        """Euclidean norm of what this worker owes the others."""
        return math.hypot(*(outgoing.owed_norm() for outgoing in (self.total, *self._sums.values())))


class Collectives:
    """All-reduce and broadcast for one worker. All workers of all DCs call them in the same order."""

    def __init__(self, me: Address, layout: Layout, site: SiteGroup, wan: WanPort) -> None:
        self.me = me
        self.layout = layout
        self.site = site
        self.wan = wan

    def all_reduce(
        self, values: torch.Tensor, position: Position, combine: Combine = torch.add, *, traffic: Traffic
    ) -> torch.Tensor:
        """The sum (or what `combine` makes of two tensors) over all workers of a flat tensor, as a new tensor."""
        return self.all_reduce_vectors([(values, VectorCodecs())], position, combine, traffic=traffic)[0]

    def all_reduce_vectors(
        self,
        vectors: Sequence[tuple[torch.Tensor, VectorCodecs]],
        position: Position,
        combine: Combine = torch.add,
        *,
        traffic: Traffic,
    ) -> list[torch.Tensor]:
        """`all_reduce` of up to six vectors at once, each in its codecs. Every worker gets the same bits."""
        reduction = Reduction(self, vectors, position, combine, traffic=traffic)
        reduction.send_totals()
        return reduction.result()

    def broadcast(self, values: torch.Tensor, position: Position) -> torch.Tensor:
        """Worker 0 of DC 0's flat tensor, at every worker."""
        root = Address(0, 0)
        if self.me == root:
            payload = [_EXACT.encode(values)]
            for dc in range(1, self.layout.dcs):
                self.wan.send(Address(dc, 0), "broadcast", position, payload, traffic=Traffic.CONTROL)
        elif self.me.worker == 0:
            values = torch.empty_like(values)
            _EXACT.decode(self.wan.receive(root, "broadcast", position).payload, values)
        nothing = values.new_empty(0)
        parcels = [(values if self.me.worker == 0 else nothing,)] * self.site.size
        return self.site.exchange(position, parcels)[0][0]


class Reduction:
    """One all-reduce in three moments, so that its transfers may hide behind what is done in between.

    Made: summed inside the DC, and sums on their way to the owners of units. `send_totals`: owners wait for them, and
    totals are on their way. `result`: waits for totals. All workers have to be at each moment in the same order.
    """

    def __init__(
        self,
        collectives: Collectives,
        vectors: Sequence[tuple[torch.Tensor, VectorCodecs]],
        position: Position,
        combine: Combine = torch.add,
        *,
        traffic: Traffic,
        channel: str = "",
    ) -> None:
        self._at = collectives
        self._codecs = [codecs for _, codecs in vectors]
        self._sizes = [values.numel() for values, _ in vectors]
        self._position = position
        self._combine = combine
        self._traffic = traffic
        self._sum_channel, self._total_channel = f"reduce{channel}", f"total{channel}"
        layout, me, site = self._at.layout, self._at.me, self._at.site
        units = list(zip(*(units_of(size, layout) for size in self._sizes), strict=True))
        self._by_worker = [
            [unit for unit in units if layout.landing(unit[0].owner.worker, me.dc) == worker]
            for worker in range(site.size)
        ]
        parcels = [
            tuple(
                torch.cat([values[unit[n].first : unit[n].last] for unit in theirs])
                for n, (values, _) in enumerate(vectors)
            )
            for theirs in self._by_worker
        ]
        parts = zip(*site.exchange(position, parcels), strict=True)
        self._pieces = self._split([reduce(combine, part) for part in parts], self._by_worker[me.worker])
        self._foreign = [unit for unit in self._by_worker[me.worker] if unit[0].owner != me and _is_any(unit)]
        for unit in self._foreign:
            owner = unit[0].owner
            outgoing = [codecs.sum_to(owner) for codecs in self._codecs]
            self._send(owner, self._sum_channel, self._encoded(unit, outgoing))

    def send_totals(self) -> None:
        """At the owner of a unit: add the DCs' sums in their order, tell the others, keep what the others decode."""
        me, layout = self._at.me, self._at.layout
        for unit in self._by_worker[me.worker]:
            if unit[0].owner != me or not _is_any(unit):
                continue
            others = [Address(dc, layout.landing(me.worker, dc)) for dc in range(layout.dcs) if dc != me.dc]
            own = self._pieces[me]
            terms = [
                own if source == me else self._received(unit, source, self._sum_channel)
                for source in sorted((*others, me))
            ]
            self._pieces[me] = [reduce(self._combine, term) for term in zip(*terms, strict=True)]
            if others:
                payload = self._encoded(unit, [codecs.total for codecs in self._codecs])
                for to in others:
                    self._send(to, self._total_channel, payload)
                self._pieces[me] = self._decoded(unit, memoryview(b"".join(payload)))

    def result(self) -> list[torch.Tensor]:
        """The sums, as new tensors."""
        for unit in self._foreign:
            self._pieces[unit[0].owner] = self._received(unit, unit[0].owner, self._total_channel)
        mine = [self._pieces[unit[0].owner] for unit in self._by_worker[self._at.me.worker]]
        totals = tuple(torch.cat(column) for column in zip(*mine, strict=True))
        rows = [[sum(unit[n].elements for unit in theirs) for n in range(len(totals))] for theirs in self._by_worker]
        spread = self._at.site.exchange(self._position, [totals] * self._at.site.size, rows_from=rows)
        results = [total.new_empty(size) for total, size in zip(totals, self._sizes, strict=True)]
        for theirs, parts in zip(self._by_worker, spread, strict=True):
            pieces = self._split(parts, theirs)
            for unit in theirs:
                for result, each, piece in zip(results, unit, pieces[unit[0].owner], strict=True):
                    result[each.first : each.last] = piece
        return results

    def _split(
        self, vectors: Sequence[torch.Tensor], units: Sequence[tuple[Unit, ...]]
    ) -> dict[Address, list[torch.Tensor]]:
        """By the owner of each unit, its piece of each vector."""
        columns = [vector.split([unit[n].elements for unit in units]) for n, vector in enumerate(vectors)]
        return {unit[0].owner: [column[row] for column in columns] for row, unit in enumerate(units)}

    def _encoded(self, unit: tuple[Unit, ...], outgoing: Sequence[Outgoing]) -> list[Bytes]:
        pieces = self._pieces[unit[0].owner]
        return [each.encode(piece) for each, piece in zip(outgoing, pieces, strict=True) if piece.numel()]

    def _decoded(self, unit: tuple[Unit, ...], payload: memoryview) -> list[torch.Tensor]:
        tensors = []
        for codecs, like in zip(self._codecs, self._pieces[unit[0].owner], strict=True):
            tensor = torch.empty_like(like)
            if tensor.numel():
                size = codecs.decoder.frame_bytes(payload, tensor.numel(), tensor.dtype)
                codecs.decoder.decode(payload[:size], tensor)
                payload = payload[size:]
            tensors.append(tensor)
        if payload.nbytes:
            raise CodecError(f"{payload.nbytes} bytes after the last vector of a sum")
        return tensors

    def _received(self, unit: tuple[Unit, ...], source: Address, channel: str) -> list[torch.Tensor]:
        message: Message = self._at.wan.receive(source, channel, self._position)
        return self._decoded(unit, message.payload)

    def _send(self, to: Address, channel: str, payload: list[Bytes]) -> None:
        self._at.wan.send(to, channel, self._position, payload, traffic=self._traffic)


def _is_any(unit: tuple[Unit, ...]) -> bool:
    return any(each.elements for each in unit)
