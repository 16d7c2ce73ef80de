"""The send scheduler: order, chunks, fairness. No time involved."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.config import Limits
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.credits import Credits
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.envelope import Envelope, encode_envelope
from hybridep_rt.protocol.frames import HEADER_BYTES, Arrived, Kind, encode_frame, pack_fields
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.protocol.scheduler import GUARANTEE, Outgoing, SendScheduler

AT = Position(0, 0, 0, Phase.MAILBOX)
HERE = Address(0, 0)
CHUNK = 4


def message(
    body: bytes | list[bytes], traffic: Traffic = Traffic.TOKENS, urgency: int = 0, channel: str = "", worker: int = 0
) -> Outgoing:
    buffers = [body] if isinstance(body, bytes) else body
    channel = channel or f"{traffic.name} {urgency} {buffers[0][:1]!r}"
    flow = (Address(0, worker), Address(1, 0), channel)
    metadata = encode_envelope(Envelope(*flow, AT, (), urgency))
    return Outgoing(flow, traffic, urgency, metadata, tuple(map(memoryview, buffers)))


def scheduler(*messages: Outgoing, open_messages: int = 64) -> SendScheduler:
    new = SendScheduler(CHUNK, open_messages, Credits(1 << 30, 100))
    for each in messages:
        new.push(each)
    return new


def drain(queue: SendScheduler, frames: int = 10_000) -> list[str]:
    sent = []
    while queue and len(sent) < frames:
        planned = queue.next_frame()
        assert planned is not None
        frame = planned[0]
        sent.append(b"".join(frame.payload).decode() if frame.kind is Kind.MESSAGE else frame.kind.name)
    return sent


def test_nothing_waits() -> None:
    queue = scheduler()
    assert not queue
    assert queue.next_frame() is None


def test_classes_go_in_their_order() -> None:
    queue = scheduler(*(message(traffic.name[:4].encode(), traffic) for traffic in reversed(Traffic)))
    assert drain(queue) == ["CONT", "TOKE", "EXPE", "GRAD", "USER"]


def test_within_a_class_urgency_then_arrival() -> None:
    queue = scheduler(message(b"c", urgency=2), message(b"a", urgency=1), message(b"b", urgency=1))
    assert drain(queue) == ["a", "b", "c"]


def test_a_channel_is_never_reordered() -> None:
    queue = scheduler(
        message(b"1", Traffic.USER, 5, channel="x"),
        message(b"2", Traffic.CONTROL, 0, channel="x"),
        message(b"3", Traffic.TOKENS, 0, channel="y"),
    )
    assert drain(queue) == ["3", "1", "2"]


def test_a_more_urgent_message_passes_between_two_chunks() -> None:
    queue = scheduler(message(b"eeeeEEEEee", Traffic.EXPERTS))
    assert drain(queue, 1) == ["eeee"]
    queue.push(message(b"t"))
    assert drain(queue) == ["t", "EEEE", "ee"]


def test_chunks_run_over_the_buffers_without_empty_pieces() -> None:
    queue = scheduler(message([b"a", b"", b"bcdef", b"gh", b""]))
    planned = queue.next_frame()
    assert planned is not None
    assert [bytes(piece) for piece in planned[0].payload] == [b"a", b"bcd"]
    assert drain(queue) == ["efgh"]


def test_flags_metadata_and_completion() -> None:
    whole, empty = message(b"abcdef"), message(b"")
    queue = scheduler(whole, empty)
    planned = [queue.next_frame() for _ in range(3)]
    seen = [(each[0].flags, each[0].metadata, each[0].total_bytes, each[1]) for each in planned if each is not None]
    assert seen == [(1, whole.metadata, 6, None), (2, b"", 6, whole), (3, empty.metadata, 0, empty)]


def test_queued_bytes_counts_down() -> None:
    queue = scheduler(message(b"abcdef"), message(b"xy"))
    assert queue.queued_bytes[Traffic.TOKENS] == 8
    drain(queue, 1)
    assert queue.queued_bytes[Traffic.TOKENS] == 4
    queue.drop_messages()
    assert not any(queue.queued_bytes.values())
    assert not queue


def test_control_goes_first_and_last_goes_last() -> None:
    queue = scheduler(message(b"m"))
    queue.push_last(Kind.GOODBYE, pack_fields())
    queue.push_control(Kind.HEARTBEAT, pack_fields())
    assert drain(queue) == ["HEARTBEAT", "m", "GOODBYE"]


def test_after_waits_for_that_source_only() -> None:
    queue = scheduler(message(b"late", Traffic.USER, worker=0), message(b"othr", Traffic.GRADIENTS, worker=1))
    queue.push_after(Address(0, 0), Kind.DEPART, pack_fields())
    queue.push_after(Address(0, 2), Kind.FAIL, pack_fields())
    assert drain(queue) == ["FAIL", "othr", "late", "DEPART"]


def test_dropping_messages_keeps_what_waits_for_them() -> None:
    queue = scheduler(message(b"abcdefgh"))
    queue.push_after(HERE, Kind.DEPART, pack_fields())
    drain(queue, 1)
    assert [bytes(each.payload[0]) for each in queue.drop_messages()] == [b"abcdefgh"]
    assert drain(queue) == ["DEPART"]


def test_a_lower_class_gets_its_guaranteed_share() -> None:
    queue = scheduler(message(b"uuuu" * 3, Traffic.USER), message(b"tttt" * 200, Traffic.TOKENS))
    sent = drain(queue)
    first = sent.index("uuuu")
    frame_bytes = HEADER_BYTES + CHUNK
    assert first * frame_bytes >= GUARANTEE * CHUNK
    assert first <= GUARANTEE + 1
    assert sent.count("uuuu") == 3
    assert sent.index("uuuu", first + 1) - first > 1


def test_only_so_many_messages_are_open() -> None:
    queue = scheduler(open_messages=2)
    for urgency in (3, 2, 1):
        queue.push(message(str(urgency).encode() * 8, urgency=urgency))
        drain(queue, 1)
    # 3 and 2 are open, so 1 has to wait although it is more urgent; a message of one chunk need not.
    queue.push(message(b"0", urgency=0))
    assert drain(queue) == ["0", "1111", "1111", "3333"]


def test_a_message_that_may_not_begin_steps_aside_until_a_receipt() -> None:
    queue = SendScheduler(CHUNK, 64, Credits(3000, 100))
    for body in (b"1aaa", b"2aaa", b"3aaa"):
        queue.push(message(body, channel="x"))
    queue.push(message(b"othr", Traffic.USER, channel="y"))
    # The window takes two; nothing of the other flow waits, so it may go although there is no room.
    assert drain(queue, 3) == ["1aaa", "2aaa", "othr"]
    assert queue
    assert not queue.ready()
    assert queue.next_frame() is None
    queue.push_control(Kind.HEARTBEAT, pack_fields())
    assert drain(queue, 1) == ["HEARTBEAT"]
    queue.done([0])
    assert queue.next_frame() is None  # two still wait: the other flow's counts too
    queue.done([1])
    assert drain(queue) == ["3aaa"]


messages = st.lists(
    st.builds(
        message,
        st.lists(st.binary(max_size=9), min_size=1, max_size=3),
        st.sampled_from(list(Traffic)),
        st.integers(0, 2),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1),
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(messages, st.integers(0, 10)), max_size=5), st.integers(1, 4))
def test_everything_arrives_whole_and_in_order_per_channel(
    rounds: list[tuple[list[Outgoing], int]], open_messages: int
) -> None:
    queue = SendScheduler(CHUNK, open_messages, Credits(1 << 30, 100))
    decoder = FrameDecoder(Limits(open_messages=open_messages))
    decoder.allow_messages()
    expected, received, sequence = defaultdict(list), defaultdict(list), 0
    for batch, sends in [*rounds, ([], 10_000)]:
        for each in batch:
            queue.push(each)
            expected[each.flow].append(b"".join(each.payload))
        while queue and sends:
            planned = queue.next_frame()
            assert planned is not None
            for event in decoder.feed(encode_frame(planned[0], sequence) + b"".join(planned[0].payload)):
                assert isinstance(event, Arrived)
                got = event.message
                received[got.source, got.to, got.channel].append(bytes(got.payload))
            sequence, sends = sequence + 1, sends - 1
    assert received == expected
    assert not any(queue.queued_bytes.values())
