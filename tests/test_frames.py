"""Frames: whatever way the bytes are cut they mean the same; whatever the bytes are, memory and errors stay bounded."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.config import Limits
from hybridep_rt.errors import LocalProtocolError, RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.assembly import Assembly
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.envelope import Envelope, decode_envelope, encode_envelope
from hybridep_rt.protocol.frames import (
    FIRST,
    HEADER_BYTES,
    LAST,
    UNNUMBERED,
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

LIMITS = Limits(message_bytes=1 << 20, metadata_bytes=4096, open_messages=4)
ENVELOPE = Envelope(Address(0, 1), Address(2, 0), "tokens", Position(7, 1, 3, Phase.COMBINE, 2, False), (5, -6), 9)
METADATA = encode_envelope(ENVELOPE)


def chunk(message_id: int, flags: int, body: bytes, total: int, metadata: bytes | None = None) -> Frame:
    if metadata is None:
        metadata = METADATA if flags & FIRST else b""
    return Frame(Kind.MESSAGE, Traffic.EXPERTS, flags, message_id, metadata, (memoryview(body),), len(body), total)


def to_bytes(*frames: Frame) -> bytes:
    parts, sequence = [], 0
    for frame in frames:
        unnumbered = frame.kind in UNNUMBERED
        parts += [encode_frame(frame, 0 if unnumbered else sequence), *frame.payload]
        sequence += not unnumbered
    return b"".join(parts)


def decoder() -> FrameDecoder:
    new = FrameDecoder(LIMITS)
    new.allow_messages()
    return new


INTERLEAVED = (
    chunk(0, FIRST, b"abc", 8),
    control_frame(Kind.HEARTBEAT, pack_fields()),
    chunk(1, FIRST | LAST, b"", 0),
    chunk(2, FIRST, b"", 2),
    chunk(0, 0, b"de", 8),
    chunk(2, LAST, b"XY", 2),
    chunk(0, LAST, b"fgh", 8),
)


def summary(events: list[Control | Arrived]) -> list[object]:
    return [bytes(each.message.payload) if isinstance(each, Arrived) else each.kind for each in events]


def test_a_message_arrives_with_all_its_fields() -> None:
    [event] = decoder().feed(to_bytes(chunk(0, FIRST | LAST, b"body", 4)))
    assert isinstance(event, Arrived)
    assert event.message.source == Address(0, 1)
    assert event.message.to == Address(2, 0)
    assert event.message.position == ENVELOPE.position
    assert isinstance(event.message.position.phase, Phase)
    assert (event.message.channel, event.message.counts, event.urgency) == ("tokens", (5, -6), 9)
    assert (event.traffic, event.metadata) == (Traffic.EXPERTS, METADATA)
    assert bytes(event.message.payload) == b"body"
    assert not event.message.payload.readonly


def test_every_cut_in_two_gives_the_same_events() -> None:
    data = to_bytes(*INTERLEAVED)
    for cut in range(len(data) + 1):
        each = decoder()
        events = each.feed(data[:cut]) + each.feed(data[cut:])
        assert summary(events) == [Kind.HEARTBEAT, b"", b"XY", b"abcdefgh"]


def test_byte_by_byte() -> None:
    each, data = decoder(), to_bytes(*INTERLEAVED)
    events = [event for index in range(len(data)) for event in each.feed(data[index : index + 1])]
    assert summary(events) == [Kind.HEARTBEAT, b"", b"XY", b"abcdefgh"]


@given(st.lists(st.integers(1, 9000)), st.integers(0, 200_000))
@settings(max_examples=30, deadline=None)
def test_large_payloads_survive_any_cuts(cuts: list[int], size: int) -> None:
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    data = to_bytes(
        chunk(0, FIRST | (0 if size > 1 else LAST), body[: size // 2 if size > 1 else size], size),
        *([chunk(0, LAST, body[size // 2 :], size)] if size > 1 else []),
    )
    each = decoder()
    events, at = [], 0
    for cut in [*cuts, len(data)]:
        events += each.feed(data[at : at + cut])
        at += cut
    [event] = events
    assert isinstance(event, Arrived)
    assert bytes(event.message.payload) == body


def test_the_rest_of_a_large_payload_goes_straight_into_the_message() -> None:
    each = decoder()
    each.feed(to_bytes(chunk(0, FIRST | LAST, bytes(100_000), 100_000))[:5000])
    room = each.buffer()
    assert len(room) == 100_000 - (5000 - HEADER_BYTES - len(METADATA))
    room[:] = b"z" * len(room)
    each.received(len(room))
    event = each.next_event()
    assert isinstance(event, Arrived)
    assert event.message.payload[-1:] == b"z"


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([chunk(0, FIRST, b"", (1 << 20) + 1)], "the limit is"),
        ([chunk(0, FIRST, b"", 1 << 62)], "the limit is"),
        ([chunk(0, FIRST | LAST, b"abc", 2)], "add up"),
        ([chunk(0, FIRST, b"ab", 2)], "add up"),
        ([chunk(0, FIRST | LAST, b"ab", 3)], "add up"),
        ([chunk(0, LAST, b"ab", 2)], "continues no message"),
        ([chunk(0, FIRST, b"a", 3), chunk(0, 0, b"", 3)], "continues no message"),
        ([chunk(0, FIRST, b"a", 3), chunk(0, LAST, b"abc", 4)], "contradicts"),
        ([chunk(0, FIRST, b"a", 3), chunk(0, FIRST, b"a", 3)], "began twice"),
        ([chunk(number, FIRST, b"", 3) for number in range(5)], "begun at once"),
        ([chunk(0, FIRST, b"", 3, metadata=b"")], "bytes of metadata"),
        ([chunk(0, FIRST, b"", 3, metadata=bytes(4097))], "bytes of metadata"),
        ([chunk(0, FIRST, b"", 3, metadata=b"\xc1")], "not msgpack"),
        ([chunk(0, FIRST | 4, b"", 3)], "unknown flags"),
        ([control_frame(Kind.HELLO, bytes(2049))], "bytes of metadata"),
        ([control_frame(Kind.HELLO, b"")], "not msgpack"),
        ([control_frame(Kind.HELLO, pack_fields())._replace(total_bytes=1)], "with a payload"),
        ([chunk(0, FIRST, b"", 3)._replace(kind=99)], "unknown kind"),
        ([chunk(0, FIRST, b"", 3)._replace(traffic=5)], "unknown kind"),
    ],
)
def test_frames_that_no_correct_peer_sends(frames: list[Frame], reason: str) -> None:
    each = decoder()
    with pytest.raises(RemoteProtocolError, match=reason):
        each.feed(to_bytes(*frames))
    with pytest.raises(RemoteProtocolError, match=reason):
        each.next_event()


def test_before_the_handshake_no_message_is_accepted() -> None:
    with pytest.raises(RemoteProtocolError, match="before the handshake"):
        FrameDecoder(LIMITS).feed(to_bytes(chunk(0, FIRST | LAST, b"abc", 3)))


def test_a_lost_frame_is_noticed() -> None:
    with pytest.raises(RemoteProtocolError, match="frame 1 arrived where 0 was due"):
        decoder().feed(encode_frame(control_frame(Kind.READY, pack_fields()), 1))
    with pytest.raises(RemoteProtocolError, match="frame 1 arrived where 0 was due"):
        decoder().feed(encode_frame(control_frame(Kind.HEARTBEAT, pack_fields()), 1))


def test_a_repeated_frame_is_skipped() -> None:
    data = to_bytes(*INTERLEAVED)
    each = decoder()
    events = each.feed(data) + each.feed(data)
    assert summary(events) == [Kind.HEARTBEAT, b"", b"XY", b"abcdefgh", Kind.HEARTBEAT]


def test_a_message_goes_on_over_another_connection_from_any_cut() -> None:
    frames = [frame for frame in INTERLEAVED if frame.kind not in UNNUMBERED]
    data = to_bytes(*frames)
    for cut in range(len(data) + 1):
        assembly, first, second = Assembly(LIMITS), FrameDecoder(LIMITS), FrameDecoder(LIMITS)
        first.allow_messages(assembly)
        events = first.feed(data[:cut])
        second.allow_messages(assembly)
        again = to_bytes(*frames[: assembly.received])
        events += second.feed(data[len(again) :])
        assert summary(events) == [b"", b"XY", b"abcdefgh"]


def test_a_message_beyond_its_credit_is_refused() -> None:
    each = FrameDecoder(replace(LIMITS, window_bytes=4000))
    each.allow_messages()
    frames = [chunk(number, FIRST | LAST, bytes(900), 900) for number in range(3)]
    assert len(each.feed(to_bytes(*frames[:2]))) == 2
    with pytest.raises(RemoteProtocolError, match="beyond its credit of 4000 bytes"):
        each.feed(to_bytes(*frames)[len(to_bytes(*frames[:2])) :])


def test_another_version_and_damaged_headers_are_refused() -> None:
    good = encode_frame(control_frame(Kind.HEARTBEAT, pack_fields()), 0)
    head = bytearray(good[: HEADER_BYTES - 4])
    head[4] = 99
    with pytest.raises(RemoteProtocolError, match="version 99"):
        decoder().feed(bytes(head) + struct.pack(">I", zlib.crc32(head)))
    for at in range(HEADER_BYTES):
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises(RemoteProtocolError, match=r"not a HybridEP frame|damaged"):
            decoder().feed(bytes(bad))


@given(st.binary(max_size=500))
def test_garbage_is_an_error_or_waits_for_more(data: bytes) -> None:
    each = decoder()
    try:
        assert each.feed(data) == []
    except RemoteProtocolError:
        return
    assert len(data) < HEADER_BYTES


@given(
    st.lists(
        st.builds(
            Frame,
            st.sampled_from([*Kind, 0, 255]),
            st.integers(0, 6),
            st.integers(0, 4),
            st.integers(0, 2),
            st.one_of(st.sampled_from([METADATA, b"", pack_fields(a=1)]), st.binary(max_size=60)),
            st.just(()),
            st.integers(0, 40),
            st.integers(0, 40),
        ).map(lambda frame: frame._replace(payload=(memoryview(bytes(frame.payload_bytes)),))),
        max_size=6,
    )
)
@settings(max_examples=150, deadline=None)
def test_near_valid_frames_give_events_or_a_typed_error(frames: list[Frame]) -> None:
    each = decoder()
    try:
        events = each.feed(to_bytes(*frames))
    except RemoteProtocolError:
        return
    assert len(events) <= len(frames)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=6),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_msgpack_value_is_an_envelope_or_a_typed_error(value: object) -> None:
    import msgpack

    with pytest.raises(RemoteProtocolError):
        decode_envelope(msgpack.packb(value))


@pytest.mark.parametrize(
    "change",
    [
        {"channel": ""},
        {"channel": "x" * 65},
        {"channel": b"bytes"},
        {"source": (0,)},
        {"source": (True, 0)},
        {"to": (0, -2)},
        {"position": (1, 2, 3)},
        {"position": (0, 0, 0, 99, -1, True)},
        {"position": (0, 0, 0, 1, -1, 1)},
        {"position": (-2, 0, 0, 1, -1, True)},
        {"position": (0, 0, 0, [], -1, True)},
        {"counts": (1.5,)},
        {"counts": 3},
        {"urgency": 1 << 63},
        {"urgency": None},
    ],
)
def test_envelopes_out_of_bounds(change: dict[str, object]) -> None:
    import msgpack

    broken = ENVELOPE._replace(**change)
    with pytest.raises(RemoteProtocolError):
        decode_envelope(msgpack.packb(tuple(broken)))
    with pytest.raises(LocalProtocolError):
        encode_envelope(broken)


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_envelope(b"\x91" * 4000)
