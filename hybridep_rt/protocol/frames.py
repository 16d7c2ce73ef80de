"""Frames: the bytes on every link. Frozen as version 2; whoever changes a byte raises `VERSION`.

    offset bytes
         0     4  "HyEP"
         4     1  version
         5     1  kind, see `Kind`
         6     1  class of traffic, see `Traffic`; control (0) for frames without payload
         7     1  flags: 1 = first frame of a message, 2 = last; both for frames without payload
         8     8  message id: a number that no other message of this direction of the link has; 0 without payload
        16     8  sequence number
        24     4  bytes of metadata
        28     4  bytes of payload in this frame
        32     8  bytes of payload in the whole message
        40     4  CRC-32 of bytes 0 to 39
        44        metadata, then payload

All integers are unsigned and big-endian. A message is one or more MESSAGE frames: the first carries the metadata (its
envelope, msgpack), and frames of other messages may come between them. Every other kind is one frame of metadata (a
msgpack map) only.

The sequence number counts the frames of one direction of a session from 0, over all its connections: a connection that
resumes goes on behind the last frame that arrived whole, and a frame that comes again is skipped. The kinds in
`UNNUMBERED` belong to one connection and have sequence number 0. The payload has no checksum: TLS sees to that.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.messages import Bytes, Message, Traffic

MAGIC = b"HyEP"
VERSION = 2
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
    ACK = 12
    RECEIPT = 13
    LATE = 14
    EXCUSE = 15
    MESSAGE = 16


UNNUMBERED = frozenset({Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.REFUSE, Kind.HEARTBEAT, Kind.ACK})


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
    """The last byte of a message arrived. `metadata` are the bytes of its envelope, to be passed on as they are.

    Its receiver owes a receipt for `message_id` when it has dealt with the message.
    """

    message: Message
    message_id: int
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
