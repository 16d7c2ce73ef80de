"""The workers of one DC over torch.distributed: NCCL where tensors live on GPUs, gloo on CPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridep_rt.errors import ConfigError, DeadlineExceeded, HybridEPError, PeerLost, PositionMismatch
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.transport.ports import WanPort

if TYPE_CHECKING:
    from hybridep_rt.transport.ports import Parcel

_HEADER = 12
"""int64 values that go ahead of a parcel: the position's six fields, then the rows of up to six tensors."""
_POSITION = len(Position._fields)
_ALIGNMENT = 16
_EXPLANATION_S = 2.0
"""When a collective fails, the coordinator usually knows why: how long to wait for its word."""


def open_site(wan: WanPort, size: int, *, host: str, dc_name: str, timeout_s: float) -> SoloSite | TorchSite:
    """The group of this worker's DC; every worker of the DC calls it. `host`: worker 0's address inside the DC.

    Raises ConfigError where torch.distributed was initialised for another set of processes, DeadlineExceeded, PeerLost.
    """
    if size == 1:
        return SoloSite()
    if not dist.is_initialized():
        store = _store(wan, size, host, timeout_s)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=store, rank=wan.address.worker, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    if dist.get_world_size() != size:
        raise ConfigError(
            f'torch.distributed has {dist.get_world_size()} processes, DC "{dc_name}" has {size} workers: '
            "call hybridep_rt.init() first and leave init_process_group to it"
        )
    return TorchSite(wan, dc_name, timeout_s)


class SoloSite:
    """A DC of one worker."""

    index = 0
    size = 1

    def exchange(
        self, position: Position, parcels: Sequence[Parcel], rows_from: Sequence[Sequence[int]] | None = None
    ) -> list[list[torch.Tensor]]:
        """Everything goes to oneself."""
        del position, rows_from
        return [list(parcels[0])]

    def close(self) -> None:
        """Nothing to free."""


