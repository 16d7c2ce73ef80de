"""A link to one peer: what its owner sees of it, whichever connection carries it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import ConnectionLost, HybridEPError, RemoteProtocolError, TransportError
from hybridep_rt.metrics import LinkStatus
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.frames import UNNUMBERED, Arrived, Control, Frame, Kind
from hybridep_rt.protocol.link import Notice
from hybridep_rt.protocol.pacing import Downlink, LinkPacer
from hybridep_rt.protocol.scheduler import Outgoing
from hybridep_rt.protocol.session import Session, Standing
from hybridep_rt.transport.connection import Connection

WORD_S = 0.01
"""Acknowledgements and receipts that are not urgent wait so long for others."""


class Owner(Protocol):
    """Who is told what happens on a link. All calls come from the event loop."""

    def link_opened(self, link: Link) -> None:
        """The first connection stands."""

    def link_message(self, link: Link, arrived: Arrived) -> None:
        """A whole message arrived; the owner says `link.dealt_with(arrived.message_id)` some time."""

    def link_notice(self, link: Link, notice: Notice) -> None:
        """GOODBYE, READY, FAIL, ... arrived. Raises RemoteProtocolError if it is malformed."""

    def link_sent(self, link: Link, outgoing: Outgoing) -> None:
        """A message was handed to the socket (or to the emulated line), or has arrived if the link is resumable.

        Also said of a message that was dropped.
        """

    def link_closed(self, link: Link, error: HybridEPError | None) -> None:
        """The link is over, by goodbye or by `error`; said once."""


class Link:
    """The end of a link in this process. A resumable one waits `resume_s` for another connection when one is lost."""

    def __init__(self, peer: Address, name: str, session: Session, owner: Owner, timeouts: Timeouts) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer = peer
        self.name = name
        self.session = session
        self.connection: Connection | None = None
        """The connection that carries it; None between two of them."""
        self._lost = ("", 0.0)
        self.down = asyncio.Event()
        self.down.set()
        self.last_failure = ""
        """Why the last attempt to reach the peer failed."""
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when it is over and its socket is closed."""
        self._owner = owner
        self._timeouts = timeouts
        self._shape: tuple[int, LinkPacer | None, Downlink | None] | None = None
        self._rates = _Rates()
        self._goodbye_said = self._end_heard = False
        self._finishing = False
        self._over = False
        self._deadline: asyncio.TimerHandle | None = None
        self._word: asyncio.TimerHandle | None = None
        self._word_is_urgent = False

    @property
    def ever_open(self) -> bool:
        """Has there been a connection?"""
        return self.session.connections > 0

    @property
    def is_over(self) -> bool:
        """Has it ended?"""
        return self._over

    def shape(self, chunk_bytes: int, pacer: LinkPacer | None = None, downlink: Downlink | None = None) -> None:
        """The link's rate is known: cut messages to it. `pacer` and `downlink` emulate it; None: it is a real one."""
        self.session.scheduler.chunk_bytes = chunk_bytes
        self._shape = (chunk_bytes, pacer, downlink)

    def send(self, outgoing: Outgoing) -> None:
        """Queue a message."""
        self.session.scheduler.push(outgoing)
        self._pump()

    def send_many(self, batch: list[Outgoing]) -> None:
        """Queue messages, the most urgent of which goes first."""
        for outgoing in batch:
            self.session.scheduler.push(outgoing)
        self._pump()

    def tell(self, kind: Kind, metadata: bytes) -> None:
        """Send a frame without payload before all queued messages."""
        self.session.scheduler.push_control(kind, metadata)
        self._pump()

    def tell_after(self, source: Address, kind: Kind, metadata: bytes) -> None:
        """Send a frame without payload after the messages that are queued here from `source`."""
        self.session.scheduler.push_after(source, kind, metadata)
        self._pump()

    def say_goodbye(self, metadata: bytes) -> None:
        """Send GOODBYE once nothing else is queued; the connection may end from now on."""
        self._goodbye_said = True
        if self.connection is not None:
            self.connection.machine.say_goodbye()
        self.session.scheduler.push_last(Kind.GOODBYE, metadata)
        self._pump()

    def finish(self) -> None:
        """Send what is queued, then close when the peer has closed."""
        self._finishing = True
        self._send_word()
        if self.connection is not None:
            self.connection.finish()
        elif self.session.idle or self._end_heard:
            self._end()

    def drop_messages(self) -> None:
        """Nobody needs the queued messages any more: only frames without payload are still sent."""
        self._tell_sent(self.session.scheduler.drop_messages())

    def give_up(self) -> None:
        """Drop the messages and `finish`."""
        self.drop_messages()
        self.finish()

    def abort(self) -> None:
        """Close now."""
        self._over = True
        if self.connection is not None:
            self.connection.abort()
        self._end()

    def dealt_with(self, message_id: int) -> None:
        """The owner is done with a message that arrived: the peer may send more."""
        self.session.dealt_with(message_id)
        self.bytes_received()

    def status(self) -> LinkStatus:
        """How it is now."""
        session, scheduler = self.session, self.session.scheduler
        totals = (time.monotonic(), session.sent_bytes, session.assembly.received_bytes)
        sent_bytes_per_s, received_bytes_per_s = self._rates.measure(*totals)
        return LinkStatus(
            is_up=self.connection is not None,
            reconnects=max(0, session.connections - 1),
            rtt_s=None if self.connection is None else self.connection.machine.rtt_s,
            sent_bytes=session.sent_bytes,
            received_bytes=session.assembly.received_bytes,
            sent_bytes_per_s=sent_bytes_per_s,
            received_bytes_per_s=received_bytes_per_s,
            retransmitted_bytes=session.retransmitted_bytes,
            unacked_bytes=session.unacked_bytes,
            queued_bytes={traffic.name.lower(): nbytes for traffic, nbytes in scheduler.queued_bytes.items()},
            peer_holds_bytes=scheduler.credits.used_bytes,
            window_bytes=scheduler.credits.window_bytes,
            credit_stalls=scheduler.stalls,
            last_failure=self.last_failure,
        )

    # The connection

    def attach(self, connection: Connection, standing: bytes) -> None:
        """A connection stands and carries the link from now on. Raises RemoteProtocolError."""
        old, self.connection = self.connection, None
        if old is not None:
            old.supersede()
        if self._deadline is not None:
            self._deadline.cancel()
        first = not self.ever_open
        arrived = self.session.resume(Standing.unpack(standing))
        self.connection = connection
        self.down.clear()
        if self._goodbye_said:
            connection.machine.say_goodbye()
        connection.gone.add_done_callback(lambda _: self._connection_gone(connection))
        if first:
            self._owner.link_opened(self)
        if self._shape is not None:
            connection.shape(*self._shape)
        self._tell_sent(arrived)
        if self._finishing:
            self.finish()
        self._pump()

    def next_frame(self) -> tuple[Frame, int] | None:
        """The frame that goes next, with its number; None if none may go now."""
        sent = self.session.next_frame()
        if sent is None:
            return None
        if sent.complete is not None and not self.session.resumable:
            self._owner.link_sent(self, sent.complete)
        return sent.frame, sent.sequence

    def event_came(self, event: Arrived | Control | None) -> None:
        """Called by the connection: a message, an acknowledgement, a receipt, or (from a superseded one) a notice.

        Raises RemoteProtocolError.
        """
        if isinstance(event, Arrived):
            self._owner.link_message(self, event)
        elif event is None or event.kind in UNNUMBERED - {Kind.ACK}:
            return
        elif not isinstance(event.fields, dict):
            raise RemoteProtocolError(f"{event.kind.name}: fields must be a map")
        elif event.kind is Kind.ACK:
            self._tell_sent(self.session.ack_received(event.fields))
            self._pump()
        elif event.kind is Kind.RECEIPT:
            self.session.receipt_received(event.fields)
            self._pump()
        else:
            self.notice_came(Notice(event.kind, event.fields))

    def notice_came(self, notice: Notice) -> None:
        """Called by the connection. Raises RemoteProtocolError."""
        self._end_heard = self._end_heard or notice.kind in (Kind.GOODBYE, Kind.FAIL)
        self._owner.link_notice(self, notice)

    def bytes_received(self) -> None:
        """Called by the connection: there may be something to acknowledge."""
        if self.connection is None or not self.session.owes_word:
            return
        urgent = self.session.word_is_urgent
        if self._word is None or (urgent and not self._word_is_urgent):
            if self._word is not None:
                self._word.cancel()
            # Never at once: this may be called while a frame is on its way into the socket.
            self._word = self._loop.call_later(0.0 if urgent else WORD_S, self._send_word)
            self._word_is_urgent = urgent

    def connection_over(self, connection: Connection, error: HybridEPError | None) -> None:
        """Called by the connection: it ended, by goodbye or by `error`."""
        if connection is not self.connection or self._over:
            return
        resumable = self.session.resumable
        ended = resumable and (self._end_heard or ((self._goodbye_said or self._finishing) and self.session.idle))
        if not resumable or isinstance(error, RemoteProtocolError) or ended:
            self._over = True
            self._owner.link_closed(self, error if not ended else None)
        else:
            self._interrupted(connection, error)

    def _interrupted(self, connection: Connection, error: HybridEPError | None) -> None:
        self.connection = None
        connection.supersede()
        self.down.set()
        reason = error.reason if isinstance(error, TransportError) else str(error)
        self._lost = (reason, time.monotonic())
        self._deadline = self._loop.call_later(self._timeouts.resume_s, self.give_up_waiting)

    def give_up_waiting(self) -> None:
        """No connection will come any more: end with what was lost. Only while there is none."""
        if self._deadline is not None:
            self._deadline.cancel()
        reason, since = self._lost
        attempt = f"; last attempt: {self.last_failure}" if self.last_failure else ""
        waited_s = time.monotonic() - since
        self._over = True
        lost = ConnectionLost(self.name, f"{reason}, and it was not back within {waited_s:.1f} s{attempt}")
        self._owner.link_closed(self, lost)
        self._end()

    def _connection_gone(self, connection: Connection) -> None:
        if connection is self.connection:
            self.connection = None
            if self._over:
                self._end()

    def _end(self) -> None:
        self._over = True
        for timer in (self._deadline, self._word):
            if timer is not None:
                timer.cancel()
        if self.connection is None and not self.gone.done():
            self.gone.set_result(None)

    def _pump(self) -> None:
        if self.connection is not None:
            self.connection.pump()

    def _send_word(self) -> None:
        if self._word is not None:
            self._word.cancel()
            self._word = None
        if self.connection is not None:
            self.session.queue_receipts()
            ack = self.session.ack()
            if ack is not None:
                self.connection.tell(Kind.ACK, ack)
            self._pump()

    def _tell_sent(self, arrived: list[Outgoing]) -> None:
        for outgoing in arrived:
            self._owner.link_sent(self, outgoing)


class _Rates:
    """Bytes per second between the last two readings that were at least a second apart."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), 0, 0)
        self._rates = (0.0, 0.0)

    def measure(self, now: float, sent_bytes: int, received_bytes: int) -> tuple[float, float]:
        then, sent_before, received_before = self._last
        seconds = now - then
        if seconds >= 1.0:
            self._rates = ((sent_bytes - sent_before) / seconds, (received_bytes - received_before) / seconds)
            self._last = (now, sent_bytes, received_bytes)
        return self._rates
