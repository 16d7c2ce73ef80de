"""One connection of any kind (worker or WAN, dialled or accepted): the I/O around a LinkMachine, for one `Link`.

Received payload goes from the socket straight into the message's memory; sent payload is never copied. Little is handed
to the socket ahead of time, so that the scheduler's priorities hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from hybridep_rt.config import Limits
from hybridep_rt.errors import HybridEPError, RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.frames import HEADER_BYTES, Arrived, Control, Frame, Kind, control_frame, encode_frame
from hybridep_rt.protocol.link import Closed, Command, LinkMachine, Notice, Opened, Send
from hybridep_rt.protocol.pacing import Downlink, LinkPacer
from hybridep_rt.transport.socket_options import UNSENT_BYTES, limit_unsent, tune
from hybridep_rt.transport.timer import Timer
from hybridep_rt.transport.tls import certified_names

if TYPE_CHECKING:
    from hybridep_rt.transport.link import Link

FLUSH_S = 1.0
"""A connection that is being closed gets so long to take what is queued."""

_PAUSE_AHEAD_S = 0.05

Event: TypeAlias = Control | Arrived | None


class ConnectionOwner(Protocol):
    """Who decides what a connection is good for."""

    def connection_opened(self, connection: Connection, standing: bytes) -> Link:
        """The handshake succeeded: `connection.peer` is known. The link that it carries from now on."""

    def connection_refused(self, connection: Connection, error: HybridEPError) -> None:
        """The handshake failed; said instead of `connection_opened`."""


class Connection(asyncio.BufferedProtocol):
    """A socket from its handshake on. `congestion`: TCP congestion control, where the system allows that."""

    def __init__(self, machine: LinkMachine, owner: ConnectionOwner, limits: Limits, congestion: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self.machine = machine
        self._owner = owner
        self._decoder = FrameDecoder(limits)
        self._congestion = congestion
        self._link: Link | None = None
        self._transport: asyncio.Transport | None = None
        self.host = ""
        """The other end's address, empty on a Unix socket."""
        self._urgent: deque[Frame] = deque()
        self._pacer: LinkPacer | None = None
        self._downlink: Downlink | None = None
        self._full = False
        self._pausing = False
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
        """Who is at the other end, known once the handshake is done."""
        assert self.machine.peer is not None
        return self.machine.peer

    def certified_names(self) -> frozenset[str] | None:
        """The names in the peer's certificate; None without TLS."""
        return None if self._transport is None else certified_names(self._transport)

    def shape(self, chunk_bytes: int, pacer: LinkPacer | None, downlink: Downlink | None) -> None:
        """The link's rate is known. `pacer` and `downlink` emulate it; None: it is a real one."""
        if self._transport is not None:
            limit_unsent(self._transport, min(chunk_bytes, UNSENT_BYTES))
        self._pacer = pacer
        self._downlink = downlink
        for name, call in (("pump", self.pump), ("release", self._release), ("arrive", self._arrive)):
            if pacer is not None or downlink is not None:
                self._precise[name] = Timer(call)

    def tell(self, kind: Kind, metadata: bytes) -> None:
        """Send an unnumbered frame before all that is queued."""
        self._urgent.append(control_frame(kind, metadata))
        self.pump()

    def finish(self) -> None:
        """Send what is queued, then close when the peer has closed; after `FLUSH_S` in any case."""
        if not self._finishing:
            self._finishing = True
            self._set_timer("abort", time.monotonic() + FLUSH_S, self.abort)
            self._resume_reading()
        self.pump()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    def supersede(self) -> None:
        """Another connection carries the link from now on: what this one brought is handed over, then it closes."""
        link, self._link = self._link, None
        self._over = True
        while self._arriving and link is not None:
            link.event_came(self._arriving.popleft()[1])
        self._cancel("watch")
        self.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        peername = transport.get_extra_info("peername")
        self.host = str(peername[0]) if isinstance(peername, tuple) else ""
        limit_unsent(self._transport, UNSENT_BYTES)
        tune(transport.get_extra_info("socket"), self._congestion)
        self._run(self.machine.start())
        self._watch()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._decoder.buffer() if not self._over else memoryview(bytearray(UNSENT_BYTES))

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        if self._over:
            return
        now = time.monotonic()
        self.machine.bytes_received(now)
        inside_frame = self._decoder.received(nbytes)
        due = now if self._downlink is None else self._downlink.receive(nbytes, now)
        if inside_frame and due <= now:
            return
        try:
            while not self._over and (event := self._decoder.next_event()) is not None:
                self._take(event, due, now)
        except RemoteProtocolError as error:
            self._close(error)
        if self._link is not None:
            self._link.bytes_received()
        if due > now + _PAUSE_AHEAD_S and not self._pausing and not self._finishing and self._transport is not None:
            self._pausing = True
            self._transport.pause_reading()
            self._set_timer("resume", due - _PAUSE_AHEAD_S / 2, self._resume_reading)

    def eof_received(self) -> bool:
        """See asyncio."""
        self._take(None, 0.0, 0.0)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._full = True
        self._transport = None
        if self._pacer is not None:
            self._pacer.idle()  # other links wait for their turn at the uplink
        self._take(None, 0.0, 0.0)
        self._cancel("abort")
        self._cancel("resume")
        if not self._arriving:
            self._close_timers()
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        """See asyncio."""
        self._full = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._full = False
        self.pump()

    # Inwards

    def _resume_reading(self) -> None:
        if self._pausing and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._pausing = False

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
            self._run(self.machine.ended())
        elif isinstance(event, Control) and event.kind not in (Kind.ACK, Kind.RECEIPT):
            self._run(self.machine.control_received(event))
        elif self._link is None:
            raise RemoteProtocolError("a receipt before the handshake")
        else:
            self._link.event_came(event)

    def _run(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(kind, metadata):
                    self.tell(kind, metadata)
                case Opened(_, standing):
                    self._open(standing)
                case Notice() if self._link is not None:
                    self._link.notice_came(command)
                case Closed(error):
                    self._close(error)

    def _open(self, standing: bytes) -> None:
        link = self._owner.connection_opened(self, standing)
        self._decoder.allow_messages(link.session.assembly)
        self._link = link
        link.attach(self, standing)
        self.opened.set_result(None)
        self._watch()

    def _close(self, error: HybridEPError | None) -> None:
        self.finish()
        self._cancel("watch")
        if self._over:
            return
        self._over = True
        if self._link is not None:
            self._link.connection_over(self, error)
        elif error is not None and not self.opened.done():
            self.opened.set_result(error)
            self._owner.connection_refused(self, error)

    # Outwards

    def pump(self) -> None:
        """Hand frames over while the socket (or the emulated line) takes them."""
        if self._pacer is not None:
            self._pump_paced(self._pacer)
        else:
            while not self._full and (ready := self._next_buffers()) is not None:
                self._write(ready[0])
        if self._finishing and not self._on_the_way and not self._ready():
            self._say_no_more()

    def _ready(self) -> bool:
        return bool(self._urgent) or (self._link is not None and self._link.session.ready())

    def _say_no_more(self) -> None:
        """End our side and read on until the peer closes: closing with unread bytes would discard what we sent."""
        if self._transport is not None and not self._silent:
            self._silent = True
            if self._transport.can_write_eof():
                with contextlib.suppress(OSError):  # the peer has reset the connection meanwhile
                    self._transport.write_eof()
            else:
                self._transport.close()  # TLS has no half of an end

    def _pump_paced(self, pacer: LinkPacer) -> None:
        now = time.monotonic()
        while not self._full and self._ready():
            may_start = pacer.ask(now)
            if may_start > now:
                self._precise["pump"].set(may_start)
                break
            ready = self._next_buffers()
            assert ready is not None
            buffers, nbytes = ready
            self._on_the_way.append((pacer.start(nbytes, now), buffers))
            if len(self._on_the_way) == 1:
                self._precise["release"].set(self._on_the_way[0][0])
        if self._full or not self._ready():
            pacer.idle()

    def _release(self) -> None:
        """Write what has come through the emulated line."""
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            self._write(self._on_the_way.popleft()[1])
        if self._on_the_way:
            self._precise["release"].set(self._on_the_way[0][0])
        else:
            self.pump()

    def _next_buffers(self) -> tuple[list[bytes | memoryview], int] | None:
        """Those of the frame that goes next, and their bytes; None if none may go now."""
        if self._urgent:
            frame, sequence = self._urgent.popleft(), 0
        elif self._link is not None and (numbered := self._link.next_frame()) is not None:
            frame, sequence = numbered
        else:
            return None
        head = encode_frame(frame, sequence)
        return [head, *frame.payload], HEADER_BYTES + len(frame.metadata) + frame.payload_bytes

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        if self._transport is not None and not self._silent:
            self._transport.writelines(buffers)

    # Time

    def _watch(self) -> None:
        """Call the machine when its timer is due. Its timer only moves later, except when the link opens."""
        now = time.monotonic()
        if self._pausing:
            self.machine.bytes_received(now)
        self._run(self.machine.handle_timer(now))
        if not self._over:
            self._set_timer("watch", self.machine.get_timer(), self._watch)

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
