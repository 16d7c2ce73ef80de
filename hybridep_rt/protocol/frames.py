"""Frames: the bytes on every link. A fixed header, msgpack metadata, then raw payload.

    magic 4 | version 1 | kind 1 | traffic 1 | flags 1 | message id 8 | sequence 8
    | metadata bytes 4 | payload bytes of this frame 4 | payload bytes of the whole message 8 | crc32 of the header 4

A message is one or more MESSAGE frames: the first carries the metadata, and frames of other messages may come between
them. Every other kind is one frame of metadata only. The sequence number counts the frames of one direction of a link
(a link that resumes would say the last one it saw). The payload has no checksum: TLS sees to that.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.envelope import Envelope, decode_envelope, unpack
from hybridep_rt.protocol.messages import Bytes, Message, Traffic

MAGIC = b"HyEP"
VERSION = 1
FIRST = 1
LAST = 2
HANDSHAKE_METADATA_BYTES = 2048

_HEADER = struct.Struct(">4sBBBBQQIIQ")
_CHECKSUM = struct.Struct(">I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    HEARTBEAT = 6
    GOODBYE = 7
    SITE_READY = 8
    READY = 9
    DEPART = 10
    FAIL = 11
    MESSAGE = 16


_KINDS = {int(kind): kind for kind in Kind}
_TRAFFIC = {int(traffic): traffic for traffic in Traffic}


class Frame(NamedTuple):
    """One frame to be sent, without its sequence number."""

    kind: Kind
    traffic: Traffic
    flags: int
    message_id: int
    metadata: bytes
    payload: tuple[memoryview, ...]
    payload_bytes: int
    total_bytes: int


class Header(NamedTuple):
    """A frame's header whose checksum is right; nothing else is checked yet."""

    kind: int
    traffic: int
    flags: int
    message_id: int
    sequence: int
    metadata_bytes: int
    payload_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Control:
    """A frame without payload arrived. `raw` are the bytes of its metadata, `fields` their (unchecked) meaning."""

    kind: Kind
    raw: bytes
    fields: Any


@dataclass(frozen=True, slots=True)
class Arrived:
    """The last byte of a message arrived. `metadata` are the bytes of its envelope, to be passed on as they are."""

    message: Message
    traffic: Traffic
    urgency: int
    metadata: bytes


def control_frame(kind: Kind, metadata: bytes) -> Frame:
    """A frame without payload."""
    return Frame(kind, Traffic.CONTROL, FIRST | LAST, 0, metadata, (), 0, 0)


def pack_fields(**fields: Any) -> bytes:
    """Metadata of a frame without payload."""
    packed: bytes = msgpack.packb(fields)
    return packed


def encode_frame(frame: Frame, sequence: int) -> bytes:
    """Header and metadata of the frame; the payload follows as it is."""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        frame.kind,
        frame.traffic,
        frame.flags,
        frame.message_id,
        sequence,
        len(frame.metadata),
        frame.payload_bytes,
        frame.total_bytes,
    )
    return header + _CHECKSUM.pack(zlib.crc32(header)) + frame.metadata


def decode_header(raw: Bytes) -> Header:
    """Parse `HEADER_BYTES` hostile bytes. Raises RemoteProtocolError."""
    magic, version, *fields = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise RemoteProtocolError("not a HybridEP frame")
    if _CHECKSUM.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]):
        raise RemoteProtocolError("a frame's header is damaged")
    if version != VERSION:
        raise RemoteProtocolError(f"frame version {version}, this side speaks {VERSION}")
    return Header(*fields)


class _Partial:
    """A message of which some payload is still to come."""

    __slots__ = ("envelope", "filled", "metadata", "payload", "traffic")

    def __init__(self, metadata: bytes, envelope: Envelope, traffic: int, total_bytes: int) -> None:
        self.metadata = metadata
        self.envelope = envelope
        self.traffic = traffic
        # np.empty neither clears the memory nor takes it from the system before bytes arrive.
        self.payload = np.empty(total_bytes, np.uint8).data if total_bytes else memoryview(bytearray())
        self.filled = 0

    def arrived(self) -> Arrived:
        to = self.envelope
        message = Message(to.source, to.to, to.channel, to.position, self.payload, to.counts)
        return Arrived(message, _TRAFFIC[self.traffic], to.urgency, self.metadata)


