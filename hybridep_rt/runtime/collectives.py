"""Sums over all workers of all DCs: inside the DC first, then between the DCs, then back inside.

A vector is cut into one unit per worker of the job. In each DC one worker sums its DC's values of a unit and sends
them to the unit's owner; the owner adds the DCs up and sends the total to one worker per DC, which spreads it. Each
DC's uplink carries 2 (D-1)/D of the vector. Terms are added in the order of (DC, worker), whatever arrives first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.codecs.dense import Exact
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
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


def units_of(elements: int, layout: Layout) -> list[Unit]:
    """Near-equal consecutive shares, one for each worker of the job."""
    workers = layout.workers
    return [
        Unit(Address(*layout.locate(n)), elements * n // workers, elements * (n + 1) // workers) for n in range(workers)
    ]


class Collectives:
    """All-reduce and broadcast for one worker. All workers of all DCs call them in the same order."""

    def __init__(self, me: Address, layout: Layout, site: SiteGroup, wan: WanPort) -> None:
        self._me = me
        self._layout = layout
        self._site = site
        self._wan = wan

    def all_reduce(
        self,
        values: torch.Tensor,
        position: Position,
        combine: Combine = torch.add,
        *,
        codec: Codec = _EXACT,
        traffic: Traffic,
    ) -> torch.Tensor:
        """The sum (or what `combine` makes of two tensors) over all workers of a flat tensor, as a new tensor.

        `codec` must remember nothing; every worker gets what the others decode.
        """
        units = units_of(values.numel(), self._layout)
        by_worker = [
            [unit for unit in units if self._layout.landing(unit.owner.worker, self._me.dc) == worker]
            for worker in range(self._site.size)
        ]
        mine = by_worker[self._me.worker]
        parts = self._site.exchange(
            position, [(torch.cat([values[u.first : u.last] for u in theirs]),) for theirs in by_worker]
        )
        site_sum = reduce(combine, (part for (part,) in parts))
        totals = self._reduce_between_dcs(mine, site_sum, position, combine, codec, traffic)
        sizes = [(sum(unit.last - unit.first for unit in theirs),) for theirs in by_worker]
        spread = self._site.exchange(position, [(totals,)] * self._site.size, rows_from=sizes)
        result = torch.empty_like(values)
        for theirs, (part,) in zip(by_worker, spread, strict=True):
            for unit, piece in zip(theirs, part.split([u.last - u.first for u in theirs]), strict=True):
                result[unit.first : unit.last] = piece
        return result

    def broadcast(self, values: torch.Tensor, position: Position) -> torch.Tensor:
        """Worker 0 of DC 0's flat tensor, at every worker."""
        root = Address(0, 0)
        if self._me == root:
            payload = [_EXACT.encode(values)]
            for dc in range(1, self._layout.dcs):
                self._wan.send(Address(dc, 0), "broadcast", position, payload, traffic=Traffic.CONTROL)
        elif self._me.worker == 0:
            values = torch.empty_like(values)
            _EXACT.decode(self._wan.receive(root, "broadcast", position).payload, values)
        nothing = values.new_empty(0)
        parcels = [(values if self._me.worker == 0 else nothing,)] * self._site.size
        return self._site.exchange(position, parcels)[0][0]

    def _reduce_between_dcs(
        self,
        mine: list[Unit],
        site_sum: torch.Tensor,
        position: Position,
        combine: Combine,
        codec: Codec,
        traffic: Traffic,
    ) -> torch.Tensor:
        """The totals of the units that this worker handles for its DC, in their order."""
        pieces = dict(zip(mine, site_sum.split([u.last - u.first for u in mine]), strict=True))
        for unit in mine:
            if unit.owner != self._me and unit.last > unit.first:
                payload = [codec.encode(pieces[unit])]
                self._wan.send(unit.owner, "reduce", position, payload, traffic=traffic)
        for unit in mine:
            if unit.owner == self._me and unit.last > unit.first:
                pieces[unit] = self._total(pieces[unit], position, combine, codec, traffic)
        for unit in mine:
            if unit.owner != self._me and unit.last > unit.first:
                total = torch.empty_like(pieces[unit])
                codec.decode(self._wan.receive(unit.owner, "total", position).payload, total)
                pieces[unit] = total
        return torch.cat([pieces[unit] for unit in mine])

    def _total(
        self, own: torch.Tensor, position: Position, combine: Combine, codec: Codec, traffic: Traffic
    ) -> torch.Tensor:
        """The owner's part: add the DCs' sums in their order, tell the others, and keep what the others decode."""
        others = [
            Address(dc, self._layout.landing(self._me.worker, dc))
            for dc in range(self._layout.dcs)
            if dc != self._me.dc
        ]
        terms = []
        for source in sorted((*others, self._me)):
            term = own
            if source != self._me:
                term = torch.empty_like(own)
                codec.decode(self._wan.receive(source, "reduce", position).payload, term)
            terms.append(term)
        total = reduce(combine, terms)
        payload = codec.encode(total)
        for to in others:
            self._wan.send(to, "total", position, [payload], traffic=traffic)
        if not others:
            return total
        decoded = torch.empty_like(total)
        codec.decode(payload, decoded)
        return decoded
