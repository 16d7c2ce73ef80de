"""What a message's header says besides sizes: from whom, to whom, in which channel, at which position."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from hybridep_rt.errors import LocalProtocolError, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.position import Phase, Position

CHANNEL_CHARACTERS = 64
_INDEX_END = 1 << 20
_NUMBER_END = 1 << 62
_PHASES = {int(phase): phase for phase in Phase}


class Envelope(NamedTuple):
    """The metadata of one message. A lower `urgency` goes first within a class of traffic."""

    source: Address
    to: Address
    channel: str
    position: Position
    counts: tuple[int, ...] = ()
    urgency: int = 0


def encode_envelope(envelope: Envelope) -> bytes:
    """The envelope's bytes. Raises LocalProtocolError if a field is out of bounds."""
    fields = (envelope.source, envelope.to, envelope.channel, envelope.position, envelope.counts, envelope.urgency)
    try:
        _check(fields)
    except ValueError as error:
        raise LocalProtocolError(f"message can't be sent: {error}") from None
    encoded: bytes = msgpack.packb(fields)
    return encoded


def decode_envelope(raw: bytes) -> Envelope:
    """The envelope in hostile bytes. Raises RemoteProtocolError if a field is missing, mistyped or out of bounds."""
    fields = unpack(raw)
    try:
        _check(fields)
    except ValueError as error:
        raise RemoteProtocolError(f"message metadata: {error}") from None
    source, to, channel, (step, micro_batch, layer, phase, chunk, training), counts, urgency = fields
    position = Position(step, micro_batch, layer, _PHASES[phase], chunk, training)
    return Envelope(Address(*source), Address(*to), channel, position, counts, urgency)


def unpack(raw: bytes) -> Any:
    """Plain values (lists become tuples) in hostile bytes. Raises RemoteProtocolError."""
    try:
        return msgpack.unpackb(raw, use_list=False, max_ext_len=0)
    except Exception as error:  # the unpacker documents no closed set of errors for broken input
        raise RemoteProtocolError(f"metadata is not msgpack: {type(error).__name__}") from None


def _check(fields: Any) -> None:
    if type(fields) is not tuple or len(fields) != 6:
        raise ValueError("six fields are needed")
    source, to, channel, position, counts, urgency = fields
    if not (isinstance(source, tuple) and isinstance(to, tuple) and len(source) == len(to) == 2):
        raise ValueError("source and to must have 2 entries")
    _check_integers("a DC", (source[0], to[0]), 0, _INDEX_END)
    _check_integers("a worker", (source[1], to[1]), COORDINATOR, _INDEX_END)
    if type(channel) is not str or not 0 < len(channel) <= CHANNEL_CHARACTERS:
        raise ValueError(f"channel must be a string of 1 to {CHANNEL_CHARACTERS} characters")
    _check_position(position)
    if not isinstance(counts, tuple):
        raise ValueError("counts must be a sequence")
    _check_integers("counts", counts, -_NUMBER_END, _NUMBER_END)
    _check_integers("urgency", (urgency,), -_NUMBER_END, _NUMBER_END)


def _check_position(position: Any) -> None:
    if not isinstance(position, tuple) or len(position) != 6:
        raise ValueError("position must have 6 entries")
    step, micro_batch, layer, phase, chunk, training = position
    _check_integers("position", (step, micro_batch, layer, chunk), -1, _NUMBER_END)
    if not isinstance(phase, int) or phase is True or phase not in _PHASES:
        raise ValueError("unknown phase")
    if type(training) is not bool:
        raise ValueError("training must be a boolean")


def _check_integers(name: str, values: tuple[Any, ...], start: int, end: int) -> None:
    for value in values:
        if type(value) is not int or not start <= value < end:
            raise ValueError(f"{name} must be an integer in [{start}, {end})")
