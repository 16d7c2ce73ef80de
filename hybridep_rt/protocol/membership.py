"""Who belongs to the job, as one coordinator sees it: who joined, who is missing, who ended, who failed. Sans-I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hybridep_rt.errors import ConnectFailed, HandshakeRefused, HybridEPError, PeerLost, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Kind, pack_fields
from hybridep_rt.protocol.inquiry import Late
from hybridep_rt.protocol.link import Code, Refusal, pack_peer


@dataclass(frozen=True, slots=True)
class TellWorkers:
    """Tell every worker of this DC; with `after`, behind that worker's messages."""

    kind: Kind
    metadata: bytes
    after: Address | None = None


@dataclass(frozen=True, slots=True)
class TellSites:
    """Tell the coordinators of these DCs (those that are connected)."""

    dcs: tuple[int, ...]
    kind: Kind
    metadata: bytes
    after: Address | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The job is over here: in good order, or with an error."""

    error: HybridEPError | None


Command: TypeAlias = TellWorkers | TellSites | End

OTHERS_FIRST_S = 1.0
"""Where only workers of another DC are missing, its coordinator, who can name them, speaks first."""


class Membership:
    """Events in, commands out. Workers may start once every worker of every DC has joined its coordinator."""

    def __init__(
        self, dc: int, workers_per_dc: tuple[int, ...], dc_names: tuple[str, ...], rendezvous_s: float, now: float
    ) -> None:
        self._dc = dc
        self._names = dc_names
        self._everyone = {Address(at, worker) for at, count in enumerate(workers_per_dc) for worker in range(count)}
        self._workers = {address for address in self._everyone if address.dc == dc}
        self._sites = {Address(at, COORDINATOR) for at in range(len(workers_per_dc)) if at != dc}
        self._joined: set[Address] = set()
        self._sites_ready: set[int] = set()
        self._departed: set[Address] = set()
        self._goodbyes: set[Address] = set()
        self._rendezvous_s = rendezvous_s
        self._deadline = now + rendezvous_s
        self._last_refused = ""
        self._last_error: HybridEPError | None = None
        self._started = False
        self.ended = False
        self.lost_after_end: PeerLost | None = None

    def admit_worker(self, address: Address) -> Refusal | None:
        """May this process join as a worker of this DC?"""
        return self._admit(address, self._workers)

    def admit_site(self, address: Address) -> Refusal | None:
        """May this process connect as the coordinator of another DC? (Also again: its session decides about that.)"""
        return self._admit(address, self._sites)

    def _admit(self, address: Address, allowed: set[Address]) -> Refusal | None:
        if address not in allowed:
            return Refusal(Code.ROLE, f"{address.describe(self._names)} is not expected at this address")
        if address in self._joined & self._workers:
            who = address.describe(self._names)
            return Refusal(Code.CONNECTED, f"{who} is already connected: another job with this cluster name?")
        return None

    def joined(self, address: Address) -> list[Command]:
        """A process has proved who it is."""
        self._joined.add(address)
        commands: list[Command] = []
        if self._workers <= self._joined:
            news = (address.dc,) if address in self._sites else tuple(site.dc for site in self._sites)
            commands.append(TellSites(news, Kind.SITE_READY, pack_fields()))
        return commands + self._start()

    def site_ready(self, dc: int) -> list[Command]:
        """All workers of another DC have joined their coordinator."""
        self._sites_ready.add(dc)
        return self._start()

    def _start(self) -> list[Command]:
        if self.ended or self._started or self.missing():
            return []
        self._started = True
        return [TellWorkers(Kind.READY, pack_fields())]

    def missing(self) -> list[str]:
        """Names of those who have not joined."""
        absent = sorted(self._absent())
        waiting = sorted(site.dc for site in self._sites & self._joined if site.dc not in self._sites_ready)
        return [self._describe(address) for address in absent] + [
            f'workers of DC "{self._names[dc]}"' for dc in waiting
        ]

    def _absent(self) -> set[Address]:
        return (self._workers | self._sites) - self._joined

    def _describe(self, address: Address) -> str:
        return f'DC "{self._names[address.dc]}"' if address in self._sites else address.describe(self._names)

    def refused(self, error: HybridEPError, host: str) -> None:
        """An attempt to join failed; kept for the message about who is missing. A refusal says most."""
        if isinstance(self._last_error, HandshakeRefused) and not isinstance(error, HandshakeRefused):
            return
        self._last_error = error
        reason = error.reason if isinstance(error, HandshakeRefused) else str(error)
        self._last_refused = f"{reason}, from {host}" if host else reason

    def departed(self, address: Address, where: str) -> list[Command]:
        """A worker ended in good order, at the place `where`."""
        if address not in self._everyone:
            raise RemoteProtocolError(f"{address.describe(self._names)} ended but does not exist")
        if self.ended:
            return []
        self._departed.add(address)
        notice = pack_peer(address, where)
        commands: list[Command] = [TellWorkers(Kind.DEPART, notice, after=address)]
        if address.dc == self._dc:
            commands.append(TellSites(self._all_sites(), Kind.DEPART, notice, after=address))
        return commands + (self._end(None) if self._departed == self._everyone else [])

    def knows(self, address: Address) -> bool:
        """Is there such a worker in the job?"""
        return address in self._everyone

    def has_departed(self, address: Address) -> bool:
        """Has this worker ended in good order?"""
        return address in self._departed

    def lost(self, address: Address, reason: str) -> list[Command]:
        """A process of the job failed, or this coordinator can't reach it any more. The first loss ends the job.

        A coordinator that is lost once the job has ended is `lost_after_end`: its processes may hang.
        """
        if self.ended and address in self._sites and self.lost_after_end is None:
            self.lost_after_end = PeerLost(address.describe(self._names), reason)
        return self._fail(address, reason, PeerLost(address.describe(self._names), reason))

    def goodbye(self, address: Address) -> None:
        """The coordinator of another DC has nothing more to say."""
        self._goodbyes.add(address)

    def is_silent(self, address: Address) -> bool:
        """Whether this is another DC's coordinator that hasn't said goodbye: it may be back, or it will be lost."""
        return address in self._sites - self._goodbyes

    def late(self, late: Late) -> list[Command]:
        """Somebody was waited for in vain."""
        return self._fail(late.peer, late.operation, late.error(self._names), late)

    def was_refused(self, error: HybridEPError) -> list[Command]:
        """Another DC's coordinator refuses this one for good, or one of the two has lost its state."""
        return self._fail(Address(self._dc, COORDINATOR), str(error), error)

    def get_timer(self) -> float | None:
        """When `handle_timer` has to be called; None once everyone is here."""
        if self._started or self.ended:
            return None
        return self._deadline if self._absent() else self._deadline + OTHERS_FIRST_S

    def handle_timer(self, now: float) -> list[Command]:
        """Time passed: those who are missing now don't come any more."""
        deadline, missing = self.get_timer(), self.missing()
        if deadline is None or now < deadline or not missing:
            return []
        reason = f"did not join within {self._rendezvous_s:g} s"
        if self._last_refused:
            reason += f"; last refused attempt: {self._last_refused}"
        first = min(self._absent() or [site for site in self._sites if site.dc not in self._sites_ready])
        return self._fail(first, reason, ConnectFailed(", ".join(missing), reason))

    def _fail(self, address: Address, reason: str, error: HybridEPError, late: Late | None = None) -> list[Command]:
        if self.ended:
            return []
        notice = pack_peer(address, reason) if late is None else late.pack()
        tell: list[Command] = [TellWorkers(Kind.FAIL, notice), TellSites(self._all_sites(), Kind.FAIL, notice)]
        return tell + self._end(error)

    def _end(self, error: HybridEPError | None) -> list[Command]:
        self.ended = True
        return [End(error)]

    def _all_sites(self) -> tuple[int, ...]:
        return tuple(sorted(site.dc for site in self._sites))
