"""A link between two processes that outlives its connections. Sans-I/O.

Each frame gets a number; what the peer has not acknowledged is kept (references, no copies) and sent again on the next
connection, from the last frame that arrived whole. In the handshake each side states where it stands:

    mine      16 random bytes of this process: another process is another session
    theirs    those of the process it had a session with, empty before the first connection
    attempt   number of the connection to be made: both sides count them
    received  how many numbered frames arrived whole
    window    how many bytes of messages may wait at this side

Both may dial. If both connections get through, the one that the preferred side dialled is kept, on either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.assembly import Assembly
from hybridep_rt.protocol.credits import Credits
from hybridep_rt.protocol.envelope import unpack
from hybridep_rt.protocol.frames import Frame, Kind, pack_fields
from hybridep_rt.protocol.scheduler import Outgoing, SendScheduler

INCARNATION_BYTES = 16
RECEIPT_MESSAGES = 128
"""Most messages one receipt names: its frame has to be small."""

URGENT_BYTES = 1 << 20
"""After so many bytes a receipt or an acknowledgement goes at once, else a little later together with others."""

_NUMBER_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one side of a session stands."""

    mine: bytes
    theirs: bytes
    attempt: int
    received: int
    window_bytes: int

    def pack(self) -> bytes:
        """Its bytes."""
        return pack_fields(
            mine=self.mine,
            theirs=self.theirs,
            attempt=self.attempt,
            received=self.received,
            window=self.window_bytes,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Standing:
        """The inverse of `pack`. Raises RemoteProtocolError."""
        fields = unpack(raw)
        if not isinstance(fields, dict):
            raise RemoteProtocolError("a standing must be a map")
        mine, theirs = fields.get("mine"), fields.get("theirs")
        for value, sizes in ((mine, (INCARNATION_BYTES,)), (theirs, (0, INCARNATION_BYTES))):
            if not isinstance(value, bytes) or len(value) not in sizes:
                raise RemoteProtocolError(f"an incarnation must have {INCARNATION_BYTES} bytes")
        numbers = [_number(fields.get(name)) for name in ("attempt", "received", "window")]
        return cls(bytes(mine or b""), bytes(theirs or b""), *numbers)


class Sent(NamedTuple):
    """A numbered frame; `complete` is the message whose last frame it is."""

    sequence: int
    frame: Frame
    complete: Outgoing | None


class Session:
    """One end of a link. `resumable`: frames are kept until acknowledged; else the first connection is the only one.

    `incarnation`: `INCARNATION_BYTES` random bytes, the same for all sessions of this process.
    """

    def __init__(self, incarnation: bytes, limits: Limits, *, resumable: bool) -> None:
        self.scheduler = SendScheduler(
            limits.chunk_max_bytes, limits.open_messages, Credits(limits.window_bytes, limits.flows)
        )
        self.assembly = Assembly(limits)
        self.resumable = resumable
        self.connections = 0
        self.unacked_bytes = 0
        self.retransmitted_bytes = 0
        self.sent_bytes = 0
        self._limits = limits
        self._incarnation = incarnation
        self._peer = b""
        self._sequence = 0
        self._acked = 0
        self._cursor = 0
        """Number of the frame that goes next: one that went before, after a cut."""
        self._unacked: dict[int, Sent] = {}
        self._done: list[int] = []
        self._told_received = 0
        self._told_bytes = 0
        self._dealt_bytes = 0

    # Connections

    def standing(self) -> Standing:
        """What this side says when it dials."""
        return Standing(
            self._incarnation,
            self._peer,
            self.connections + 1,
            self.assembly.received,
            self.assembly.credits.window_bytes,
        )

    def restarted(self, theirs: Standing) -> str:
        """Why the two sides have no common session: who lost its state; empty if they have one, or none yet."""
        if self._peer and theirs.mine != self._peer:
            return "there"
        return "here" if theirs.theirs not in (b"", self._incarnation) else ""

    def is_late(self, theirs: Standing) -> bool:
        """Is this a connection that lost against one which both sides know already?"""
        return theirs.attempt <= self.connections

    def resume(self, theirs: Standing) -> list[Outgoing]:
        """A connection stands. Returns the messages that are known to have arrived; raises RemoteProtocolError."""
        self._peer = theirs.mine
        self.connections = max(self.connections + 1, theirs.attempt) if self.resumable else 1
        self.scheduler.credits.window_bytes = theirs.window_bytes
        arrived = self._acknowledge(theirs.received)
        self._cursor = self._acked
        self._told_received = self.assembly.received
        return arrived

    # Outwards

    def ready(self) -> bool:
        """Is there a numbered frame that may be sent now?"""
        if self._cursor < self._sequence:
            return True
        if self.unacked_bytes >= self._limits.unacked_bytes:
            return self.scheduler.has_control
        return self.scheduler.ready()

    def next_frame(self) -> Sent | None:
        """The next numbered frame."""
        if self.resumable and self._cursor < self._sequence:
            sent = self._unacked[self._cursor]
            self.retransmitted_bytes += sent.frame.payload_bytes
        else:
            full = self.unacked_bytes >= self._limits.unacked_bytes
            planned = None if full and not self.scheduler.has_control else self.scheduler.next_frame()
            if planned is None:
                return None
            sent = Sent(self._sequence, *planned)
            self._sequence += 1
            self.sent_bytes += sent.frame.payload_bytes
            if self.resumable:
                self._unacked[sent.sequence] = sent
                self.unacked_bytes += sent.frame.payload_bytes
        self._cursor = sent.sequence + 1
        return sent

    @property
    def idle(self) -> bool:
        """Has the peer everything?"""
        return not self.scheduler and not self._unacked

    @property
    def all_sent(self) -> bool:
        """Has this connection taken everything?"""
        return not self.scheduler and self._cursor == self._sequence

    # Acknowledgements, and receipts

    def dealt_with(self, message_id: int) -> None:
        """This side is done with a message that came."""
        self._dealt_bytes += self.assembly.credits.done(message_id)
        self._done.append(message_id)

    @property
    def owes_word(self) -> bool:
        """Is there something to tell the peer: that frames arrived, or that messages are dealt with?"""
        return bool(self._done) or self._owes_ack

    @property
    def _owes_ack(self) -> bool:
        return self.resumable and self.assembly.received > self._told_received

    @property
    def word_is_urgent(self) -> bool:
        """Does the peer soon need the room, or should it forget what it keeps?"""
        credits = self.assembly.credits
        if self._done and credits.used_bytes > credits.window_bytes // 2:
            return True
        owed_bytes = max(self._dealt_bytes, self.assembly.received_bytes - self._told_bytes)
        return len(self._done) >= RECEIPT_MESSAGES or owed_bytes >= min(URGENT_BYTES, credits.window_bytes // 4)

    def queue_receipts(self) -> None:
        """Queue receipts for the messages that are dealt with. They are numbered: none may be lost."""
        while self._done:
            named, self._done = self._done[:RECEIPT_MESSAGES], self._done[RECEIPT_MESSAGES:]
            self.scheduler.push_control(Kind.RECEIPT, pack_fields(done=named))
        self._dealt_bytes = 0

    def ack(self) -> bytes | None:
        """The metadata of the acknowledgement that is due, if one is: how many numbered frames arrived."""
        self._told_bytes = self.assembly.received_bytes
        if not self._owes_ack:
            return None
        self._told_received = self.assembly.received
        return pack_fields(received=self._told_received)

    def receipt_received(self, fields: dict[str, Any]) -> None:
        """The peer has dealt with messages. Raises RemoteProtocolError."""
        done = fields.get("done")
        if not isinstance(done, tuple) or not all(type(each) is int for each in done):
            raise RemoteProtocolError("a receipt must name messages by number")
        self.scheduler.done(done)

    def ack_received(self, fields: dict[str, Any]) -> list[Outgoing]:
        """Messages that are now known to have arrived. Raises RemoteProtocolError."""
        return self._acknowledge(_number(fields.get("received")))

    def _acknowledge(self, received: int) -> list[Outgoing]:
        if received > self._sequence:
            raise RemoteProtocolError(f"{received} frames acknowledged, {self._sequence} were sent")
        if not self.resumable:
            return []
        sent = [self._unacked.pop(sequence) for sequence in range(self._acked, received)]
        self._acked = max(self._acked, received)
        self._cursor = max(self._cursor, self._acked)
        self.unacked_bytes -= sum(each.frame.payload_bytes for each in sent)
        return [each.complete for each in sent if each.complete is not None]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_END:
        raise RemoteProtocolError(f"a number in [0, {_NUMBER_END}) was due")
    return value
