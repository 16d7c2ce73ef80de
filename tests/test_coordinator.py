"""Coordinators and worker links over real sockets, in one process: one thread each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import (
    ConnectFailed,
    HandshakeRefused,
    HybridEPError,
    LocalProtocolError,
    PeerLost,
)
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.frames import HEADER_BYTES, Kind, control_frame, encode_frame, pack_fields
from hybridep_rt.protocol.link import Job
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.coordinator import CoordinatorConfig, run_coordinator
from hybridep_rt.transport.listeners import Listeners, open_listeners
from hybridep_rt.transport.tls import Tls
from hybridep_rt.transport.worker_link import WorkerLink
from topology import Datacenter, Host, Link, LinkTable, Topology

AT = Position(3, 0, 1, Phase.DISPATCH)
TOKEN = bytes(range(32))
TIMEOUTS = Timeouts(
    rendezvous_s=10, handshake_s=5, heartbeat_s=0.5, silence_s=5, resume_s=6, operation_s=20, goodbye_s=3
)


def make_topology(workers: tuple[int, ...], cluster: str = "test") -> Topology:
    sites = tuple(Datacenter(chr(97 + dc), (Host("h", None, count),)) for dc, count in enumerate(workers))
    return Topology(cluster, sites, LinkTable(len(workers), {}, Link(1e9, 0.001) if len(workers) > 1 else None), None)


@dataclass
class JobUnderTest:
    """All coordinators of a job, each in a thread."""

    topology: Topology
    folder: Path
    timeouts: Timeouts = TIMEOUTS
    limits: Limits = field(default_factory=Limits)
    tls: dict[int, Tls] = field(default_factory=dict)
    status: bool = False
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    listeners: list[Listeners] = field(default_factory=list)
    outcomes: dict[int, HybridEPError | None] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    def open(self) -> None:
        for dc in range(len(self.topology.datacenters)):
            self.listeners.append(open_listeners(f"{self.folder}/{dc}", ("127.0.0.1", 0), ("127.0.0.1", 0)))

    def start(
        self,
        *dcs: int,
        token: bytes = TOKEN,
        topology: Topology | None = None,
        peers: dict[int, tuple[str, int]] | None = None,
    ) -> None:
        known = {dc: each.wan_address for dc, each in enumerate(self.listeners) if each.wan_address is not None}
        peers = known if peers is None else peers
        for dc in dcs:
            config = CoordinatorConfig(
                topology or self.topology,
                dc,
                token,
                0,
                self.timeouts,
                self.limits,
                self.tls.get(dc),
                f"{self.folder}/{dc}-status" if self.status else None,
            )
            others = {peer: where for peer, where in peers.items() if peer != dc}
            thread = threading.Thread(target=self._run, args=(dc, config, others), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _run(self, dc: int, config: CoordinatorConfig, peers: dict[int, tuple[str, int]]) -> None:
        try:
            run_coordinator(config, self.listeners[dc], peers, self.new_loop)
            self.outcomes[dc] = None
        except HybridEPError as error:
            self.outcomes[dc] = error

    def connect(self, dc: int, worker: int, *, tcp: bool = False, token: bytes = TOKEN) -> WorkerLink:
        if tcp:
            host, port = self.listeners[dc].workers_address or ("", 0)
            endpoint = f"tcp:{host}:{port}"
        else:
            endpoint = f"unix:{self.folder}/{dc}"
        job = Job(self.topology.cluster, self.topology.digest(), 0, token)
        return WorkerLink.connect(
            endpoint,
            Address(dc, worker),
            job,
            self.topology.dc_names,
            self.timeouts,
            self.limits,
            Metrics(),
            self.new_loop,
        )

    def connect_all(self) -> dict[Address, WorkerLink]:
        everyone = [
            Address(dc, worker) for dc, count in enumerate(self.topology.workers_per_dc) for worker in range(count)
        ]
        with ThreadPoolExecutor(len(everyone)) as pool:
            links = pool.map(lambda address: self.connect(*address, tcp=address.worker % 2 == 1), everyone)
            return dict(zip(everyone, links, strict=True))

    def join(self) -> dict[int, HybridEPError | None]:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a coordinator did not end"
        return self.outcomes


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., JobUnderTest]]:
    made: list[JobUnderTest] = []
    before = threading.active_count()

    def make(*workers: int, timeouts: Timeouts = TIMEOUTS, limits: Limits | None = None) -> JobUnderTest:
        new = JobUnderTest(make_topology(workers), tmp_path, timeouts, limits or Limits())
        made.append(new)
        new.open()
        return new

    yield make
    for each in made:
        each.join()
        for listeners in each.listeners:
            listeners.close()
    assert threading.active_count() <= before, "a thread was left behind"


@contextmanager
def running(job: JobUnderTest) -> Iterator[dict[Address, WorkerLink]]:
    job.start(*range(len(job.topology.datacenters)))
    links = job.connect_all()
    try:
        yield links
    finally:
        with ThreadPoolExecutor(len(links)) as pool:
            list(pool.map(WorkerLink.close, links.values()))


def test_messages_of_all_sizes_arrive_in_order_everywhere(job: Callable[..., JobUnderTest]) -> None:
    sizes = [0, 1, 63, 70_000, 8 << 20, 5, 0, 300_000]
    this = job(2, 1, 2)

    def work(link: WorkerLink, peers: list[Address]) -> None:
        order = random.Random(hash(link.address))
        for number, size in enumerate(sizes):
            for peer in order.sample(peers, len(peers)):
                body = bytes([link.address.dc, peer.dc, number]) + bytes([number]) * size
                link.send(
                    peer,
                    "data",
                    AT,
                    [body[:2], memoryview(body)[2:]],
                    traffic=order.choice(list(Traffic)),
                    counts=(number, -1),
                    urgency=order.randrange(5),
                )
        for number, size in enumerate(sizes):
            for peer in order.sample(peers, len(peers)):
                message = link.receive(peer, "data", AT)
                assert message.counts == (number, -1)
                assert message.source == peer
                assert len(message.payload) == size + 3
                assert message.payload[:3] == bytes([peer.dc, link.address.dc, number])
                assert message.payload[-1] == number
                assert not message.payload.readonly

    with running(this) as links, ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(lambda link: work(link, list(links)), links.values()))
    assert this.join() == {0: None, 1: None, 2: None}


def test_metrics_count_what_goes_to_other_dcs(job: Callable[..., JobUnderTest]) -> None:
    with running(job(2, 1)) as links:
        here, near, far = Address(0, 0), Address(0, 1), Address(1, 0)
        links[here].send(near, "x", AT, [b"abc"], traffic=Traffic.TOKENS)
        links[here].send(far, "x", AT, [b"abc"], traffic=Traffic.EXPERTS)
        links[far].receive(here, "x", AT)
        [(key, nbytes)] = links[here].metrics.snapshot().sent_bytes.items()
        assert key == (1, Traffic.EXPERTS)
        assert 3 + HEADER_BYTES < nbytes < 3 + HEADER_BYTES + 64


def lose(links: dict[Address, WorkerLink], lost: Address, reason: str) -> None:
    """Every other worker's wait ends, naming the lost one and the reason."""
    for address, link in links.items():
        if address != lost:
            with pytest.raises(PeerLost, match=reason) as caught:
                link.receive(lost, "x", AT)
            assert caught.value.peer == lost.describe(("a", "b"))


