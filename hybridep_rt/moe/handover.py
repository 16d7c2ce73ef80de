"""One layer changes plans between two steps, at one worker: what it sends, and what it takes in.

An expert that changes homes travels as one record: its tensors, what the optimizer keeps about them, and the state of
its streams, so that copies elsewhere go on undisturbed. A stream of gradients that ends sends what it owes, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hybridep_rt.codecs.record import Record, Value, pack, unpack
from hybridep_rt.codecs.streams import load_stream_state, stream_state
from hybridep_rt.errors import CodecError
from hybridep_rt.moe.change import LayerChange, Move
from hybridep_rt.moe.holdings import Holdings
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.ownership import Ownership
from hybridep_rt.transport.ports import WanPort

Shapes = Sequence[tuple[int, int]]


class Handover:
    """`at`: the position of the change, with the layer's number."""

    def __init__(self, change: LayerChange, holdings: Holdings, me: Address, wan: WanPort, at: Position) -> None:
        self._holdings = holdings
        self._me = me
        self._wan = wan
        self._at = at
        self.leaving = [move for move in change.moves if move.source == me]
        self.coming = [move for move in change.moves if move.to == me]
        self._ending = [end for end in change.ended if end.source == me]
        self._owing = [end for end in change.ended if end.to == me]
        self._owed: dict[tuple[int, Address], Record] = {}

    def settle_debts(self) -> None:
        """Send what the streams of gradients that end here still owe. Does not wait."""
        for end in self._ending:
            owed = [stream.flush() for stream in self._holdings.outgoing[end.expert]]
            record: Record = {str(n): values for n, values in enumerate(owed) if values is not None}
            if end.to == self._me:
                self._owed[end.expert, self._me] = record
            else:
                self._send(end, "owed", record)

    def collect_debts(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        """Wait for what the streams that ended owed, and keep it for the next sum. Called once homes have moved."""
        for end in self._owing:
            record = self._owed.pop((end.expert, end.source), None)
            record = self._receive(end, "owed") if record is None else record
            owed = _tensors(record, shapes)
            if owed:
                owed = [tensor.to(device, dtype) for tensor in owed]
                before = self._holdings.carried.get(end.expert)
                self._holdings.carried[end.expert] = (
                    owed if before is None else [a + b for a, b in zip(before, owed, strict=True)]
                )

    def send_expert(self, move: Move, parameters: Sequence[nn.Parameter], ownership: Ownership) -> None:
        """Give an expert away. Does not wait."""
        record: Record = {}
        for number, parameter in enumerate(parameters):
            record |= _prefixed(f"tensor.{number}.", {"value": parameter.detach(), **ownership.release(parameter)})
        record |= home_state(self._holdings, move.expert)
        self._send(move, "experts-moved", record)

    def receive_expert(self, move: Move, shapes: Shapes) -> tuple[list[torch.Tensor], Record]:
        """Wait for an expert that comes here: its tensors, and the record that `adopt` and `load_home_state` read."""
        record = self._receive(move, "experts-moved")
        values = [record.get(f"tensor.{number}.value") for number in range(len(shapes))]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if [tuple(tensor.shape) for tensor in tensors] != [tuple(shape) for shape in shapes]:
            raise CodecError(f"expert {move.expert} arrived with tensors of other shapes than {list(shapes)}")
        return tensors, record

    def _send(self, move: Move, channel: str, record: Record) -> None:
        layer = self._at.layer
        at = self._at._replace(chunk=move.expert)
        self._wan.send(move.to, f"{channel}/{layer}", at, pack(record), traffic=Traffic.EXPERTS, urgency=layer)

    def _receive(self, move: Move, channel: str) -> Record:
        at = self._at._replace(chunk=move.expert)
        return unpack(self._wan.receive(move.source, f"{channel}/{self._at.layer}", at).payload)


def part_of(record: Mapping[str, Value], prefix: str) -> Record:
    """The entries whose names begin so, without it."""
    return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


def home_state(holdings: Holdings, expert: int) -> Record:
    """What a worker remembers about an expert homed there, beside its tensors."""
    record: Record = {}
    for name, streams in holdings.home_streams(expert).items():
        record |= streams_state(f"{name}.", streams)
    carried = holdings.carried.get(expert, [])
    return record | {f"carried.{number}": tensor for number, tensor in enumerate(carried)}


def load_home_state(holdings: Holdings, expert: int, record: Mapping[str, Value], like: torch.Tensor) -> None:
    """Go on with an expert that is homed here now. Streams that its record doesn't know begin anew."""
    for name, streams in holdings.home_streams(expert).items():
        load_streams_state(streams, part_of(record, f"{name}."), like.device)
    carried = [value for value in part_of(record, "carried.").values() if isinstance(value, torch.Tensor)]
    if carried:
        holdings.carried[expert] = [tensor.to(like.device, like.dtype) for tensor in carried]


def layer_state(holdings: Holdings) -> Record:
    """What a worker remembers of a layer beside tensors of experts and optimizer: for a checkpoint."""
    record: Record = {}
    for expert in holdings.homes:
        record |= _prefixed(f"home.{expert}.", home_state(holdings, expert))
    for expert, streams in holdings.outgoing.items():
        record |= streams_state(f"outgoing.{expert}.", streams)
    return record


def load_layer_state(holdings: Holdings, record: Mapping[str, Value], like: torch.Tensor) -> None:
    """Go on from a checkpoint under the same plan."""
    for expert in holdings.homes:
        load_home_state(holdings, expert, part_of(record, f"home.{expert}."), like)
    for expert, streams in holdings.outgoing.items():
        load_streams_state(streams, part_of(record, f"outgoing.{expert}."), like.device)


def streams_state(prefix: str, streams: Sequence[object]) -> Record:
    """The states of an expert's codecs, one for each of its tensors."""
    record: Record = {}
    for number, stream in enumerate(streams):
        record |= _prefixed(f"{prefix}{number}.", stream_state(stream))
    return record


def load_streams_state(streams: Sequence[object], record: Mapping[str, Value], device: torch.device) -> None:
    """The inverse of `streams_state`, without its prefix."""
    for number, stream in enumerate(streams):
        state = part_of(record, f"{number}.")
        load_stream_state(stream, {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}, device)


def _tensors(record: Record, shapes: Shapes) -> list[torch.Tensor]:
    """What an expert's streams owed; nothing where they owed nothing yet."""
    found = [record[str(number)] for number in range(len(shapes)) if str(number) in record]
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    sizes = [rows * columns for rows, columns in shapes]
    if tensors and [tensor.numel() for tensor in tensors] != sizes:
        raise CodecError(f"debts of {[tensor.numel() for tensor in tensors]} values, where {sizes} were expected")
    return [tensor.view(shape) for tensor, shape in zip(tensors, shapes, strict=False)]


def _prefixed(prefix: str, record: Mapping[str, Value]) -> Record:
    return {prefix + name: value for name, value in record.items()}
