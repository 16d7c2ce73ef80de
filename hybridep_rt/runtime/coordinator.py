"""The coordinator of one DC: brings its workers and the other DCs together, then routes messages between them.

A message is taken from a worker (or another DC) whole and sent on in chunks by the next link's scheduler.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import HybridEPError, RemoteProtocolError, TransportError
from hybridep_rt.protocol import inquiry
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Arrived, Kind, pack_fields
from hybridep_rt.protocol.inquiry import Inquiry, Late
from hybridep_rt.protocol.link import NONCE_BYTES, Job, LinkMachine, Notice, Refusal, read_peer
from hybridep_rt.protocol.membership import Command, End, Membership, TellSites, TellWorkers
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.scheduler import Outgoing
from hybridep_rt.protocol.session import INCARNATION_BYTES, Session, Standing
from hybridep_rt.runtime.sites import Sites, reachable_peers
from hybridep_rt.runtime.status import Status, serve_status
from hybridep_rt.transport.accept import accept_all
from hybridep_rt.transport.connection import FLUSH_S, Connection
from hybridep_rt.transport.link import Link
from hybridep_rt.transport.listeners import Listeners
from hybridep_rt.transport.tls import Tls
from topology import Topology


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What one coordinator is told. `dc` is its DC's number, `epoch` the plan's.

    `tls`: for the links to other DCs. `status_path`: a Unix socket on which it answers who asks how the links are.
    """

    topology: Topology
    dc: int
    run_token: bytes = field(repr=False)
    epoch: int
    timeouts: Timeouts
    limits: Limits
    tls: Tls | None = None
    status_path: str | None = None

    @property
    def job(self) -> Job:
        """What every process of the job has in common."""
        return Job(self.topology.cluster, self.topology.digest(), self.epoch, self.run_token)