def test_a_worker_that_vanishes_is_named_everywhere(job: Callable[..., JobUnderTest]) -> None:
    this, lost = job(2, 1), Address(0, 1)
    with running(this) as links:
        links[lost]._call(links[lost]._abort)
        lose(links, lost, "ended without goodbye")
    outcomes = this.join()
    assert [str(outcomes[dc]) for dc in (0, 1)] == ['worker 1 of DC "a": its connection ended without goodbye'] * 2


def test_a_worker_that_fails_says_why_in_one_line(
    job: Callable[..., JobUnderTest], capfd: pytest.CaptureFixture[str]
) -> None:
    this, lost = job(2, 1), Address(1, 0)
    with running(this) as links:
        links[lost].fail("ValueError: loss is\nnot finite")
        lose(links, lost, "ValueError: loss is not finite")
        with pytest.raises(PeerLost):
            links[Address(0, 0)].send(lost, "x", AT, [b""], traffic=Traffic.USER)
    assert all(isinstance(error, PeerLost) for error in this.join().values())
    lines = capfd.readouterr().err.splitlines()
    assert 'hybridep: coordinator of DC "a": worker 0 of DC "b": ValueError: loss is not finite' in lines
    assert len(lines) == 2


def test_a_dc_that_never_comes_is_named_with_the_last_refused_attempt(job: Callable[..., JobUnderTest]) -> None:
    timeouts = Timeouts(
        rendezvous_s=1.5, handshake_s=1, heartbeat_s=0.5, silence_s=5, resume_s=6, operation_s=20, goodbye_s=1
    )
    this = job(1, 1, timeouts=timeouts)
    this.start(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(this.connect, 0, 0)
        this.start(1, token=b"w" * 32)
        with pytest.raises(PeerLost, match=r'DC "b": did not join within 1.5 s; last refused attempt: run token diff'):
            waiting.result(10)
    outcomes = this.join()
    assert isinstance(outcomes[1], HandshakeRefused)
    assert str(outcomes[1]) == 'coordinator of DC "a": run token differs'
    assert isinstance(outcomes[0], ConnectFailed)
    assert str(outcomes[0]) == (
        'DC "b": did not join within 1.5 s; last refused attempt: run token differs, from 127.0.0.1'
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"token": b"w" * 32}, "run token differs"), ({"worker": 5}, 'worker 5 of DC "a" is not expected')],
)
def test_a_worker_that_does_not_belong_is_refused_at_once(
    job: Callable[..., JobUnderTest], change: dict[str, Any], reason: str
) -> None:
    this = job(1)
    this.start(0)
    with pytest.raises(HandshakeRefused, match=reason):
        this.connect(0, **{"worker": 0} | change)
    this.connect(0, 0).close()
    assert this.join() == {0: None}


