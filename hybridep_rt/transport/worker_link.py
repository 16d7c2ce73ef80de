"""A worker's way to all other workers: one connection to its DC's coordinator, served by one background thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Self

import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import DeadlineExceeded, HybridEPError, LocalProtocolError, PeerLost, TransportError
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.envelope import Envelope, encode_envelope
from hybridep_rt.protocol.frames import HEADER_BYTES, Arrived, Kind, pack_fields
from hybridep_rt.protocol.inquiry import Late
from hybridep_rt.protocol.link import NONCE_BYTES, Job, LinkMachine, Notice, pack_peer, read_peer
from hybridep_rt.protocol.messages import Message, Payload, Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.protocol.scheduler import Outgoing
from hybridep_rt.protocol.session import INCARNATION_BYTES, Session
from hybridep_rt.transport.connection import FLUSH_S, Connection
from hybridep_rt.transport.dial import join
from hybridep_rt.transport.link import Link
from hybridep_rt.transport.mailboxes import Mailboxes, Wait, span_key, span_name


class WorkerLink:
    """A WanPort over sockets. Make it with `connect`. All methods are for any thread."""

    def __init__(
        self,
        address: Address,
        job: Job,
        dc_names: tuple[str, ...],
        timeouts: Timeouts,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.address = address
        self.mailboxes = Mailboxes(address, dc_names, timeouts.operation_s, metrics, self._taken, self._ran_out)
        self._job = job
        self._dc_names = dc_names
        self._timeouts = timeouts
        self._limits = limits
        self.metrics = metrics
        self._coordinator = Address(address.dc, COORDINATOR)
        self._link: Link | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._handover: deque[Outgoing] = deque()
        self._taken_ids: deque[int] = deque()
        self._sending: dict[int, tuple[int, str]] = {}
        self._woken = False
        self._closed = False
        self._where = "its start"
        self._thread: threading.Thread | None = None

    @classmethod
    def connect(
        cls,
        endpoint: str,
        address: Address,
        job: Job,
        dc_names: tuple[str, ...],
        timeouts: Timeouts,
        limits: Limits,
        metrics: Metrics,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> Self:
        """Join the job through the coordinator at `endpoint` (`unix:PATH` or `tcp:HOST:PORT`). Serve on a `new_loop`.

        Returns when every worker of every DC is there. Raises HandshakeRefused, ConnectFailed, PeerLost (with who is
        missing, or who failed meanwhile), DeadlineExceeded.
        """
        self = cls(address, job, dc_names, timeouts, limits, metrics)
        self._thread = threading.Thread(
            target=self._serve,
            args=(endpoint, new_loop),
            name=f"worker link {address.dc}.{address.worker}",
            daemon=True,
        )
        self._thread.start()
        # The coordinator gives up first, and knows better who is missing.
        patience_s = timeouts.rendezvous_s + timeouts.goodbye_s
        try:
            self._ready.result(patience_s)
        except HybridEPError:
            self._stop(FLUSH_S)
            raise
        except TimeoutError:
            self._stop(0.0)
            raise DeadlineExceeded(
                peer=self._name_of(self._coordinator), operation="rendezvous", layer=None, waited_s=patience_s
            ) from None
        return self

    def send(
        self,
        to: Address,
        channel: str,
        position: Position,
        payload: Payload,
        *,
        traffic: Traffic,
        counts: Sequence[int] = (),
        urgency: int = 0,
    ) -> None:
        """See `WanPort.send`. Raises LocalProtocolError for an unknown DC, a message over the limits, after close."""
        if self._closed:
            raise LocalProtocolError("send after close")
        self.check()
        self._where = position.describe()
        envelope = Envelope(self.address, to, channel, position, tuple(counts), urgency)
        buffers = tuple(memoryview(buffer).cast("B") for buffer in payload)
        outgoing = Outgoing((self.address, to, channel), traffic, urgency, encode_envelope(envelope), buffers)
        self._check(outgoing)
        if self.metrics.trace.is_on:
            self._sending[id(outgoing)] = (time.monotonic_ns(), span_name(to, channel, position))
        self._hand_over(outgoing)
        if to.dc != self.address.dc:
            nbytes = outgoing.payload_bytes + len(outgoing.metadata) + HEADER_BYTES
            self.metrics.sent(to.dc, traffic, nbytes)

    def receive(self, source: Address, channel: str, position: Position, timeout_s: float | None = None) -> Message:
        """See `WanPort.receive`."""
        self._where = position.describe()
        return self.mailboxes.receive(source, channel, position, timeout_s)

    async def receive_async(
        self, source: Address, channel: str, position: Position, timeout_s: float | None = None
    ) -> Message:
        """`receive` for a caller that runs an event loop; cancelling it loses no message."""
        self._where = position.describe()
        return await self.mailboxes.receive_async(source, channel, position, timeout_s)

    def take(self, source: Address, channel: str, position: Position) -> Message | None:
        """See `WanPort.take`."""
        return self.mailboxes.take(source, channel, position)

    def watch(self, channel: str, notify: Callable[[], None]) -> None:
        """See `WanPort.watch`."""
        self.mailboxes.watch(channel, notify)

    def check(self) -> None:
        """See `WanPort.check`."""
        self.mailboxes.check()

    def expect(self, peers: Iterable[Address], position: Position) -> None:
        """See `WanPort.expect`."""
        self.mailboxes.expect(peers, position)

    def close(self) -> None:
        """See `WanPort.close`. Waits at most `operation_s` until the coordinator has all that is queued."""
        if not self._closed:
            self._closed = True
            self._call(self._say_goodbye)
            self._stop(self._timeouts.operation_s)

    def fail(self, reason: str) -> None:
        """Tell everyone that this worker failed, in one line; waits at most 1 s until that has been passed on."""
        if not self._closed:
            self._closed = True
            self._call(lambda: self._tell_failure(reason))
            self._stop(FLUSH_S)

    def _check(self, outgoing: Outgoing) -> None:
        to = outgoing.flow[1]
        if not 0 <= to.dc < len(self._dc_names):
            raise LocalProtocolError(f"no DC {to.dc}: there are {len(self._dc_names)}")
        nbytes, about = outgoing.payload_bytes, len(outgoing.metadata)
        if nbytes > self._limits.message_bytes or about > self._limits.metadata_bytes:
            raise LocalProtocolError(f"message of {nbytes} bytes (and {about} of metadata) is over the limit")

    def _hand_over(self, outgoing: Outgoing) -> None:
        with self._lock:
            self._handover.append(outgoing)
            wake, self._woken = not self._woken, True
        if wake:
            self._call(self._take_over)

    def _taken(self, message_id: int) -> None:
        with self._lock:
            self._taken_ids.append(message_id)
            wake, self._woken = not self._woken, True
        if wake:
            self._call(self._take_over)

    def _ran_out(self, wait: Wait) -> None:
        self._call(lambda: self._report(wait))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run it in the background thread, unless that has ended (then `mailboxes` say why)."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    def _stop(self, patience_s: float) -> None:
        thread = self._thread
        if thread is None:
            return
        thread.join(patience_s)
        if thread.is_alive():
            self._call(self._abort)
            thread.join(FLUSH_S)

    # In the background thread

    def _serve(self, endpoint: str, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main(endpoint))
        except HybridEPError as error:
            self._end(error)
        except asyncio.CancelledError:
            pass  # `_stop` ran out of patience
        except BaseException as error:
            self._end(TransportError(self._name_of(self.address), f"its link broke: {error!r}"))
            raise
        self._end(PeerLost(self._name_of(self._coordinator), "this worker's link to it is closed"))

    async def _main(self, endpoint: str) -> None:
        self._main_task = asyncio.current_task()
        deadline = time.monotonic() + self._timeouts.rendezvous_s
        link = await join(self._make, endpoint, self._name_of(self._coordinator), deadline)
        await asyncio.shield(link.gone)

    def _make(self) -> Connection:
        self._session = session = Session(os.urandom(INCARNATION_BYTES), self._limits, resumable=False)
        machine = LinkMachine(
            self.address,
            self._job,
            self._timeouts,
            os.urandom(NONCE_BYTES),
            time.monotonic(),
            peer=self._coordinator,
            peer_name=self._name_of(self._coordinator),
            standing=lambda address: session.standing().pack(),
        )
        return Connection(machine, self, self._limits)

    def _take_over(self) -> None:
        with self._lock:
            batch, taken = list(self._handover), list(self._taken_ids)
            self._handover.clear()
            self._taken_ids.clear()
            self._woken = False
        if self._link is not None:
            for message_id in taken:
                self._link.dealt_with(message_id)
            self._link.send_many(batch)

    def _say_goodbye(self) -> None:
        self._take_over()
        if self._link is not None:
            self._link.say_goodbye(pack_peer(self.address, self._where))

    def _tell_failure(self, reason: str) -> None:
        if self._link is not None:
            self._link.tell(Kind.FAIL, pack_peer(self.address, reason))

    def _report(self, wait: Wait) -> None:
        if self._link is not None:
            self._link.tell(Kind.LATE, replace(self._describe(wait), asked=(self.address,)).pack())

    def _excuse(self, link: Link) -> None:
        wait = self.mailboxes.longest_wait()
        link.tell(Kind.EXCUSE, pack_fields() if wait is None else self._describe(wait).pack())

    def _describe(self, wait: Wait) -> Late:
        assert self._session is not None
        outstanding_bytes = self._session.assembly.outstanding_bytes(wait.source, self.address, wait.channel)
        waited_s = time.monotonic() - wait.started
        return Late(wait.source, wait.operation, wait.layer, waited_s, outstanding_bytes, channel=wait.channel)

    def _abort(self) -> None:
        if self._link is not None:
            self._link.abort()
        elif self._main_task is not None:
            self._main_task.cancel()

    def _end(self, error: HybridEPError) -> None:
        self.mailboxes.fail(error)
        if not self._ready.done():
            self._ready.set_exception(error)

    def _name_of(self, address: Address) -> str:
        return address.describe(self._dc_names)

    # Owner of the connection and of the link

    def connection_opened(self, connection: Connection, standing: bytes) -> Link:
        """See `ConnectionOwner`."""
        assert self._session is not None
        self._link = Link(self._coordinator, self._name_of(self._coordinator), self._session, self, self._timeouts)
        return self._link

    def connection_refused(self, connection: Connection, error: HybridEPError) -> None:
        """See `ConnectionOwner`: `join` raises it or tries again."""

    def link_opened(self, link: Link) -> None:
        """See `Owner`."""

    def link_message(self, link: Link, arrived: Arrived) -> None:
        """See `Owner`."""
        message, trace = arrived.message, self.metrics.trace
        if trace.is_on:
            now_ns, name = time.monotonic_ns(), span_name(message.to, message.channel, message.position)
            trace.add("receive", name, now_ns, now_ns, span_key(message.source, name))
        self.mailboxes.deliver(message, arrived.message_id)

    def link_notice(self, link: Link, notice: Notice) -> None:
        """See `Owner`."""
        match notice.kind:
            case Kind.READY if not self._ready.done():
                self._ready.set_result(None)
            case Kind.DEPART:
                peer, where = read_peer(notice.fields)
                self.mailboxes.depart(peer, where)
            case Kind.FAIL:
                peer, reason = read_peer(notice.fields)
                late = Late.read(notice.fields).error(self._dc_names) if "waited" in notice.fields else None
                self._end(late or PeerLost(self._name_of(peer), reason))
                link.give_up()
            case Kind.LATE:
                self._excuse(link)
            case Kind.GOODBYE:
                link.finish()

    def link_sent(self, link: Link, outgoing: Outgoing) -> None:
        """See `Owner`."""
        if id(outgoing) in self._sending:
            start_ns, name = self._sending.pop(id(outgoing))
            self.metrics.trace.add("send", name, start_ns, time.monotonic_ns(), span_key(self.address, name))

    def link_closed(self, link: Link, error: HybridEPError | None) -> None:
        """See `Owner`."""
        if error is not None:
            self._end(PeerLost(self._name_of(self._coordinator), getattr(error, "reason", str(error))))
