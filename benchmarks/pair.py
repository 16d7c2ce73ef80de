"""Two DCs of one worker each, as four processes of this machine without mpirun: what transport benchmarks run on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import HybridEPError
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.link import Job
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.coordinator import CoordinatorConfig, run_coordinator
from hybridep_rt.transport.listeners import open_listeners
from hybridep_rt.transport.tls import Tls
from hybridep_rt.transport.worker_link import WorkerLink
from topology import Datacenter, Host, Link, LinkTable, Topology

HERE, THERE = Address(0, 0), Address(1, 0)
AT = Position(0, 0, 0, Phase.MAILBOX)
PATIENCE_S = 300.0
_SPAWN = multiprocessing.get_context("spawn")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Work = Callable[[WorkerLink, Connection], None]
Where = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """A running pair. `here` and `there` talk to what the two workers run; `pids`: both coordinators, both workers."""

    here: Connection
    there: Connection
    pids: tuple[int, ...]


def two_sites(link: Link, *, emulate: bool = False) -> Topology:
    """DCs "a" and "b" of one worker each, joined by that link in both directions."""
    sites = tuple(Datacenter(name, (Host("h", None, 1),)) for name in "ab")
    return Topology("benchmark", sites, LinkTable(2, {}, link), None, emulate=emulate, insecure=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a DC's processes run: they are started inside `enter()`, and its coordinator listens at `host`."""

    host: str = "127.0.0.1"
    enter: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@contextlib.contextmanager
def running(
    topology: Topology,
    here: Work,
    there: Work,
    certificates: str | None = None,
    between: Callable[[Where], Where] = lambda where: where,
    places: tuple[Place, Place] = (Place(), Place()),
) -> Iterator[Pair]:
    """The pair lives inside the block. Each worker's function ends when it is told None.

    `certificates`: a folder of `launcher.certs.write_certificates`, for TLS between the coordinators. `between`: where
    the second coordinator reaches the first, whose address it is given.
    """
    token = secrets.token_bytes(32)

    def start_at(dc: int, function: Callable[..., None], *arguments: Any) -> tuple[Connection, int]:
        with places[dc].enter():
            return start(function, topology, token, folder, dc, *arguments)

    with tempfile.TemporaryDirectory(prefix="pair-") as folder, processes() as start:
        first, first_pid = start_at(0, _coordinate, certificates, places[0].host, {})
        _, second_pid = start_at(1, _coordinate, certificates, places[1].host, {0: between(ask(first))})
        ends = [start_at(dc, _work, work) for dc, work in ((0, here), (1, there))]
        for connection, _ in ends:
            ask(connection)
        pids = (first_pid, second_pid, *(pid for _, pid in ends))
        yield Pair(ends[0][0], ends[1][0], pids)
        for connection, _ in ends:
            connection.send(None)


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., tuple[Connection, int]]]:
    """A function that runs another, `function(*arguments, connection)`, in a new process. All end with the block."""
    started: list[BaseProcess] = []
    connections: list[Connection] = []  # one that is forgotten closes

    def start(function: Callable[..., None], *arguments: Any) -> tuple[Connection, int]:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=function, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        connections.append(ours)
        assert process.pid is not None
        return ours, process.pid

    try:
        yield start
        for process in started:
            process.join(10)
    finally:
        for process in started:
            process.kill()
            process.join()


def ask(connection: Connection) -> Any:
    """What the other side says next. Raises RuntimeError where it takes too long or has ended."""
    if not connection.poll(PATIENCE_S):
        raise RuntimeError(f"no answer for {PATIENCE_S:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError("a process of the benchmark ended early") from None


def cpu_s(pids: tuple[int, ...]) -> float:
    """Seconds of processor time that these processes have taken, in steps of 10 ms each."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _CLOCK_TICKS


def _coordinate(
    topology: Topology,
    token: bytes,
    folder: str,
    dc: int,
    certificates: str | None,
    host: str,
    peers: dict[int, tuple[str, int]],
    tell: Connection,
) -> None:
    listeners = open_listeners(f"{folder}/{dc}", (host, 0), None)
    tell.send(listeners.wan_address)
    try:
        tls = None if certificates is None else Tls.in_folder(certificates, topology.dc_names[dc])
        run_coordinator(CoordinatorConfig(topology, dc, token, 0, Timeouts(), Limits(), tls), listeners, peers)
    except HybridEPError:
        sys.exit(1)  # it has said why


def _work(topology: Topology, token: bytes, folder: str, dc: int, work: Work, told: Connection) -> None:
    job = Job(topology.cluster, topology.digest(), 0, token)
    link = WorkerLink.connect(
        f"unix:{folder}/{dc}", Address(dc, 0), job, topology.dc_names, Timeouts(), Limits(), Metrics()
    )
    told.send("ready")
    work(link, told)
    link.close()
