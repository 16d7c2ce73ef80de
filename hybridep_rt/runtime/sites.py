"""A coordinator's links to the other DCs: who dials whom, what a peer has to show, and how fast each link is.

Both ends of a link may dial; one of them, the preferred one, does so at once and the other a little later. If both get
through, the preferred side's connection stays. A DC that is not reachable only dials.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import random
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import (
    ConfigError,
    ConnectFailed,
    HandshakeRefused,
    HybridEPError,
    PeerRestarted,
    TransportError,
)
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.backoff import Backoff
from hybridep_rt.protocol.identity import dns_name
from hybridep_rt.protocol.link import NONCE_BYTES, Admit, Code, Job, LinkMachine, Refusal
from hybridep_rt.protocol.pacing import Downlink, LinkPacer, Uplink
from hybridep_rt.protocol.session import INCARNATION_BYTES, Session, Standing
from hybridep_rt.transport.connection import Connection
from hybridep_rt.transport.dial import FIRST_WAIT_S, LONGEST_WAIT_S, attempt
from hybridep_rt.transport.link import Link, Owner
from hybridep_rt.transport.socket_options import check_congestion
from hybridep_rt.transport.tls import Tls
from topology import Topology
from topology.model import TCP_SHARE

OTHER_SIDE_FIRST_S = 2.0
"""The side that is not preferred dials so much later."""


class SitesOwner(Owner, Protocol):
    """Who is told what happens to the links between DCs, besides what an `Owner` is told."""

    def connection_refused(self, connection: Connection, error: HybridEPError) -> None:
        """See `ConnectionOwner`."""

    def site_refused(self, error: HybridEPError) -> None:
        """The two DCs don't belong together, or one of them has lost its state: the job can't go on."""

    def site_missed(self, error: HybridEPError) -> None:
        """An attempt to reach another DC failed; there will be others."""


class Sites:
    """All links of DC `dc` to other DCs. `admit_role`: may this address connect as a coordinator?"""

    def __init__(
        self,
        topology: Topology,
        dc: int,
        job: Job,
        timeouts: Timeouts,
        limits: Limits,
        tls: Tls | None,
        owner: SitesOwner,
        admit_role: Callable[[Address], Refusal | None],
    ) -> None:
        self._topology = topology
        self._names = topology.dc_names
        self._me = Address(dc, COORDINATOR)
        self._job = job
        self._timeouts = timeouts
        self._limits = limits
        self._owner = owner
        self._admit_role = admit_role
        check_congestion(topology.congestion)
        self._accepting: ssl.SSLContext | None = None
        self._dialling: ssl.SSLContext | None = None
        if tls is not None:
            self._accepting, self._dialling = tls.contexts()
        incarnation = os.urandom(INCARNATION_BYTES)
        self._preferred_connections: set[Connection] = set()
        self.links: dict[int, Link] = {}
        self._uplink = Uplink(TCP_SHARE * (topology.datacenters[dc].uplink_bytes_per_s or math.inf))
        downlink_bytes_per_s = topology.datacenters[dc].downlink_bytes_per_s
        self._downlink = Downlink(TCP_SHARE * downlink_bytes_per_s) if downlink_bytes_per_s else None
        for there in range(len(self._names)):
            if there != dc:
                site = Address(there, COORDINATOR)
                session = Session(incarnation, limits, resumable=True)
                self.links[there] = Link(site, site.describe(self._names), session, owner, timeouts)
                self._shape(self.links[there])

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """For the listener."""
        return self._accepting

    def check_security(self, addresses: list[tuple[str, int]]) -> None:
        """Plaintext needs loopback or the user's word, which is repeated at each start. Raises ConfigError."""
        exposed = [host for host, _ in addresses if not _is_loopback(host)]
        if self._accepting is not None or not exposed:
            return
        if not self._topology.insecure:
            raise ConfigError(
                f'coordinator of DC "{self._names[self._me.dc]}": no TLS, but {exposed[0]} is not this machine. Make '
                "certificates (hybridep certs) and set HYBRIDEP_TLS_FOLDER, or tls: {folder: PATH} in "
                f"{self._topology.source}; or write insecure: true there if everyone on the network may read and "
                "change the traffic"
            )
        sys.stderr.write(
            f'hybridep: warning: coordinator of DC "{self._names[self._me.dc]}": insecure: true, '
            "links between DCs are neither encrypted nor protected\n"
        )

    def accept(self) -> Connection:
        """The protocol of a connection that somebody opened: a stranger until the handshake is done."""
        made: list[Connection] = []
        machine = self._machine(admit=lambda address, standing: self._admit(made[0], address, standing, accepted=True))
        made.append(self._connection(machine))
        return made[0]

    async def reach(self, dc: int, where: tuple[str, int]) -> None:
        """Keep dialling while the link is down."""
        refused_since: float | None = None
        link, backoff = self.links[dc], Backoff(random.Random(), FIRST_WAIT_S, LONGEST_WAIT_S)
        while not link.is_over:
            await link.down.wait()
            if not self.prefers_to_dial(dc):
                await asyncio.sleep(OTHER_SIDE_FIRST_S)
                if not link.down.is_set():
                    continue
            outcome = await self._attempt(link, where)
            if link.ever_open and not link.down.is_set():
                backoff.reset()
                refused_since = None
                continue
            if self._is_final(link, outcome):
                return
            link.last_failure = outcome.reason if isinstance(outcome, TransportError) else str(outcome)
            place = f"not reached at tcp:{where[0]}:{where[1]}: {link.last_failure}"
            self._owner.site_missed(ConnectFailed(link.name, place))
            now = time.monotonic()
            refused_since = (refused_since or now) if isinstance(outcome, ConnectionRefusedError) else None
            if link.ever_open and refused_since is not None and now - refused_since >= self._timeouts.refused_s:
                link.give_up_waiting()
                return
            await asyncio.sleep(backoff.next_s())

    def prefers_to_dial(self, dc: int) -> bool:
        """Does this side dial first? The higher-numbered DC does, if it can."""
        here, there = self._topology.datacenters[self._me.dc], self._topology.datacenters[dc]
        return not here.reachable if here.reachable != there.reachable else self._me.dc > dc

    def _is_final(self, link: Link, outcome: Connection | Exception) -> bool:
        refused = isinstance(outcome, HandshakeRefused) and not link.ever_open
        if refused or isinstance(outcome, PeerRestarted):
            assert isinstance(outcome, HybridEPError)
            self._owner.site_refused(outcome)
            return True
        return False

    async def _attempt(self, link: Link, where: tuple[str, int]) -> Connection | Exception:
        made: list[Connection] = []

        def make() -> Connection:
            machine = self._machine(
                peer=link.peer,
                peer_name=link.name,
                admit=lambda address, standing: self._admit(made[0], address, standing, accepted=False),
            )
            made.append(self._connection(machine))
            return made[0]

        try:
            async with asyncio.timeout(self._timeouts.handshake_s):
                return await attempt(make, where, self._dialling)
        except TimeoutError:
            return OSError(f"no answer within {self._timeouts.handshake_s:g} s")

    def _connection(self, machine: LinkMachine) -> Connection:
        return Connection(machine, self, self._limits, self._topology.congestion)

    def _machine(self, peer: Address | None = None, peer_name: str = "a stranger", *, admit: Admit) -> LinkMachine:
        return LinkMachine(
            self._me,
            self._job,
            self._timeouts,
            os.urandom(NONCE_BYTES),
            time.monotonic(),
            peer=peer,
            peer_name=peer_name,
            admit=admit,
            standing=lambda address: self._standing(address),
        )

    def _standing(self, address: Address) -> bytes:
        link = self.links.get(address.dc)
        return b"" if link is None else link.session.standing().pack()

    def _admit(self, connection: Connection, address: Address, raw: bytes, *, accepted: bool) -> Refusal | None:
        refusal = self._admit_role(address) or self._check_certificate(connection, address)
        if refusal is not None:
            return refusal
        link, theirs = self.links[address.dc], Standing.unpack(raw)
        if link.is_over:
            return Refusal(Code.SUPERSEDED, "this link has ended")
        lost = link.session.restarted(theirs)
        if lost:
            who = address if lost == "there" else self._me
            return Refusal(Code.RESTARTED, f"{who.describe(self._names)} restarted: its part of the session is lost")
        preferred = self.prefers_to_dial(address.dc) != accepted
        outranked = not link.down.is_set() and not preferred and link.connection in self._preferred_connections
        # Late: it has the number of the open connection, so the two sides dialled at the same time.
        if outranked and (not accepted or link.session.is_late(theirs)):
            return Refusal(Code.SUPERSEDED, "the other side's connection came first")
        if preferred:
            self._preferred_connections.add(connection)
            connection.gone.add_done_callback(lambda _: self._preferred_connections.discard(connection))
        return None

    def _check_certificate(self, connection: Connection, address: Address) -> Refusal | None:
        names, dc = connection.certified_names(), self._names[address.dc]
        if names is None or dns_name(self._topology.cluster, dc) in names:
            return None
        shown = ", ".join(sorted(names))[:200] or "nobody"
        return Refusal(Code.ROLE, f'its certificate is for {shown}, not for DC "{dc}"')

    def connection_opened(self, connection: Connection, standing: bytes) -> Link:
        """See `ConnectionOwner`."""
        return self.links[connection.peer.dc]

    def connection_refused(self, connection: Connection, error: HybridEPError) -> None:
        """See `ConnectionOwner`."""
        if isinstance(error, PeerRestarted):
            self._owner.site_refused(PeerRestarted(connection.peer.describe(self._names), error.reason))
        else:
            self._owner.connection_refused(connection, error)

    def _shape(self, site: Link) -> None:
        """Cut messages for another DC to its link's rate, and emulate the link if the topology says so."""
        topology, there = self._topology, site.peer.dc
        wire = topology.links[self._me.dc, there]
        rate_bytes_per_s = min(
            wire.bandwidth_bytes_per_s,
            topology.datacenters[self._me.dc].uplink_bytes_per_s or math.inf,
            topology.datacenters[there].downlink_bytes_per_s or math.inf,
        )
        chunk_bytes = self._limits.chunk_bytes(rate_bytes_per_s)
        if topology.emulate:
            pacer = LinkPacer(TCP_SHARE * rate_bytes_per_s, wire.rtt_s / 2, self._uplink)
            site.shape(chunk_bytes, pacer, self._downlink)
        else:
            site.shape(chunk_bytes)


def reachable_peers(topology: Topology, peers: Mapping[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """Those of the peers that can be dialled."""
    return {dc: where for dc, where in peers.items() if topology.datacenters[dc].reachable}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
