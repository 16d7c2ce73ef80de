"""Links between real coordinators whose connections are cut, frozen, dialled from both sides, or come back as another
process: a proxy stands between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import HybridEPError, PeerLost, PeerRestarted
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.runtime.status import ask
from hybridep_rt.transport.listeners import open_listeners
from hybridep_rt.transport.worker_link import WorkerLink
from tests.proxy import Proxy
from tests.test_coordinator import AT, JobUnderTest, make_topology

A0, B0 = Address(0, 0), Address(1, 0)
TIMEOUTS = Timeouts(
    rendezvous_s=10, handshake_s=5, heartbeat_s=0.2, silence_s=3, resume_s=5, operation_s=30, goodbye_s=3
)


@contextmanager
def running(job: JobUnderTest, **proxied: int) -> Iterator[tuple[dict[Address, WorkerLink], Proxy]]:
    """DCs a and b; b reaches a through the proxy, and a does not reach b."""
    if not job.listeners:
        job.open()
    target = job.listeners[0].wan_address
    assert target is not None
    with Proxy(target, **proxied) as proxy:
        job.start(0, peers={})
        job.start(1, peers={0: proxy.address})
        links = job.connect_all()
        try:
            yield links, proxy
        finally:
            with ThreadPoolExecutor(len(links)) as pool:
                list(pool.map(WorkerLink.close, links.values()))
            job.join()


def make_job(folder: Path, timeouts: Timeouts = TIMEOUTS, limits: Limits | None = None) -> JobUnderTest:
    return JobUnderTest(make_topology((1, 1)), folder, timeouts, limits or Limits())


def talk(link: WorkerLink, peer: Address, rounds: int, sizes: list[int]) -> None:
    """Both ends do the same: messages of each class on channels of their own, everything checked, in step."""
    for number in range(rounds):
        for traffic in (Traffic.TOKENS, Traffic.EXPERTS, Traffic.GRADIENTS):
            for index, size in enumerate(sizes):
                body = number.to_bytes(4, "big") + bytes([traffic, index]) * size
                link.send(peer, traffic.name, AT, [body], traffic=traffic, counts=(number, index))
        for traffic in (Traffic.GRADIENTS, Traffic.TOKENS, Traffic.EXPERTS):
            for index, size in enumerate(sizes):
                message = link.receive(peer, traffic.name, AT)
                assert message.counts == (number, index)
                assert message.payload[:4] == number.to_bytes(4, "big")
                assert message.payload[4:] == bytes([traffic, index]) * size


@pytest.mark.parametrize("limits", [Limits(), Limits(window_bytes=100_000, unacked_bytes=50_000)])
def test_everything_arrives_once_and_in_order_whatever_is_cut(tmp_path: Path, limits: Limits) -> None:
    job = make_job(tmp_path, limits=limits)
    with running(job, cut_after_bytes=150_000, cuts=30, seed=1) as (links, proxy):
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(talk, links[A0], B0, 25, [0, 1, 9000, 40_000])]
            ends.append(pool.submit(talk, links[B0], A0, 25, [0, 1, 9000, 40_000]))
            for end in ends:
                end.result(60)
        assert proxy.cuts > 10
        assert proxy.connections > 10
    assert job.outcomes == {0: None, 1: None}


def test_a_link_that_freezes_without_closing_goes_on(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with running(job) as (links, proxy):
        proxy.freeze()
        links[A0].send(B0, "x", AT, [bytes(3_000_000)], traffic=Traffic.TOKENS)
        threading.Timer(1.0, proxy.thaw).start()
        assert len(links[B0].receive(A0, "x", AT).payload) == 3_000_000
        assert proxy.connections == 1
    assert job.outcomes == {0: None, 1: None}


def test_a_connection_that_stays_silent_is_replaced(tmp_path: Path) -> None:
    timeouts = replace(TIMEOUTS, silence_s=0.6)
    job = make_job(tmp_path, timeouts)
    with running(job) as (links, proxy):
        proxy.freeze()
        links[A0].send(B0, "x", AT, [bytes(3_000_000)], traffic=Traffic.TOKENS)
        threading.Timer(1.5, proxy.thaw).start()
        assert len(links[B0].receive(A0, "x", AT).payload) == 3_000_000
        assert proxy.connections > 1
    assert job.outcomes == {0: None, 1: None}


def test_a_link_that_does_not_come_back_ends_the_run_and_names_the_dc(tmp_path: Path) -> None:
    timeouts = replace(TIMEOUTS, silence_s=0.5, resume_s=1.0)
    job = make_job(tmp_path, timeouts)
    with running(job) as (links, proxy):
        proxy.freeze()
        for me, peer, name in ((A0, B0, "b"), (B0, A0, "a")):
            with pytest.raises(PeerLost, match=rf'coordinator of DC "{name}": .*, and it was not back within 1\.\d s'):
                links[me].receive(peer, "x", AT)
    assert all(isinstance(error, PeerLost) for error in job.outcomes.values())


def test_who_comes_back_without_its_state_is_told_so(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    again = JobUnderTest(job.topology, tmp_path, TIMEOUTS)
    with running(job) as (links, proxy):
        again.listeners = [open_listeners(f"{tmp_path}/{dc}-again", ("127.0.0.1", 0), None) for dc in range(2)]
        again.start(1, peers={0: proxy.address})
        assert isinstance(again.join()[1], PeerRestarted)
        with pytest.raises(PeerLost, match='coordinator of DC "b" restarted'):
            links[A0].receive(B0, "x", AT)
        for listeners in again.listeners:
            listeners.close()
    assert isinstance(job.outcomes[0], PeerRestarted)
    assert isinstance(job.outcomes[1], HybridEPError)


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_dc_that_is_not_reachable_only_dials(tmp_path: Path, hidden: int) -> None:
    job = make_job(tmp_path)
    sites = list(job.topology.datacenters)
    sites[hidden] = replace(sites[hidden], reachable=False)
    job.topology = replace(job.topology, datacenters=tuple(sites))
    job.open()
    job.start(0, 1)
    links = job.connect_all()
    talk_both(links)
    close(links)
    assert job.join() == {0: None, 1: None}


def test_both_may_dial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridep_rt.runtime.sites.OTHER_SIDE_FIRST_S", 0.0)
    job = make_job(tmp_path)
    job.open()
    addresses = [listeners.wan_address for listeners in job.listeners]
    assert addresses[0] is not None
    assert addresses[1] is not None
    with Proxy(addresses[0], 60_000, 20) as to_a, Proxy(addresses[1], 60_000, 20) as to_b:
        job.start(0, peers={1: to_b.address})
        job.start(1, peers={0: to_a.address})
        links = job.connect_all()
        talk_both(links)
        close(links)
        assert to_a.connections
        assert to_b.connections
        assert job.join() == {0: None, 1: None}


def talk_both(links: dict[Address, WorkerLink]) -> None:
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(talk, links[me], peer, 10, [5, 30_000]) for me, peer in ((A0, B0), (B0, A0))]
        for end in ends:
            end.result(60)


def close(links: dict[Address, WorkerLink]) -> None:
    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(WorkerLink.close, links.values()))


def test_a_running_coordinator_says_how_its_links_are(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.status = True
    with running(job) as (links, proxy):
        talk_both(links)
        proxy.cut()
        talk_both(links)
        status = ask(f"{tmp_path}/0-status")
        assert status.who == 'coordinator of DC "a"'
        link = status.links['coordinator of DC "b"']
        assert link.is_up
        assert link.reconnects == 1
        assert link.rtt_s is None or 0 <= link.rtt_s < 5
        assert link.sent_bytes > 100_000
        assert link.received_bytes > 100_000
        assert link.window_bytes == Limits().window_bytes
        assert set(status.links) == {'coordinator of DC "b"', 'worker 0 of DC "a"'}


def test_a_slow_dc_slows_its_partner_and_nothing_piles_up(tmp_path: Path) -> None:
    limits = Limits(window_bytes=500_000, unacked_bytes=300_000)
    job = make_job(tmp_path, limits=limits)
    job.status = True
    size, count = 100_000, 100
    with running(job) as (links, _):
        for number in range(count):
            links[A0].send(B0, "x", AT, [bytes([number]) * size], traffic=Traffic.GRADIENTS)
        # What does not wait behind the slow one passes, in both directions.
        for _ in range(20):
            links[A0].send(B0, "y", AT, [b"ping"], traffic=Traffic.TOKENS)
            assert bytes(links[B0].receive(A0, "y", AT).payload) == b"ping"
            links[B0].send(A0, "y", AT, [b"pong"], traffic=Traffic.TOKENS)
            assert bytes(links[A0].receive(B0, "y", AT).payload) == b"pong"
        statuses = [ask(f"{tmp_path}/{dc}-status").links for dc in range(2)]
        for link in [link for status in statuses for link in status.values()]:
            assert link.peer_holds_bytes <= limits.window_bytes + size + 2048
            assert sum(link.queued_bytes.values()) <= limits.window_bytes + size
        assert sum(link.credit_stalls for status in statuses for link in status.values()) > 0
        for number in range(count):
            assert links[B0].receive(A0, "x", AT).payload[size - 1] == number
    assert job.outcomes == {0: None, 1: None}