class TorchSite:
    """A SiteGroup over the default process group.

    An exchange is two all-to-alls: a small one with positions and row counts, which finds workers that diverged before
    any size can mismatch, and one with all bytes. An answer, whose sizes all know, is only the second.
    """

    def __init__(self, wan: WanPort, dc_name: str, timeout_s: float) -> None:
        self.index = dist.get_rank()
        self.size = dist.get_world_size()
        self._wan = wan
        self._dc_name = dc_name
        self._timeout_s = timeout_s

    def exchange(
        self, position: Position, parcels: Sequence[Parcel], rows_from: Sequence[Sequence[int]] | None = None
    ) -> list[list[torch.Tensor]]:
        """See `SiteGroup.exchange`. Parcels have at most six tensors."""
        own = parcels[self.index]
        device = own[0].device
        if rows_from is None:
            rows_from = self._exchange_headers(position, parcels, device)
        row_bytes = [math.prod(t.shape[1:]) * t.dtype.itemsize for t in own]
        sizes_to = [0 if i == self.index else _packed_bytes(map(len, p), row_bytes) for i, p in enumerate(parcels)]
        sizes_from = [0 if i == self.index else _packed_bytes(rows, row_bytes) for i, rows in enumerate(rows_from)]
        outgoing = torch.empty(sum(sizes_to), dtype=torch.uint8, device=device)
        start = 0
        for i, parcel in enumerate(parcels):
            if i != self.index:
                _pack(parcel, outgoing[start : start + sizes_to[i]])
                start += sizes_to[i]
        incoming = torch.empty(sum(sizes_from), dtype=torch.uint8, device=device)
        self._all_to_all(incoming, outgoing, sizes_from, sizes_to, position)
        received, start = [], 0
        for i, rows in enumerate(rows_from):
            if i == self.index:
                received.append(list(own))
            else:
                received.append(_unpack(incoming[start : start + sizes_from[i]], rows, own))
                start += sizes_from[i]
        return received

    def close(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _exchange_headers(self, position: Position, parcels: Sequence[Parcel], device: torch.device) -> list[list[int]]:
        """Rows of each tensor that each worker sends to this one."""
        place = [int(value) for value in position]
        width = len(parcels[self.index])
        head = [[*place, *map(len, parcel), *[0] * (_HEADER - _POSITION - width)] for parcel in parcels]
        outgoing = torch.tensor(head, dtype=torch.int64, device=device)
        incoming = torch.empty_like(outgoing)
        self._all_to_all(incoming, outgoing, None, None, position)
        theirs = incoming.tolist()
        for worker, header in enumerate(theirs):
            if header[:_POSITION] != place:
                raise PositionMismatch(
                    mine=position.describe(),
                    peer=f'worker {worker} of DC "{self._dc_name}"',
                    theirs=_position(header).describe(),
                )
        return [header[_POSITION : _POSITION + width] for header in theirs]

    def _all_to_all(
        self,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        sizes_from: list[int] | None,
        sizes_to: list[int] | None,
        position: Position,
    ) -> None:
        started = time.monotonic()
        try:
            dist.all_to_all_single(incoming, outgoing, sizes_from, sizes_to)
        except RuntimeError as error:
            raise self._explain(error, position, time.monotonic() - started, incoming.nbytes) from error

    def _explain(self, error: RuntimeError, position: Position, waited_s: float, nbytes: int) -> HybridEPError:
        """The coordinator's reason, if it has one; else what the collective said."""
        deadline = time.monotonic() + _EXPLANATION_S
        dc, me = self._wan.address
        neighbours = [Address(dc, worker) for worker in range(self.size) if worker != me]
        while time.monotonic() < deadline:
            try:
                self._wan.expect(neighbours, position)
            except HybridEPError as reason:
                return reason
            time.sleep(0.02)
        peer = f'another worker of DC "{self._dc_name}"'
        if "timed out" in str(error).lower():
            layer = position.layer if position.layer >= 0 else None
            return DeadlineExceeded(
                peer=peer, operation=position.describe(), layer=layer, waited_s=waited_s, bytes_outstanding=nbytes
            )
        return PeerLost(peer, f"{position.describe()}: {str(error).splitlines()[0]}")


def _store(wan: WanPort, size: int, host: str, timeout_s: float) -> TCPStore:
    """Where the DC's workers meet: worker 0 opens it and tells the others."""
    place = Position(0, 0, -1, Phase.ATTACH)
    timeout = timedelta(seconds=timeout_s)
    if wan.address.worker == 0:
        store = TCPStore(host, 0, size, True, timeout=timeout, wait_for_workers=False)
        for worker in range(1, size):
            payload = [store.port.to_bytes(4, "big")]
            wan.send(Address(wan.address.dc, worker), "site", place, payload, traffic=Traffic.CONTROL)
        return store
    port = int.from_bytes(wan.receive(Address(wan.address.dc, 0), "site", place).payload, "big")
    return TCPStore(host, port, size, False, timeout=timeout)


def _position(header: Sequence[int]) -> Position:
    step, micro_batch, layer, phase, chunk, training = header[:_POSITION]
    return Position(step, micro_batch, layer, Phase(phase), chunk, bool(training))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _packed_bytes(rows: Sequence[int] | map[int], row_bytes: Sequence[int]) -> int:
    return sum(_padded(count * width) for count, width in zip(rows, row_bytes, strict=True))


def _pack(parcel: Parcel, into: torch.Tensor) -> None:
    start = 0
    for tensor in parcel:
        if tensor.numel():
            into[start : start + tensor.nbytes] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        start += _padded(tensor.nbytes)


def _unpack(packed: torch.Tensor, rows: Sequence[int], like: Parcel) -> list[torch.Tensor]:
    tensors, start = [], 0
    for count, template in zip(rows, like, strict=True):
        shape = (count, *template.shape[1:])
        nbytes = math.prod(shape) * template.dtype.itemsize
        tensors.append(packed[start : start + nbytes].view(template.dtype).reshape(shape))
        start += _padded(nbytes)
    return tensors
