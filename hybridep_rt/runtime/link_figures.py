"""Goodput and round trip of the links between DCs, measured by their first workers through the real path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.planner.link_rounds import MESSAGES, goodputs, message_bytes, rounds
from hybridep_rt.runtime.session import Runtime
from topology import Topology

PINGS = 5
_PATIENCE_S = 60.0
"""For one message of a pair; a link that is so much slower than the topology says ends the calibration."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Of one other DC: bytes/s that came from there while as much went there, and round trips in seconds."""

    source: int
    goodput_bytes_per_s: list[float]
    rtt_s: list[float]


def measure_links(
    runtime: Runtime, topology: Topology, budget_bytes: float, progress: Callable[[str], None]
) -> list[Heard]:
    """What this worker heard, at the first worker of each DC; nothing at others. All workers call it.

    Sends at most about `budget_bytes` over all links. Raises DeadlineExceeded, PeerLost.
    """
    me, heard = runtime.address.dc, []
    turns = rounds(runtime.layout.dcs)
    for number, pairs in enumerate(turns, start=1):
        runtime.barrier()
        names = ", ".join(f"{runtime.dc_names[a]} <-> {runtime.dc_names[b]}" for a, b in pairs[:4])
        progress(f"links, round {number} of {len(turns)}: {names}" + (" ..." if len(pairs) > 4 else ""))
        mine = [pair for pair in pairs if me in pair]
        if mine and runtime.local_rank == 0:
            peer = sum(mine[0]) - me
            heard.append(_measure_pair(runtime, topology, peer, budget_bytes, leads=me < peer))
    runtime.barrier()
    return heard


def _measure_pair(runtime: Runtime, topology: Topology, peer: int, budget_bytes: float, *, leads: bool) -> Heard:
    me = runtime.address.dc
    trips: list[float] = []
    for leading in (leads, not leads):
        trips += _ping(runtime, peer) if leading else _echo(runtime, peer)
    box, to = runtime.mailbox("calibration"), (runtime.dc_names[peer], 0)

    def size(source: int, target: int) -> int:
        link = topology.links[source, target]
        return message_bytes(link.bandwidth_bytes_per_s, budget_bytes, runtime.layout.dcs)

    expected = size(peer, me)
    content = bytes(size(me, peer))
    for _ in range(MESSAGES):
        box.send(to, content)
    arrived = []
    for _ in range(MESSAGES):
        found = box.receive(to, timeout_s=_PATIENCE_S)
        arrived.append(time.perf_counter())
        if found.nbytes != expected:
            raise RemoteProtocolError(f"{found.nbytes} bytes from {to[0]} where {expected} were expected")
    return Heard(peer, goodputs(arrived, expected), trips)


def _ping(runtime: Runtime, peer: int) -> list[float]:
    box, to, trips = runtime.mailbox("calibration"), (runtime.dc_names[peer], 0), []
    for _ in range(PINGS):
        started = time.perf_counter()
        box.send(to, b"ping")
        box.receive(to, timeout_s=_PATIENCE_S)
        trips.append(time.perf_counter() - started)
    return trips


def _echo(runtime: Runtime, peer: int) -> list[float]:
    box, to = runtime.mailbox("calibration"), (runtime.dc_names[peer], 0)
    for _ in range(PINGS):
        box.receive(to, timeout_s=_PATIENCE_S)
        box.send(to, b"pong")
    return []