def test_a_second_worker_of_the_same_number_is_refused(job: Callable[..., JobUnderTest]) -> None:
    this = job(1)
    with running(this), pytest.raises(HandshakeRefused, match="already connected: another job with this cluster name"):
        this.connect(0, 0)
    assert this.join() == {0: None}


def test_another_topology_is_refused(job: Callable[..., JobUnderTest]) -> None:
    timeouts = Timeouts(
        rendezvous_s=1, handshake_s=1, heartbeat_s=0.5, silence_s=5, resume_s=6, operation_s=20, goodbye_s=1
    )
    this = job(1, 1, timeouts=timeouts)
    this.start(0)
    this.start(1, topology=make_topology((1, 2)))
    outcomes = this.join()
    assert isinstance(outcomes[1], HandshakeRefused)
    assert "topology differs" in outcomes[1].reason


def test_strangers_do_not_disturb_the_job(job: Callable[..., JobUnderTest]) -> None:
    timeouts = Timeouts(
        rendezvous_s=10, handshake_s=0.5, heartbeat_s=0.2, silence_s=5, resume_s=6, operation_s=20, goodbye_s=2
    )
    this = job(1, 1, timeouts=timeouts, limits=Limits(strangers=2))
    here, far = Address(0, 0), Address(1, 0)
    with running(this) as links, ExitStack() as strangers:
        at = this.listeners[0].wan_address
        crowd = [strangers.enter_context(socket.create_connection(at or ("", 0), timeout=5)) for _ in range(8)]
        crowd[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert crowd[0].recv(100) == b""
        hello = encode_frame(control_frame(Kind.HELLO, pack_fields()), 0)
        crowd[1].sendall(hello[:20])
        for silent in crowd[1:]:  # turned away at once, or when the handshake's time is over
            assert _drain(silent) == b""
        for number in range(20):
            links[here].send(far, "x", AT, [bytes(number)], traffic=Traffic.TOKENS)
            assert len(links[far].receive(here, "x", AT).payload) == number
    assert this.join() == {0: None, 1: None}


def _drain(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""


def serve_until_killed(job: JobUnderTest, tell: Connection) -> None:
    """In a process of its own: coordinator 0, which tells where other DCs reach it."""
    job.listeners = [open_listeners(f"{job.folder}/0", ("127.0.0.1", 0), None)]
    tell.send(job.listeners[0].wan_address)
    run_coordinator(CoordinatorConfig(job.topology, 0, TOKEN, 0, job.timeouts, job.limits), job.listeners[0], {})


@contextmanager
def other_coordinator(this: JobUnderTest) -> Iterator[tuple[SpawnProcess, dict[Address, WorkerLink]]]:
    """Coordinator 0 as a process that may be killed or stopped, coordinator 1 in a thread, and a worker of each."""
    spawn = get_context("spawn")
    hear, tell = spawn.Pipe(duplex=False)
    process = spawn.Process(target=serve_until_killed, args=(this, tell))
    process.start()
    this.listeners = [open_listeners(f"{this.folder}/1", ("127.0.0.1", 0), None)] * 2
    try:
        assert hear.poll(20)
        this.start(1, peers={0: hear.recv()})
        yield process, this.connect_all()
    finally:
        process.kill()
        process.join(5)


def test_a_coordinator_that_dies_is_named_to_its_workers_and_to_the_other_dc(tmp_path: Path) -> None:
    this = JobUnderTest(make_topology((1, 1)), tmp_path)
    with other_coordinator(this) as (process, links):
        process.kill()
        with pytest.raises(PeerLost, match=r'coordinator of DC "a": its connection ended without goodbye'):
            links[Address(0, 0)].receive(Address(1, 0), "x", AT)
        with pytest.raises(PeerLost, match=r'coordinator of DC "a": its connection ended without goodbye'):
            links[Address(1, 0)].receive(Address(0, 0), "x", AT)
        for link in links.values():
            link.close()
        assert isinstance(this.join()[1], PeerLost)


def test_a_coordinator_that_stops_before_its_own_goodbye_is_named(tmp_path: Path) -> None:
    """All workers have left in good order: without this the job would end well here, and hang there."""
    timeouts = replace(TIMEOUTS, heartbeat_s=0.2, silence_s=1, resume_s=1.5, goodbye_s=0.5)
    this = JobUnderTest(make_topology((1, 1)), tmp_path, timeouts)
    with other_coordinator(this) as (process, links):
        links[Address(0, 0)].close()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        links[Address(1, 0)].close()
        error = this.join()[1]
        assert isinstance(error, PeerLost)
        assert str(error).startswith('coordinator of DC "a": silent for 1 s, and it was not back within 1.5 s')


def test_a_worker_far_ahead_of_the_wan_is_held_back_and_loses_nothing(job: Callable[..., JobUnderTest]) -> None:
    this = job(1, 1, limits=Limits(window_bytes=100_000))
    here, far = Address(0, 0), Address(1, 0)
    with running(this) as links:
        for number in range(60):
            links[here].send(far, "x", AT, [bytes([number]) * 50_000], traffic=Traffic.GRADIENTS)
        links[far].send(here, "back", AT, [b"meanwhile"], traffic=Traffic.TOKENS)
        assert bytes(links[here].receive(far, "back", AT).payload) == b"meanwhile"
        for number in range(60):
            assert links[far].receive(here, "x", AT).payload[49_999] == number
    assert this.join() == {0: None, 1: None}


def test_misuse_is_told_before_anything_is_sent(job: Callable[..., JobUnderTest]) -> None:
    with running(job(1, limits=Limits(message_bytes=10))) as links:
        link = links[Address(0, 0)]
        with pytest.raises(LocalProtocolError, match="over the limit"):
            link.send(Address(0, 0), "x", AT, [bytes(11)], traffic=Traffic.USER)
        with pytest.raises(LocalProtocolError, match="no DC 3"):
            link.send(Address(3, 0), "x", AT, [], traffic=Traffic.USER)
        with pytest.raises(LocalProtocolError, match="channel"):
            link.send(Address(0, 0), "x" * 65, AT, [], traffic=Traffic.USER)


def test_an_emulated_job_delivers_the_same(tmp_path: Path) -> None:
    sites = tuple(
        Datacenter(name, (Host("h", None, 1),), uplink_bytes_per_s=2e7, downlink_bytes_per_s=1e7) for name in "abc"
    )
    this = JobUnderTest(Topology("t", sites, LinkTable(3, {}, Link(3e7, 0.01)), None, emulate=True), tmp_path)
    this.open()
    with running(this) as links:
        for number in range(5):
            for link in links.values():
                for peer in links:
                    link.send(peer, "x", AT, [bytes([number]) * 60_000 * number], traffic=Traffic.TOKENS)
        for number in range(5):
            for link in links.values():
                for peer in links:
                    assert len(link.receive(peer, "x", AT).payload) == 60_000 * number
    assert this.join() == {0: None, 1: None, 2: None}


def test_a_worker_that_lies_about_itself_ends_the_job(job: Callable[..., JobUnderTest]) -> None:
    this, liar = job(2, 1), Address(0, 1)
    with running(this) as links:
        links[liar].address = Address(0, 0)
        links[liar].send(Address(1, 0), "x", AT, [b""], traffic=Traffic.USER)
        links[liar].address = liar
        lose(links, liar, "it broke the protocol: a message from worker 0 of DC 0 to worker 0 of DC 1 came this way")
    assert all(isinstance(error, PeerLost) for error in this.join().values())


@pytest.mark.parametrize("to", [Address(0, 7), Address(1, 7), Address(1, -1), Address(0, -1)])
def test_a_message_to_nobody_ends_the_job_and_names_the_sender(job: Callable[..., JobUnderTest], to: Address) -> None:
    this, sender = job(1, 1), Address(0, 0)
    with running(this) as links:
        links[sender].send(to, "x", AT, [b""], traffic=Traffic.USER)
        lose(links, sender, f"it broke the protocol: a message to {to.describe()}, which does not exist")
    assert all(isinstance(error, PeerLost) for error in this.join().values())


def test_messages_that_nobody_took_do_not_delay_the_end(tmp_path: Path) -> None:
    sites = tuple(Datacenter(name, (Host("h", None, 1),)) for name in "ab")
    slow = LinkTable(2, {}, Link(1e5, 0.001))
    this = JobUnderTest(Topology("t", sites, slow, None, emulate=True), tmp_path)
    this.open()
    with running(this) as links:  # ten minutes' worth
        links[Address(0, 0)].send(Address(1, 0), "x", AT, [bytes(60_000_000)], traffic=Traffic.USER)
    assert this.join() == {0: None, 1: None}
