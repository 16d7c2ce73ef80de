"""The coordinator of one DC: brings its workers and the other DCs together, then routes messages between them.

A message is taken from a worker (or another DC) whole and sent on in chunks by the next link's scheduler.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import ConnectFailed, HandshakeRefused, HybridEPError, RemoteProtocolError, TransportError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Arrived, Kind, pack_fields
from hybridep_rt.protocol.link import NONCE_BYTES, Admit, Job, LinkMachine, Notice, read_peer
from hybridep_rt.protocol.membership import Command, End, Membership, TellSites, TellWorkers
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.pacing import Downlink, LinkPacer, Uplink
from hybridep_rt.protocol.scheduler import Outgoing
from hybridep_rt.transport.connection import FLUSH_S, Connection
from hybridep_rt.transport.dial import join
from hybridep_rt.transport.listeners import Listeners
from topology import Topology


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What one coordinator is told. `dc` is its DC's number, `epoch` the plan's."""

    topology: Topology
    dc: int
    run_token: bytes = field(repr=False)
    epoch: int
    timeouts: Timeouts
    limits: Limits

    @property
    def job(self) -> Job:
        """What every process of the job has in common."""
        return Job(self.topology.cluster, self.topology.digest(), self.epoch, self.run_token)


def run_coordinator(config: CoordinatorConfig, listeners: Listeners, peers: Mapping[int, tuple[str, int]]) -> None:
    """Serve until every worker of every DC has said goodbye. `peers`: DC -> address of its coordinator.

    Only DCs with a lower number are dialled. Raises HandshakeRefused, ConnectFailed (who is missing), PeerLost (who
    failed), after one line about it on stderr.
    """
    try:
        uvloop.run(_serve(config, listeners, peers))
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
        self._links: dict[Address, Connection] = {}
        self._sockets: set[Connection] = set()
        self._strangers: set[Connection] = set()
        self._said_goodbye: set[Connection] = set()
        self._held_bytes: Counter[Address] = Counter()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._outcome: asyncio.Future[HybridEPError | None] = self._loop.create_future()
        here = topology.datacenters[config.dc]
        self._uplink = Uplink(here.uplink_bytes_per_s or math.inf)
        self._downlink = Downlink(here.downlink_bytes_per_s) if here.downlink_bytes_per_s else None

    async def listen(self, listeners: Listeners) -> None:
        """Accept workers and other coordinators."""
        membership, loop = self._membership, self._loop
        workers_per_dc = self._config.topology.workers_per_dc
        workers = self._acceptor(membership.admit_worker, workers_per_dc[self._me.dc])
        self._servers.append(await loop.create_unix_server(workers, sock=listeners.unix))
        if listeners.workers_tcp is not None:
            self._servers.append(await loop.create_server(workers, sock=listeners.workers_tcp))
        if listeners.wan is not None:
            sites = self._acceptor(membership.admit_site, len(workers_per_dc))
            self._servers.append(await loop.create_server(sites, sock=listeners.wan))

    def dial(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Start to reach the coordinators of the lower-numbered DCs, and the clock of the rendezvous."""
        self._tasks.append(self._loop.create_task(self._watch_rendezvous()))
        self._tasks += [self._loop.create_task(self._join(dc, *peers[dc])) for dc in sorted(peers) if dc < self._me.dc]

    async def finished(self) -> HybridEPError | None:
        """Wait for the end of the job; all links are closed then. Returns what went wrong, if anything did."""
        error = await self._outcome
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.close()
        for stranger in self._strangers:
            stranger.abort()
        patience_s = self._config.timeouts.goodbye_s if error is None else FLUSH_S
        if self._sockets:
            await asyncio.wait([link.gone for link in self._sockets], timeout=patience_s)
        for link in list(self._sockets):
            link.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return error

    # Owner of the links

    def link_opened(self, link: Connection) -> None:
        """See `Owner`."""
        self._strangers.discard(link)
        self._links[link.peer] = link
        if link.peer.worker == COORDINATOR:
            self._shape(link)
        self._sockets.add(link)
        link.gone.add_done_callback(lambda _: self._sockets.discard(link))
        self._do(self._membership.joined(link.peer))

    def link_refused(self, link: Connection, error: HybridEPError) -> None:
        """See `Owner`."""
        self._membership.refused(error, link.host)

    def link_message(self, link: Connection, arrived: Arrived) -> None:
        """Route a message. Raises RemoteProtocolError if its addresses can't be true."""
        message = arrived.message
        self._check_way(link.peer, message)
        if self._membership.ended or self._membership.has_departed(message.to):
            return
        next_hop = message.to if message.to.dc == self._me.dc else Address(message.to.dc, COORDINATOR)
        onward = self._links.get(next_hop)
        if onward is None:
            raise RemoteProtocolError(f"a message to {message.to.describe()}, which is not connected")
        if next_hop.worker == COORDINATOR:
            self._hold_back(link, len(message.payload))
        flow = (message.source, message.to, message.channel)
        onward.send(Outgoing(flow, arrived.traffic, arrived.urgency, arrived.metadata, (message.payload,)))

    def _check_way(self, peer: Address, message: Message) -> None:
        """A worker speaks for itself, another DC's coordinator for its DC and only to this one."""
        source, to = message.source, message.to
        if source != peer if peer.worker != COORDINATOR else (source.dc, to.dc) != (peer.dc, self._me.dc):
            raise RemoteProtocolError(f"a message from {source.describe()} to {to.describe()} came this way")
        if not self._membership.knows(to):
            raise RemoteProtocolError(f"a message to {to.describe()}, which does not exist")

    def link_sent(self, link: Connection, outgoing: Outgoing) -> None:
        """See `Owner`: a worker whose messages are on their way may send more."""
        source = outgoing.flow[0]
        if source not in self._held_bytes or link.peer.dc == self._me.dc:
            return
        self._held_bytes[source] -= outgoing.payload_bytes
        worker = self._links.get(source)
        if worker is not None and self._held_bytes[source] <= self._config.limits.backlog_bytes:
            worker.resume()

    def link_notice(self, link: Connection, notice: Notice) -> None:
        """See `Owner`."""
        if link.peer.worker == COORDINATOR:
            self._on_site_notice(link, notice)
        else:
            self._on_worker_notice(link, notice)

    def link_closed(self, link: Connection, error: HybridEPError | None) -> None:
        """See `Owner`."""
        self._links.pop(link.peer, None)
        if error is not None:
            reason = error.reason if isinstance(error, TransportError) else f"it broke the protocol: {error}"
            self._do(self._membership.lost(link.peer, reason))

    def _on_worker_notice(self, link: Connection, notice: Notice) -> None:
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

    def _on_site_notice(self, link: Connection, notice: Notice) -> None:
        match notice.kind:
            case Kind.SITE_READY:
                self._do(self._membership.site_ready(link.peer.dc))
            case Kind.DEPART:
                address, where = read_peer(notice.fields)
                if address.dc != link.peer.dc:
                    raise RemoteProtocolError(f"DEPART of {address.describe()} came from DC {link.peer.dc}")
                self._do(self._membership.departed(address, where))
            case Kind.FAIL:
                self._do(self._membership.lost(*read_peer(notice.fields)))
            case Kind.GOODBYE:
                self._said_goodbye.add(link)
                if self._membership.ended:
                    link.finish()
            case _:
                raise RemoteProtocolError(f"{notice.kind.name} is not a coordinator's to say")

    def _hold_back(self, worker: Connection, nbytes: int) -> None:
        """Stop reading from a worker that is too far ahead of the WAN. What goes to it is not affected."""
        self._held_bytes[worker.peer] += nbytes
        if self._held_bytes[worker.peer] > self._config.limits.backlog_bytes:
            worker.hold()

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

    def _end(self, error: HybridEPError | None) -> None:
        self._outcome.set_result(error)
        for link in list(self._links.values()):
            if error is not None:
                link.give_up()
            else:
                link.drop_messages()  # every worker has ended
                link.say_goodbye(pack_fields())
                if link in self._said_goodbye:
                    link.finish()

    # Getting connected

    def _acceptor(self, admit: Admit, expected: int) -> Callable[[], asyncio.BaseProtocol]:
        """Makes the protocol of each connection that somebody opens: a stranger until the handshake is done."""

        def accept() -> asyncio.BaseProtocol:
            if len(self._strangers) >= expected + self._config.limits.strangers:
                return _TurnedAway()
            link = Connection(self._machine(admit=admit), self, self._config.limits)
            self._strangers.add(link)
            link.gone.add_done_callback(lambda _: self._strangers.discard(link))
            return link

        return accept

    async def _watch_rendezvous(self) -> None:
        while (deadline := self._membership.get_timer()) is not None:
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            self._do(self._membership.handle_timer(time.monotonic()))

    async def _join(self, dc: int, host: str, port: int) -> None:
        site = Address(dc, COORDINATOR)
        name = site.describe(self._names)
        deadline = time.monotonic() + self._config.timeouts.rendezvous_s
        try:
            await join(
                lambda: Connection(self._machine(peer=site, peer_name=name), self, self._config.limits),
                f"tcp:{host}:{port}",
                name,
                deadline,
                lambda error: self._membership.refused(error, ""),
            )
        except HandshakeRefused as error:
            self._do(self._membership.was_refused(error))
        except ConnectFailed:
            pass  # the rendezvous ends at the same time, with the last attempt's reason

    def _machine(self, **sides: Any) -> LinkMachine:
        return LinkMachine(
            self._me, self._job, self._config.timeouts, os.urandom(NONCE_BYTES), time.monotonic(), **sides
        )

    def _shape(self, site: Connection) -> None:
        """Cut messages for another DC to its link's rate, and emulate the link if the topology says so."""
        topology, there = self._config.topology, site.peer.dc
        wire = topology.links[self._me.dc, there]
        rate_bytes_per_s = min(
            wire.bandwidth_bytes_per_s,
            topology.datacenters[self._me.dc].uplink_bytes_per_s or math.inf,
            topology.datacenters[there].downlink_bytes_per_s or math.inf,
        )
        chunk_bytes = self._config.limits.chunk_bytes(rate_bytes_per_s)
        if topology.emulate:
            site.shape(chunk_bytes, LinkPacer(rate_bytes_per_s, wire.rtt_s / 2, self._uplink), self._downlink)
        else:
            site.shape(chunk_bytes)


class _TurnedAway(asyncio.Protocol):
    """A stranger too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


def _tell(links: Iterable[Connection], kind: Kind, metadata: bytes, after: Address | None) -> None:
    for link in links:
        if after is None:
            link.tell(kind, metadata)
        else:
            link.tell_after(after, kind, metadata)
