"""Sessions: whatever is cut, resumed, duplicated or stale, everything arrives once and in order, in bounded memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.envelope import Envelope, encode_envelope, unpack
from hybridep_rt.protocol.frames import Arrived, Control, Kind, control_frame, encode_frame, pack_fields
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.protocol.scheduler import Outgoing
from hybridep_rt.protocol.session import RECEIPT_MESSAGES, Session, Standing

AT = Position(0, 0, 0, Phase.MAILBOX)
LIMITS = Limits(window_bytes=6000, unacked_bytes=3000, open_messages=3, message_bytes=1 << 20)
CHUNK = 700


def session(name: bytes = b"a", *, resumable: bool = True, limits: Limits = LIMITS) -> Session:
    new = Session(name * 16, limits, resumable=resumable)
    new.scheduler.chunk_bytes = CHUNK
    return new


def message(body: bytes, channel: str = "x", traffic: Traffic = Traffic.TOKENS) -> Outgoing:
    flow = (Address(0, 0), Address(1, 0), channel)
    return Outgoing(flow, traffic, 0, encode_envelope(Envelope(*flow, AT)), (memoryview(body),))


def take(from_: Session, most: int = 1000) -> bytes:
    parts: list[bytes | memoryview] = []
    while most and (sent := from_.next_frame()) is not None:
        parts += [encode_frame(sent.frame, sent.sequence), *sent.frame.payload]
        most -= 1
    return b"".join(parts)


def acknowledge(from_: Session, to: Session) -> list[Outgoing]:
    """Carry what `from_` owes to `to`; the messages that are known to have arrived then."""
    ack = from_.ack()
    return [] if ack is None else to.ack_received(unpack(ack))


def join(left: Session, right: Session) -> tuple[list[Outgoing], list[Outgoing]]:
    """A new connection."""
    mine, theirs = left.standing(), right.standing()
    return left.resume(Standing.unpack(theirs.pack())), right.resume(Standing.unpack(mine.pack()))


def reading(to: Session) -> FrameDecoder:
    decoder = FrameDecoder(LIMITS)
    decoder.allow_messages(to.assembly)
    return decoder


def bodies(events: list[Control | Arrived]) -> list[bytes]:
    return [bytes(event.message.payload) for event in events if isinstance(event, Arrived)]


def test_what_was_lost_is_sent_again_and_what_arrived_is_not() -> None:
    left, right = session(), session(b"b")
    join(left, right)
    for body in (b"one", b"two", b"three"):
        left.scheduler.push(message(body))
    data = take(left)
    first = reading(right)
    assert bodies(first.feed(data[: len(data) // 2])) == [b"one"]
    arrived, _ = join(left, right)
    assert [bytes(each.payload[0]) for each in arrived] == [b"one"]
    assert bodies(reading(right).feed(take(left))) == [b"two", b"three"]
    assert left.retransmitted_bytes == 8
    assert not left.idle
    assert len(acknowledge(right, left)) == 2
    assert left.idle


def test_the_payload_is_kept_without_a_copy() -> None:
    left, right = session(), session(b"b")
    join(left, right)
    body = bytearray(b"before")
    left.scheduler.push(message(body))  # type: ignore[arg-type]
    take(left)
    body[:] = b"after!"
    join(left, right)
    assert bodies(reading(right).feed(take(left))) == [b"after!"]


def test_no_more_than_the_bound_is_kept_and_control_passes() -> None:
    left, right = session(), session(b"b")
    join(left, right)
    for number in range(10):
        left.scheduler.push(message(bytes(500), f"{number}"))
    data = take(left)
    assert LIMITS.unacked_bytes <= left.unacked_bytes < LIMITS.unacked_bytes + CHUNK
    assert not left.ready()
    left.scheduler.push_control(Kind.FAIL, pack_fields())
    data += take(left)
    assert len(reading(right).feed(data)) == 7
    acknowledge(right, left)
    assert left.unacked_bytes == 0
    assert left.ready()


def test_a_stale_standing_leads_to_duplicates_which_are_dropped() -> None:
    left, right = session(), session(b"b")
    join(left, right)
    left.scheduler.push(message(b"one"))
    stale = right.standing()
    data = take(left)
    assert bodies(reading(right).feed(data)) == [b"one"]
    left.resume(stale)
    again = take(left)
    assert again == data
    assert bodies(reading(right).feed(again)) == []


def test_restarts_are_recognised_by_both() -> None:
    left, right, reborn = session(), session(b"b"), session(b"c")
    assert left.restarted(right.standing()) == ""
    join(left, right)
    assert left.restarted(right.standing()) == right.restarted(left.standing()) == ""
    assert left.restarted(reborn.standing()) == "there"
    assert reborn.restarted(left.standing()) == "here"


def test_connections_are_counted_alike() -> None:
    left, right = session(), session(b"b")
    left.resume(right.standing())  # the other side never heard that it stands
    assert (left.connections, right.connections) == (1, 0)
    assert left.is_late(right.standing())
    join(left, right)
    assert left.connections == right.connections == 2
    assert not left.is_late(right.standing())


def test_receipts_name_few_messages_each_and_are_not_lost() -> None:
    left, right = session(limits=Limits()), session(b"b", limits=Limits())
    join(left, right)
    for _ in range(2 * RECEIPT_MESSAGES + 1):
        left.scheduler.push(message(b""))
    for event in reading(right).feed(take(left)):
        assert isinstance(event, Arrived)
        right.dealt_with(event.message_id)
    assert right.word_is_urgent
    right.queue_receipts()
    assert not right.word_is_urgent
    lost = take(right)
    join(left, right)
    assert take(right) == lost
    events = reading(left).feed(lost)
    assert [len(event.fields["done"]) for event in events if isinstance(event, Control)] == [128, 128, 1]
    assert len(left.scheduler.credits) == 257
    for event in events:
        assert isinstance(event, Control)
        left.receipt_received(event.fields)
    assert len(left.scheduler.credits) == 0


@pytest.mark.parametrize("fields", [{}, {"done": 5}, {"done": ("x",)}, {"done": (3,)}])
def test_receipts_that_no_correct_peer_sends(fields: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        session().receipt_received(fields)


@pytest.mark.parametrize("fields", [{}, {"received": 1}, {"received": -1}, {"received": True}])
def test_acknowledgements_that_no_correct_peer_sends(fields: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        session().ack_received(fields)


@pytest.mark.parametrize(
    "change",
    [{"mine": b""}, {"theirs": b"x"}, {"attempt": -1}, {"received": None}, {"window": 1.5}, {"mine": "a" * 16}],
)
def test_standings_that_no_correct_peer_sends(change: dict[str, object]) -> None:
    fields = unpack(session().standing().pack())
    with pytest.raises(RemoteProtocolError):
        Standing.unpack(pack_fields(**fields | change))
    with pytest.raises(RemoteProtocolError):
        Standing.unpack(b"\x90")


def test_acknowledging_what_was_not_sent_is_an_error() -> None:
    left, right = session(), session(b"b")
    theirs = right.standing()
    with pytest.raises(RemoteProtocolError, match="7 frames acknowledged, 0 were sent"):
        left.resume(Standing(theirs.mine, b"", 1, 7, 100))


class TwoEnds(RuleBasedStateMachine):
    """Two sessions joined by a line that may be cut between any two bytes; messages in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = (session(), session(b"b"))
        self.sent: list[dict[str, list[bytes]]] = [defaultdict(list), defaultdict(list)]
        self.received: list[dict[str, list[bytes]]] = [defaultdict(list), defaultdict(list)]
        self.undone: list[list[int]] = [[], []]
        self.stale = [each.standing() for each in self.ends]
        self.line = [bytearray(), bytearray()]
        self.number = 0
        self.up = False
        self.connect(False)

    @rule(side=st.integers(0, 1), size=st.integers(0, 3000), channel=st.sampled_from("xyz"))
    def send(self, side: int, size: int, channel: str) -> None:
        self.number += 1
        body = b"%d " % self.number + bytes(size)
        self.sent[side][channel].append(body)
        self.ends[side].scheduler.push(message(body, channel, Traffic(1 + self.number % 4)))

    @precondition(lambda self: self.up)
    @rule(side=st.integers(0, 1), frames=st.integers(1, 6))
    def write(self, side: int, frames: int) -> None:
        self.line[side] += take(self.ends[side], frames)

    @precondition(lambda self: self.up)
    @rule(side=st.integers(0, 1), nbytes=st.integers(1, 5000))
    def carry(self, side: int, nbytes: int) -> None:
        data, self.line[side] = self.line[side][:nbytes], self.line[side][nbytes:]
        for event in self.decoders[1 - side].feed(bytes(data)):
            assert isinstance(event, Arrived | Control)
            if isinstance(event, Arrived):
                self.received[side][event.message.channel].append(bytes(event.message.payload))
                self.undone[1 - side].append(event.message_id)
            elif event.kind is Kind.RECEIPT:
                self.ends[1 - side].receipt_received(event.fields)
            elif event.kind is Kind.ACK:
                self.ends[1 - side].ack_received(event.fields)

    @rule(side=st.integers(0, 1), which=st.integers(0, 50))
    def deal(self, side: int, which: int) -> None:
        """The first of some channel: a program takes the messages of one channel in order."""
        if self.undone[side]:
            self.ends[side].dealt_with(self.undone[side].pop(which % len(self.undone[side])))

    @precondition(lambda self: self.up)
    @rule(side=st.integers(0, 1))
    def tell(self, side: int) -> None:
        self.ends[side].queue_receipts()
        ack = self.ends[side].ack()
        if ack is not None:
            self.line[side] += encode_frame(control_frame(Kind.ACK, ack), 0)

    @rule()
    def cut(self) -> None:
        self.up = False
        self.line = [bytearray(), bytearray()]

    @rule(stale=st.booleans())
    def connect(self, stale: bool) -> None:
        """A new connection; with `stale`, the standings were exchanged a while ago."""
        self.cut()
        if not stale:
            self.stale = [each.standing() for each in self.ends]
        for end, theirs in zip(self.ends, reversed(self.stale), strict=True):
            end.resume(Standing.unpack(theirs.pack()))
        self.decoders = [reading(each) for each in self.ends]
        self.up = True

    @invariant()
    def memory_is_bounded(self) -> None:
        for end in self.ends:
            assert end.unacked_bytes < LIMITS.unacked_bytes + CHUNK
            assert end.assembly.credits.used_bytes <= LIMITS.window_bytes + 3 * 4100

    def teardown(self) -> None:
        """In the end all is delivered."""
        for _ in range(2000):
            for side in (0, 1):
                self.connect(False) if not self.up else None
                self.write(side, 100)
                self.tell(side)
                self.carry(side, 10**9)
                while self.undone[side]:
                    self.deal(side, 0)
            if all(end.idle and not end.owes_word for end in self.ends):
                break
        assert self.received == self.sent
        assert all(end.idle and end.unacked_bytes == 0 for end in self.ends)
        assert all(len(end.scheduler.credits) == 0 for end in self.ends)


TwoEnds.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTwoEnds = TwoEnds.TestCase
