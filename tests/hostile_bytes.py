"""Byte strings that a hostile or broken peer might send: garbage, and frames that are almost right. Fast and seeded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from random import Random

import msgpack
import pytest

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.envelope import Envelope, encode_envelope
from hybridep_rt.protocol.frames import (
    FIRST,
    HEADER_BYTES,
    LAST,
    UNNUMBERED,
    VERSION,
    Arrived,
    Control,
    Frame,
    Kind,
    control_frame,
    encode_frame,
    pack_fields,
)
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position

LIMITS = Limits(message_bytes=1 << 16, metadata_bytes=1024, open_messages=4)
MEMORY_BYTES = (LIMITS.open_messages + 1) * LIMITS.message_bytes + (1 << 20)
"""All that decoding may take at any time: the messages that are open, the one that arrives, and some for Python."""

ENVELOPE = encode_envelope(Envelope(Address(0, 1), Address(2, 0), "tokens", Position(7, 1, 3, Phase.COMBINE), (5,), 9))
_SIZES = (0, 1, 0x7F, 1 << 10, 1 << 16, (1 << 16) + 1, 1 << 31, (1 << 32) - 1, 1 << 62)
# Headers of MessagePack values that claim what doesn't follow, and nesting without end.
_CLAIMS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1")
_CLAIMS += (b"\xc9\x00\x10\x00\x00\x05" + bytes(40), b"\x91" * 900, b"\x81\xa1a" * 300, b"\xca\x7f\xc0\x00\x00")


def generated(seed: int, count: int) -> Iterator[bytes]:
    """`count` byte strings, a third of which begin with frames that are right."""
    random = Random(seed)
    for _ in range(count):
        yield random.choice(_MAKERS)(random)


def digest(data: bytes, random: Random, *, after_handshake: bool) -> str:
    """Feed a new decoder and check what has to hold for all bytes. Returns what came out: events, error or nothing."""
    decoder = FrameDecoder(LIMITS)
    if after_handshake:
        decoder.allow_messages()
    events: list[Control | Arrived] = []
    try:
        cut = random.randrange(len(data) + 1)
        for part in (data[:cut], data[cut:]):
            events += decoder.feed(part)
    except RemoteProtocolError as error:
        _check_stays_broken(decoder, str(error))
        return "error"
    assert len(events) * HEADER_BYTES <= len(data)
    payloads = [len(event.message.payload) for event in events if isinstance(event, Arrived)]
    assert sum(payloads) <= len(data)
    assert after_handshake or not payloads
    return "events" if events else "nothing"


def valid_stream(random: Random) -> bytes:
    """Some messages in chunks, mixed, and control frames between them."""
    frames: list[Frame] = []
    for number in range(random.randrange(1, 4)):
        total = random.choice((0, 1, 5, 60, 300))
        cut = random.randrange(total) if total > 1 else total
        flags = FIRST | (LAST if cut == total else 0)
        frames.append(_message(number, flags, ENVELOPE, random.randbytes(cut), total))
        if random.random() < 0.5:
            frames.append(control_frame(random.choice((Kind.HEARTBEAT, Kind.READY)), pack_fields()))
        if cut < total:
            frames.append(_message(number, LAST, b"", random.randbytes(total - cut), total))
    return to_bytes(frames)


def to_bytes(frames: list[Frame]) -> bytes:
    """The frames as they travel, numbered from 0."""
    parts, number = [], 0
    for frame in frames:
        parts += [encode_frame(frame, 0 if frame.kind in UNNUMBERED else number), *frame.payload]
        number += frame.kind not in UNNUMBERED
    return b"".join(parts)


def with_checksum(header: bytes) -> bytes:
    """The header's last four bytes made right."""
    return header[: HEADER_BYTES - 4] + struct.pack(">I", zlib.crc32(header[: HEADER_BYTES - 4]))


def _check_stays_broken(decoder: FrameDecoder, reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as again:
        decoder.next_event()
    assert str(again.value) == reason


def _message(message_id: int, flags: int, metadata: bytes, body: bytes, total: int) -> Frame:
    return Frame(Kind.MESSAGE, Traffic.TOKENS, flags, message_id, metadata, (memoryview(body),), len(body), total)


def _garbage(random: Random) -> bytes:
    return random.randbytes(random.randrange(400))


def _garbage_after_magic(random: Random) -> bytes:
    return b"HyEP" + bytes([VERSION]) + _garbage(random)


def _flipped(random: Random) -> bytes:
    data = bytearray(valid_stream(random))
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _resealed(random: Random) -> bytes:
    """One byte of the first header is changed, and its checksum is right again."""
    data = bytearray(valid_stream(random))
    data[random.randrange(4, HEADER_BYTES - 4)] = random.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFF))
    return with_checksum(bytes(data[:HEADER_BYTES])) + bytes(data[HEADER_BYTES:])


def _spliced(random: Random) -> bytes:
    one, two = valid_stream(random), valid_stream(random)
    return one[: random.randrange(len(one) + 1)] + two[random.randrange(len(two)) :]


def _any_fields(random: Random) -> bytes:
    """Frames whose every field is legal or at the edge, in an order that may make no sense."""
    frames = []
    for _ in range(random.randrange(1, 6)):
        body = random.randbytes(random.choice((0, 0, 1, 40)))
        size = len(body) if random.random() < 0.7 else random.choice(_SIZES) & 0xFFFFFFFF
        total = len(body) if random.random() < 0.5 else random.choice(_SIZES)
        metadata = random.choice((ENVELOPE, b"", pack_fields(), pack_fields(dc=1), random.randbytes(8)))
        kind, traffic = random.choice((16, 16, 16, 1, 6, 0, 255)), random.choice((0, 1, 1, 4, 5))
        fields = (kind, traffic, random.randrange(5), random.randrange(3), metadata, (memoryview(body),), size, total)
        frames.append(Frame(*fields))  # type: ignore[arg-type]
    return to_bytes(frames)


def _bad_metadata(random: Random) -> bytes:
    claim = random.choice(_CLAIMS)
    if random.random() < 0.5:
        return to_bytes([_message(0, FIRST | LAST, claim, b"", 0)])
    return to_bytes([control_frame(random.choice(list(Kind)[:11]), claim)])


def _odd_envelope(random: Random) -> bytes:
    """An envelope in which one value is of another type or out of bounds."""
    fields = list(msgpack.unpackb(ENVELOPE))
    at = random.randrange(len(fields))
    odd = (None, True, -1, 1 << 63, 0.5, "x" * 65, b"\xff", [], {}, [[[]]], [0] * 7)
    if isinstance(fields[at], list) and fields[at] and random.random() < 0.5:
        fields[at][random.randrange(len(fields[at]))] = random.choice(odd)
    else:
        fields[at] = random.choice(odd)
    return to_bytes([_message(0, FIRST | LAST, msgpack.packb(fields), b"", 0)])


_MAKERS: tuple[Callable[[Random], bytes], ...] = (
    _garbage,
    _garbage_after_magic,
    _flipped,
    _resealed,
    _spliced,
    _any_fields,
    _bad_metadata,
    _odd_envelope,
    valid_stream,
)