class FrameDecoder:
    """Hostile bytes -> Control and Arrived events, or RemoteProtocolError; after an error it stays broken.

    Made for `asyncio.BufferedProtocol`: fill `buffer()`, say `received(n)`, then take `next_event()` until it is None.
    The buffer is a scratch area for headers, metadata and small payloads; the rest of a large payload goes straight
    into the message's own memory. Until `allow_messages()` only small control frames are accepted.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._scratch = memoryview(bytearray(HEADER_BYTES + max(limits.metadata_bytes, HANDSHAKE_METADATA_BYTES)))
        self._start = self._end = 0
        self._direct = False
        self._messages_allowed = False
        self._sequence = 0
        self._header: Header | None = None
        self._partials: dict[int, _Partial] = {}
        self._current: _Partial | None = None
        self._missing = 0
        self._broken: str | None = None

    def allow_messages(self) -> None:
        """The peer has proved who it is: accept messages and full-sized metadata from now on."""
        self._messages_allowed = True

    def buffer(self) -> memoryview:
        """Where the next bytes have to be put; never empty."""
        self._direct = self._current is not None and self._missing > 0 and self._start == self._end
        if self._direct and self._current is not None:
            return self._current.payload[self._current.filled : self._current.filled + self._missing]
        if self._start:
            held = self._end - self._start
            self._scratch[:held] = self._scratch[self._start : self._end]
            self._start, self._end = 0, held
        return self._scratch[self._end :]

    def received(self, nbytes: int) -> None:
        """`nbytes` were put at the start of the last `buffer()`."""
        if self._direct and self._current is not None:
            self._current.filled += nbytes
            self._missing -= nbytes
        else:
            self._end += nbytes

    def feed(self, data: Bytes) -> list[Control | Arrived]:
        """All events of a whole byte string, for callers that have no buffer to fill."""
        events: list[Control | Arrived] = []
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            nbytes = min(len(room), len(rest))
            room[:nbytes] = rest[:nbytes]
            self.received(nbytes)
            rest = rest[nbytes:]
            while (event := self.next_event()) is not None:
                events.append(event)
        return events

    def next_event(self) -> Control | Arrived | None:
        """The next event that the received bytes complete, or None. Raises RemoteProtocolError."""
        if self._broken is not None:
            raise RemoteProtocolError(self._broken)
        try:
            return self._advance()
        except RemoteProtocolError as error:
            self._broken = str(error)
            self._partials.clear()
            raise

    def _advance(self) -> Control | Arrived | None:
        while True:
            if self._current is not None:
                self._take_payload(self._current)
                if self._missing:
                    return None
                event: Control | Arrived | None = self._end_of_frame(self._current)
            elif self._take_header() and self._header is not None and self._held >= self._header.metadata_bytes:
                event = self._begin_frame(self._header)
            else:
                return None
            if event is not None:
                return event

    @property
    def _held(self) -> int:
        return self._end - self._start

    def _take(self, nbytes: int) -> memoryview:
        self._start += nbytes
        return self._scratch[self._start - nbytes : self._start]

    def _take_header(self) -> bool:
        if self._header is None and self._held >= HEADER_BYTES:
            header = decode_header(self._take(HEADER_BYTES))
            self._check(header)
            self._sequence += 1
            self._header = header
        return self._header is not None

    def _begin_frame(self, header: Header) -> Control | None:
        metadata = bytes(self._take(header.metadata_bytes))
        if header.kind != Kind.MESSAGE:
            self._header = None
            return Control(_KINDS[header.kind], metadata, unpack(metadata))
        if header.flags & FIRST:
            envelope = decode_envelope(metadata)
            self._partials[header.message_id] = _Partial(metadata, envelope, header.traffic, header.total_bytes)
        self._current = self._partials[header.message_id]
        self._missing = header.payload_bytes
        return None

    def _take_payload(self, partial: _Partial) -> None:
        nbytes = min(self._missing, self._held)
        if nbytes:
            partial.payload[partial.filled : partial.filled + nbytes] = self._take(nbytes)
            partial.filled += nbytes
            self._missing -= nbytes

    def _end_of_frame(self, partial: _Partial) -> Arrived | None:
        header, self._header, self._current = self._header, None, None
        if header is None or not header.flags & LAST:
            return None
        del self._partials[header.message_id]
        return partial.arrived()

    def _check(self, header: Header) -> None:
        if header.sequence != self._sequence:
            raise RemoteProtocolError(f"frame {header.sequence} arrived where {self._sequence} was due")
        if header.kind not in _KINDS or header.traffic not in _TRAFFIC:
            raise RemoteProtocolError(f"frame of unknown kind {header.kind} or class {header.traffic}")
        if header.flags & ~(FIRST | LAST):
            raise RemoteProtocolError("frame with unknown flags")
        if header.kind == Kind.MESSAGE:
            self._check_message(header)
        elif header.payload_bytes or header.total_bytes or header.flags != FIRST | LAST:
            raise RemoteProtocolError("control frame with a payload")
        elif header.metadata_bytes > HANDSHAKE_METADATA_BYTES:
            raise RemoteProtocolError(f"control frame with {header.metadata_bytes} bytes of metadata")

    def _check_message(self, header: Header) -> None:
        if not self._messages_allowed:
            raise RemoteProtocolError("message before the handshake")
        if header.flags & FIRST:
            done_bytes = 0
            self._check_first(header)
        else:
            partial = self._partials.get(header.message_id)
            if partial is None or header.metadata_bytes or header.payload_bytes == 0:
                raise RemoteProtocolError("a chunk that continues no message")
            if (partial.traffic, len(partial.payload)) != (header.traffic, header.total_bytes):
                raise RemoteProtocolError("a chunk that contradicts its message")
            done_bytes = partial.filled
        end_bytes = done_bytes + header.payload_bytes
        if end_bytes > header.total_bytes or (end_bytes == header.total_bytes) != bool(header.flags & LAST):
            raise RemoteProtocolError("a message's chunks don't add up to its size")

    def _check_first(self, header: Header) -> None:
        if header.total_bytes > self._limits.message_bytes:
            raise RemoteProtocolError(
                f"message of {header.total_bytes} bytes, the limit is {self._limits.message_bytes}"
            )
        if not 0 < header.metadata_bytes <= self._limits.metadata_bytes:
            raise RemoteProtocolError(f"message with {header.metadata_bytes} bytes of metadata")
        if header.message_id in self._partials:
            raise RemoteProtocolError("a message began twice")
        if not header.flags & LAST and len(self._partials) >= self._limits.open_messages:
            raise RemoteProtocolError(f"more than {self._limits.open_messages} messages begun at once")
