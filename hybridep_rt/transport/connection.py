"""One connection of any kind (worker or WAN, dialled or accepted): the I/O around a LinkMachine and a SendScheduler.

Received payload goes from the socket straight into the message's memory; sent payload is never copied. Little is handed
to the socket ahead of time, so that the scheduler's priorities hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias, cast

from hybridep_rt.config import Limits
from hybridep_rt.errors import HybridEPError, RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.frames import HEADER_BYTES, Arrived, Control, Frame, FrameDecoder, Kind, encode_frame
from hybridep_rt.protocol.link import Closed, Command, LinkMachine, Notice, Opened, Send
from hybridep_rt.protocol.pacing import Downlink, LinkPacer
from hybridep_rt.protocol.scheduler import Outgoing, SendScheduler
from hybridep_rt.transport.timer import Timer

UNSENT_BYTES = 128 << 10
"""Most bytes in the kernel that are not on the wire yet, and most bytes queued in the event loop before it pauses."""

FLUSH_S = 1.0
"""A connection that is being closed gets so long to take what is queued."""

_PAUSE_AHEAD_S = 0.05
_TCP = (socket.AF_INET, socket.AF_INET6)

Event: TypeAlias = Control | Arrived | None


class Owner(Protocol):
    """Who is told what happens on a connection. All calls come from the event loop."""

    def link_opened(self, link: Connection) -> None:
        """The handshake succeeded; `link.peer` is known."""

    def link_message(self, link: Connection, arrived: Arrived) -> None:
        """A whole message arrived."""

    def link_notice(self, link: Connection, notice: Notice) -> None:
        """GOODBYE, READY, FAIL, ... arrived. Raises RemoteProtocolError if it is malformed."""

    def link_sent(self, link: Connection, outgoing: Outgoing) -> None:
        """The last byte of a message was handed to the socket (or to the emulated line)."""

    def link_closed(self, link: Connection, error: HybridEPError | None) -> None:
        """A link that had opened is over, by goodbye or by `error`; said once."""

    def link_refused(self, link: Connection, error: HybridEPError) -> None:
        """The handshake failed; said instead of `link_opened`."""


class Connection(asyncio.BufferedProtocol):
    """Messages are cut to `limits.chunk_max_bytes` until `shape` says otherwise."""

    def __init__(self, machine: LinkMachine, owner: Owner, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._owner = owner
        self._decoder = FrameDecoder(limits)
        self._scheduler = SendScheduler(limits.chunk_max_bytes, limits.open_messages)
        self._pacer: LinkPacer | None = None
        self._downlink: Downlink | None = None
        self._transport: asyncio.Transport | None = None
        self.host = ""
        """The other end's address, empty on a Unix socket."""
        self._sequence = 0
        self._full = False
        self._holding = False
        self._finishing = False
        self._silent = False
        self._over = False
        self.opened: asyncio.Future[HybridEPError | None] = self._loop.create_future()
        """Done when the handshake is: None, or why it failed."""
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed."""
        self._on_the_way: deque[tuple[float, list[bytes | memoryview]]] = deque()
        self._arriving: deque[tuple[float, Event]] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._precise: dict[str, Timer] = {}

    @property
    def peer(self) -> Address:
        """Who is at the other end, known once the link has opened."""
        assert self._machine.peer is not None
        return self._machine.peer

    @property
    def name(self) -> str:
        """The other end, for error messages."""
        return self._machine.peer_name

    def shape(self, chunk_bytes: int, pacer: LinkPacer | None = None, downlink: Downlink | None = None) -> None:
        """The link's rate is known: cut messages to it. `pacer` and `downlink` emulate it; None: it is a real one."""
        self._scheduler.chunk_bytes = chunk_bytes
        if self._transport is not None:
            limit_unsent(self._transport, min(chunk_bytes, UNSENT_BYTES))
        self._pacer = pacer
        self._downlink = downlink
        for name, call in (("pump", self._pump), ("release", self._release), ("arrive", self._arrive)):
            if pacer is not None or downlink is not None:
                self._precise[name] = Timer(call)

    def send(self, outgoing: Outgoing) -> None:
        """Queue a message."""
        self._scheduler.push(outgoing)
        self._pump()

    def send_many(self, batch: list[Outgoing]) -> None:
        """Queue messages, the most urgent of which goes first."""
        for outgoing in batch:
            self._scheduler.push(outgoing)
        self._pump()

    def tell(self, kind: Kind, metadata: bytes) -> None:
        """Send a frame without payload before all queued messages."""
        self._scheduler.push_control(kind, metadata)
        self._pump()

    def tell_after(self, source: Address, kind: Kind, metadata: bytes) -> None:
        """Send a frame without payload after the messages that are queued here from `source`."""
        self._scheduler.push_after(source, kind, metadata)
        self._pump()

    def say_goodbye(self, metadata: bytes) -> None:
        """Send GOODBYE once nothing else is queued; the connection may end from now on."""
        self._machine.say_goodbye()
        self._scheduler.push_last(Kind.GOODBYE, metadata)
        self._pump()

    def finish(self) -> None:
        """Send what is queued, then close when the peer has closed; after `FLUSH_S` in any case."""
        if not self._finishing:
            self._finishing = True
            self._set_timer("abort", time.monotonic() + FLUSH_S, self.abort)
            self.resume()
        self._pump()

    def drop_messages(self) -> None:
        """Nobody needs the queued messages any more: only frames without payload are still sent."""
        self._scheduler.drop_messages()

    def give_up(self) -> None:
        """Drop the messages and `finish`."""
        self.drop_messages()
        self.finish()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    def hold(self) -> None:
        """Stop reading until `resume`: the owner has enough of this peer's bytes."""
        if not self._holding and not self._finishing and self._transport is not None:
            self._holding = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again after `hold`."""
        if self._holding and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._holding = False

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        peername = transport.get_extra_info("peername")
        self.host = str(peername[0]) if isinstance(peername, tuple) else ""
        limit_unsent(self._transport, UNSENT_BYTES)
        tune(transport.get_extra_info("socket"))
        self._run(self._machine.start())
        self._watch()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._decoder.buffer() if not self._over else memoryview(bytearray(UNSENT_BYTES))

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        if self._over:
            return
        now = time.monotonic()
        self._machine.bytes_received(now)
        self._decoder.received(nbytes)
        due = now if self._downlink is None else self._downlink.receive(nbytes, now)
        try:
            while not self._over and (event := self._decoder.next_event()) is not None:
                self._take(event, due, now)
        except RemoteProtocolError as error:
            self._close(error)
        if due > now + _PAUSE_AHEAD_S and not self._holding:
            self.hold()
            self._set_timer("resume", due - _PAUSE_AHEAD_S / 2, self.resume)

    def eof_received(self) -> bool:
        """See asyncio."""
        self._take(None, 0.0, 0.0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._full = True
        self._transport = None
        self._cancel("abort")
        self._cancel("resume")
        if self._pacer is not None:
            self._pacer.idle()  # other links wait for their turn at the uplink
        self._take(None, 0.0, 0.0)
        if not self._arriving:
            self._close_timers()
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        """See asyncio."""
        self._full = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._full = False
        self._pump()

    # Inwards

    def _take(self, event: Event, due: float, now: float) -> None:
        """Handle an event now, or when the emulated downlink has let its bytes through."""
        if self._arriving or due > now:
            self._arriving.append((due, event))
            if len(self._arriving) == 1:
                self._precise["arrive"].set(due)
        else:
            self._handle(event)

    def _arrive(self) -> None:
        try:
            while self._arriving and self._arriving[0][0] <= time.monotonic():
                self._handle(self._arriving.popleft()[1])
        except RemoteProtocolError as error:
            self._close(error)
        if self._transport is None and not self._arriving:
            self._close_timers()
        if self._arriving:
            self._precise["arrive"].set(self._arriving[0][0])

    def _handle(self, event: Event) -> None:
        if self._over:
            return
        if event is None:
            self._run(self._machine.ended())
        elif isinstance(event, Arrived):
            self._owner.link_message(self, event)
        else:
            self._run(self._machine.control_received(event))

    def _run(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(kind, metadata):
                    self.tell(kind, metadata)
                case Opened():
                    self._decoder.allow_messages()
                    self.opened.set_result(None)
                    self._owner.link_opened(self)
                    self._watch()
                case Notice():
                    self._owner.link_notice(self, command)
                case Closed(error):
                    self._close(error)

    def _close(self, error: HybridEPError | None) -> None:
        self.finish()
        self._cancel("watch")
        if self._over:
            return
        self._over = True
        if self.opened.done():
            self._owner.link_closed(self, error)
        elif error is not None:
            self.opened.set_result(error)
            self._owner.link_refused(self, error)

    # Outwards

    def _pump(self) -> None:
        """Hand frames over while the socket (or the emulated line) takes them."""
        if self._pacer is not None:
            self._pump_paced(self._pacer)
        else:
            while not self._full and self._scheduler:
                self._write(self._next_buffers()[0])
        if self._finishing and not self._scheduler and not self._on_the_way:
            self._say_no_more()

    def _say_no_more(self) -> None:
        """End our side and read on until the peer closes: closing with unread bytes would discard what we sent."""
        if self._transport is not None and not self._silent:
            self._silent = True
            self._transport.write_eof()

    def _pump_paced(self, pacer: LinkPacer) -> None:
        now = time.monotonic()
        while not self._full and self._scheduler:
            may_start = pacer.ask(now)
            if may_start > now:
                self._precise["pump"].set(may_start)
                break
            buffers, nbytes = self._next_buffers()
            self._on_the_way.append((pacer.start(nbytes, now), buffers))
            if len(self._on_the_way) == 1:
                self._precise["release"].set(self._on_the_way[0][0])
        if self._full or not self._scheduler:
            pacer.idle()

    def _release(self) -> None:
        """Write what has come through the emulated line."""
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            self._write(self._on_the_way.popleft()[1])
        if self._on_the_way:
            self._precise["release"].set(self._on_the_way[0][0])
        else:
            self._pump()

    def _next_buffers(self) -> tuple[list[bytes | memoryview], int]:
        planned = self._scheduler.next_frame()
        assert planned is not None
        frame, complete = planned
        buffers = self._encode(frame)
        if complete is not None:
            self._owner.link_sent(self, complete)
        return buffers, HEADER_BYTES + len(frame.metadata) + frame.payload_bytes

    def _encode(self, frame: Frame) -> list[bytes | memoryview]:
        head = encode_frame(frame, self._sequence)
        self._sequence += 1
        return [head, *frame.payload]

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        if self._transport is not None and not self._silent:
            self._machine.bytes_sent(time.monotonic())
            self._transport.writelines(buffers)

    # Time

    def _watch(self) -> None:
        """Call the machine when its timer is due. Its timer only moves later, except when the link opens."""
        now = time.monotonic()
        if self._holding:
            self._machine.bytes_received(now)
        self._run(self._machine.handle_timer(now))
        if not self._over:
            self._set_timer("watch", self._machine.get_timer(), self._watch)

    def _set_timer(self, name: str, when: float, call: Callable[[], None]) -> None:
        """The event loop counts in milliseconds and may call early: everything called here looks at the clock."""
        self._cancel(name)
        self._timers[name] = self._loop.call_later(max(0.0, when - time.monotonic()), call)

    def _close_timers(self) -> None:
        for timer in self._precise.values():
            timer.close()

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def limit_unsent(transport: asyncio.Transport, nbytes: int) -> None:
    """Bound what waits in the event loop, and (TCP) in the kernel, and so can't be overtaken any more."""
    transport.set_write_buffer_limits(high=nbytes)
    sock = transport.get_extra_info("socket")
    if sock.family in _TCP:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def tune(sock: socket.socket) -> None:
    """TCP only: send small frames at once, and use BBR where that is allowed: on lossy long paths others collapse."""
    if sock.family in _TCP:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