def run_coordinator(
    config: CoordinatorConfig,
    listeners: Listeners,
    peers: Mapping[int, tuple[str, int]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    """Serve on a `new_loop` until every worker of every DC has said goodbye. `peers`: DC -> its coordinator's address.

    Raises ConfigError (no TLS where it is needed), HandshakeRefused, ConnectFailed (who is missing), PeerLost
    (who failed), PeerRestarted, after one line about it on stderr.
    """
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(config, listeners, peers))
    except HybridEPError as error:
        name = Address(config.dc, COORDINATOR).describe(config.topology.dc_names)
        sys.stderr.write(f"hybridep: {name}: {error}\n")  # in one piece, whoever else writes
        sys.stderr.flush()
        raise
    finally:
        listeners.close()


async def _serve(config: CoordinatorConfig, listeners: Listeners, peers: Mapping[int, tuple[str, int]]) -> None:
    coordinator = Coordinator(config)
    await coordinator.listen(listeners)
    coordinator.dial(peers)
    error = await coordinator.finished()
    if error is not None:
        raise error


class Coordinator:
    """The owner of all links of one DC. Lives in one event loop."""

    def __init__(self, config: CoordinatorConfig) -> None:
        topology = config.topology
        self._config = config
        self._names = topology.dc_names
        self._me = Address(config.dc, COORDINATOR)
        self._job = config.job
        self._loop = asyncio.get_running_loop()
        self._membership = Membership(
            config.dc, topology.workers_per_dc, self._names, config.timeouts.rendezvous_s, time.monotonic()
        )
        self._sites = Sites(
            topology,
            config.dc,
            self._job,
            config.timeouts,
            config.limits,
            config.tls,
            self,
            self._membership.admit_site,
        )
        self._inquiry = Inquiry(config.dc, lambda dc: self._sites.links[dc].connection is not None)
        self._links: dict[Address, Link] = {}
        self._sessions: dict[Address, Session] = {}
        self._open: set[Link] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._outcome: asyncio.Future[HybridEPError | None] = self._loop.create_future()

    async def listen(self, listeners: Listeners) -> None:
        """Accept workers and other coordinators. Raises ConfigError."""
        loop, strangers = self._loop, self._config.limits.strangers
        workers = self._config.topology.workers_per_dc[self._me.dc]
        for listener in (listeners.unix, listeners.workers_tcp):
            if listener is not None:
                self._tasks.append(loop.create_task(accept_all(listener, self._accept_worker, workers + strangers)))
        if listeners.wan is not None and listeners.wan_address is not None:
            self._sites.check_security([listeners.wan_address])
            most = len(self._names) + strangers
            tls, handshake_s = self._sites.tls_context, self._config.timeouts.handshake_s
            self._tasks.append(loop.create_task(accept_all(listeners.wan, self._sites.accept, most, tls, handshake_s)))
        if self._config.status_path is not None:
            answer = serve_status(self._status)
            self._servers.append(await loop.create_unix_server(answer, self._config.status_path))
            os.chmod(self._config.status_path, 0o600)

    def dial(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Start to reach the other coordinators, and the clock of the rendezvous. Raises ConfigError."""
        others = reachable_peers(self._config.topology, peers)
        self._sites.check_security(list(others.values()))
        self._tasks.append(self._loop.create_task(self._watch_rendezvous()))
        self._tasks += [self._loop.create_task(self._sites.reach(dc, where)) for dc, where in sorted(others.items())]

    async def finished(self) -> HybridEPError | None:
        """Wait for the end of the job; all links are closed then. Returns what went wrong, if anything did."""
        error = await self._outcome
        patience_s = self._config.timeouts.goodbye_s if error is None else FLUSH_S
        await _gone(self._open, patience_s)
        if error is None:
            silent = [link for link in self._open if self._membership.is_silent(link.peer)]
            timeouts = self._config.timeouts
            await _gone(silent, timeouts.silence_s + timeouts.resume_s + timeouts.goodbye_s)
            error = self._membership.lost_after_end
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.close()
        for link in list(self._open):
            link.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return error

    # Owner of the links

    def connection_opened(self, connection: Connection, standing: bytes) -> Link:
        """See `ConnectionOwner`: a worker."""
        return Link(
            connection.peer,
            connection.peer.describe(self._names),
            self._sessions.pop(connection.peer),
            self,
            self._config.timeouts,
        )

    def connection_refused(self, connection: Connection, error: HybridEPError) -> None:
        """See `ConnectionOwner`."""
        self._membership.refused(error, connection.host)

    def site_refused(self, error: HybridEPError) -> None:
        """See `SitesOwner`."""
        self._do(self._membership.was_refused(error))

    def site_missed(self, error: HybridEPError) -> None:
        """See `SitesOwner`."""
        self._membership.refused(error, "")

    def link_opened(self, link: Link) -> None:
        """See `Owner`."""
        self._links[link.peer] = link
        self._open.add(link)
        link.gone.add_done_callback(lambda _: self._open.discard(link))
        self._do(self._membership.joined(link.peer))

    def link_message(self, link: Link, arrived: Arrived) -> None:
        """Route a message. Raises RemoteProtocolError if its addresses can't be true."""
        message = arrived.message
        self._check_way(link.peer, message)
        if self._membership.ended or self._membership.has_departed(message.to):
            link.dealt_with(arrived.message_id)
            return
        next_hop = message.to if message.to.dc == self._me.dc else Address(message.to.dc, COORDINATOR)
        onward = self._links.get(next_hop)
        if onward is None:
            raise RemoteProtocolError(f"a message to {message.to.describe()}, which is not connected")
        flow, origin = (message.source, message.to, message.channel), (link.peer, arrived.message_id)
        payload = (message.payload,)
        onward.send(Outgoing(flow, arrived.traffic, arrived.urgency, arrived.metadata, payload, origin))

    def _check_way(self, peer: Address, message: Message) -> None:
        """A worker speaks for itself, another DC's coordinator for its DC and only to this one."""
        source, to = message.source, message.to
        if source != peer if peer.worker != COORDINATOR else (source.dc, to.dc) != (peer.dc, self._me.dc):
            raise RemoteProtocolError(f"a message from {source.describe()} to {to.describe()} came this way")
        if not self._membership.knows(to):
            raise RemoteProtocolError(f"a message to {to.describe()}, which does not exist")

    def link_sent(self, link: Link, outgoing: Outgoing) -> None:
        """See `Owner`: where the message came from, there is room for another."""
        assert outgoing.origin is not None
        peer, message_id = outgoing.origin
        origin = self._links.get(peer)
        if origin is not None:
            origin.dealt_with(message_id)

    def link_notice(self, link: Link, notice: Notice) -> None:
        """See `Owner`."""
        if link.peer.worker == COORDINATOR:
            self._on_site_notice(link, notice)
        else:
            self._on_worker_notice(link, notice)

    def link_closed(self, link: Link, error: HybridEPError | None) -> None:
        """See `Owner`."""
        self._links.pop(link.peer, None)
        if error is not None:
            reason = error.reason if isinstance(error, TransportError) else f"it broke the protocol: {error}"
            self._do(self._membership.lost(link.peer, reason))

    def _on_worker_notice(self, link: Link, notice: Notice) -> None:
        match notice.kind:
            case Kind.LATE:
                self._inquire(self._inquiry.report(self._read_wait(link, notice), time.monotonic()))
                return
            case Kind.EXCUSE:
                excuse = self._read_wait(link, notice) if notice.fields else None
                self._inquire(self._inquiry.answer(link.peer, excuse, time.monotonic()))
                return
        address, text = read_peer(notice.fields)
        if address != link.peer or notice.kind not in (Kind.FAIL, Kind.GOODBYE):
            raise RemoteProtocolError(f"{notice.kind.name} about {address.describe()} is not a worker's to say")
        if notice.kind is Kind.FAIL:
            self._do(self._membership.lost(address, text))
            return
        del self._links[address]
        link.say_goodbye(pack_fields())
        link.give_up()
        self._do(self._membership.departed(address, text))

    def _on_site_notice(self, link: Link, notice: Notice) -> None:
        match notice.kind:
            case Kind.SITE_READY:
                self._do(self._membership.site_ready(link.peer.dc))
            case Kind.DEPART:
                address, where = read_peer(notice.fields)
                if address.dc != link.peer.dc:
                    raise RemoteProtocolError(f"DEPART of {address.describe()} came from DC {link.peer.dc}")
                self._do(self._membership.departed(address, where))
            case Kind.FAIL if "waited" in notice.fields:
                self._do(self._membership.late(Late.read(notice.fields)))
            case Kind.FAIL:
                self._do(self._membership.lost(*read_peer(notice.fields)))
            case Kind.LATE:
                self._inquire(self._inquiry.report(self._read_late(notice), time.monotonic()))
            case Kind.GOODBYE:
                self._membership.goodbye(link.peer)
                if self._membership.ended:
                    link.finish()
            case _:
                raise RemoteProtocolError(f"{notice.kind.name} is not a coordinator's to say")

    # Who is late

    def _read_late(self, notice: Notice) -> Late:
        late = Late.read(notice.fields)
        if not self._membership.knows(late.peer):
            raise RemoteProtocolError(f"{notice.kind.name} about {late.peer.describe()}, which does not exist")
        return late

    def _read_wait(self, link: Link, notice: Notice) -> Late:
        """A worker's wait. What it waits for may be on its way here from another DC."""
        late = self._read_late(notice)
        if late.bytes_outstanding is not None or late.peer.dc == self._me.dc:
            return late
        assembly = self._sites.links[late.peer.dc].session.assembly
        return replace(late, bytes_outstanding=assembly.outstanding_bytes(late.peer, link.peer, late.channel))

    def _inquire(self, commands: Iterable[inquiry.Command]) -> None:
        for command in commands:
            match command:
                case inquiry.Forward(dc, report):
                    self._sites.links[dc].tell(Kind.LATE, report.pack())
                case inquiry.Ask(worker, report) if worker in self._links:
                    self._links[worker].tell(Kind.LATE, report.pack())
                case inquiry.Verdict(late):
                    self._do(self._membership.late(late))
        deadline = self._inquiry.get_timer()
        if deadline is not None and not self._membership.ended:
            self._loop.call_later(max(0.0, deadline - time.monotonic()), self._answers_are_due)

    def _answers_are_due(self) -> None:
        self._inquire(self._inquiry.handle_timer(time.monotonic()))

    # What the membership decides

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case TellWorkers(kind, metadata, after):
                    _tell([link for peer, link in self._links.items() if peer.dc == self._me.dc], kind, metadata, after)
                case TellSites(dcs, kind, metadata, after):
                    sites = [self._links.get(Address(dc, COORDINATOR)) for dc in dcs]
                    _tell([link for link in sites if link is not None], kind, metadata, after)
                case End(error):
                    self._end(error)

    def _status(self) -> Status:
        links = {link.peer.describe(self._names): link.status() for link in self._links.values()}
        return Status(self._me.describe(self._names), os.getpid(), links)

    def _end(self, error: HybridEPError | None) -> None:
        self._outcome.set_result(error)
        for link in list(self._links.values()):
            if error is not None:
                link.give_up()
            else:
                link.drop_messages()  # every worker has ended
                link.say_goodbye(pack_fields())
                if link.peer.worker == COORDINATOR and not self._membership.is_silent(link.peer):
                    link.finish()

    # Getting connected

    def _accept_worker(self) -> Connection:
        session = Session(os.urandom(INCARNATION_BYTES), self._config.limits, resumable=False)

        def admit(address: Address, standing: bytes) -> Refusal | None:
            Standing.unpack(standing)
            refusal = self._membership.admit_worker(address)
            if refusal is None:
                self._sessions[address] = session
            return refusal

        machine = LinkMachine(
            self._me,
            self._job,
            self._config.timeouts,
            os.urandom(NONCE_BYTES),
            time.monotonic(),
            admit=admit,
            standing=lambda address: session.standing().pack(),
        )
        return Connection(machine, self, self._config.limits)

    async def _watch_rendezvous(self) -> None:
        while (deadline := self._membership.get_timer()) is not None:
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            self._do(self._membership.handle_timer(time.monotonic()))


async def _gone(links: Iterable[Link], patience_s: float) -> None:
    waits = [link.gone for link in links]
    if waits:
        await asyncio.wait(waits, timeout=patience_s)


def _tell(links: Iterable[Link], kind: Kind, metadata: bytes, after: Address | None) -> None:
    for link in links:
        if after is None:
            link.tell(kind, metadata)
        else:
            link.tell_after(after, kind, metadata)
