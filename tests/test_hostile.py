"""Whatever bytes arrive, from whomever: a typed error or an event, in bounded memory, and the job goes on."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Control, Kind, pack_fields
from hybridep_rt.protocol.link import NONCE_BYTES, PROTOCOL_VERSION, Job, LinkMachine
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.transport.worker_link import WorkerLink
from tests.certificates import certified
from tests.hostile_bytes import MEMORY_BYTES, digest, generated, valid_stream
from tests.strangers import BEFORE_TLS, VISITS, Door, Visit, visit
from tests.test_coordinator import AT, JobUnderTest, make_topology, running

INPUTS = 20_000
VISITS_EACH = 6
IMPATIENT = Timeouts(
    rendezvous_s=20, handshake_s=0.4, heartbeat_s=0.2, silence_s=10, resume_s=20, operation_s=30, goodbye_s=3
)

HASTY = Timeouts(
    rendezvous_s=4, handshake_s=15, heartbeat_s=0.2, silence_s=10, resume_s=20, operation_s=30, goodbye_s=3
)
"""A stranger's place is free again only when it's too late to join."""


def digest_all(seed: int, count: int) -> Counter[str]:
    """Decode that many generated inputs; how many gave what."""
    random = Random(seed)
    return Counter(
        digest(data, random, after_handshake=number % 4 > 0) for number, data in enumerate(generated(seed, count))
    )


def peak_bytes(seed: int, count: int) -> int:
    """The most memory that decoding took at any time. Counting it makes everything five times slower."""
    tracemalloc.start()
    try:
        digest_all(seed, count)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_twenty_thousand_inputs() -> None:
    outcomes = digest_all(0, INPUTS)
    assert outcomes.total() == INPUTS
    assert min(outcomes[each] for each in ("events", "error", "nothing")) > INPUTS // 50, outcomes


def test_memory_is_bounded() -> None:
    assert peak_bytes(1, INPUTS // 10) < MEMORY_BYTES


EDITS = ("set", "cut", "insert", "repeat")


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 2000), st.binary(max_size=30))),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_edits_of_a_valid_stream(seed: int, edits: list[tuple[str, int, bytes]], after_handshake: bool) -> None:
    data = valid_stream(Random(seed))
    for what, where, new in edits:
        at = where % (len(data) + 1)
        after = {"set": at + len(new), "cut": at + len(new) + 1, "insert": at, "repeat": max(0, at - len(new))}[what]
        data = data[:at] + (b"" if what == "cut" else new) * (what != "repeat") + data[after:]
    digest(data, Random(seed), after_handshake=after_handshake)


HANDSHAKE = {
    "version": PROTOCOL_VERSION,
    "cluster": "test",
    "digest": "d",
    "epoch": 0,
    "dc": 1,
    "worker": COORDINATOR,
    "nonce": bytes(NONCE_BYTES),
    "proof": bytes(32),
    "code": 3,
    "text": "no",
    "reason": "no",
    "standing": b"",
}
ODD = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=40)


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(list(Kind)),
            st.dictionaries(st.sampled_from(sorted(HANDSHAKE)), ODD, max_size=2),
            st.booleans(),
        ),
        max_size=5,
    ),
)
@settings(max_examples=200, deadline=None)
def test_a_handshake_of_strange_frames_never_opens(
    dials: bool, frames: list[tuple[Kind, dict[str, Any], bool]]
) -> None:
    me, peer, job = Address(0, COORDINATOR), Address(1, COORDINATOR), Job("test", "d", 0, b"secret" * 6)
    machine = LinkMachine(me, job, Timeouts(), bytes(NONCE_BYTES), 0.0, peer=peer if dials else None)
    machine.start()
    with suppress(RemoteProtocolError):
        for kind, odd, is_map in frames:
            fields = HANDSHAKE | odd
            machine.control_received(Control(kind, pack_fields(**fields), fields if is_map else list(fields)))
            assert machine.state.name != "OPEN"


def exchange_until(done: threading.Event, links: dict[Address, WorkerLink]) -> int:
    """Messages there and back between two DCs, each checked; returns how many."""
    here, far = links[Address(0, 0)], links[Address(1, 0)]
    number = 0
    while not done.is_set():
        body = bytes([number % 251]) * (1 + number * 997 % 100_000)
        here.send(far.address, "there", AT, [body], traffic=Traffic.TOKENS)
        back = far.receive(here.address, "there", AT).payload
        far.send(here.address, "back", AT, [back], traffic=Traffic.EXPERTS)
        assert here.receive(far.address, "back", AT).payload == body
        number += 1
    return number


def besiege(job: JobUnderTest, visits_each: int, deadline_s: float) -> None:
    """Strangers of all kinds at every TCP listener of DC 0 while two DCs exchange messages; all end in good order.

    With TLS those between DCs come with DC b's certificate, and some of them without a word of TLS.
    """
    wan, workers = job.listeners[0].wan_address, job.listeners[0].workers_address
    assert wan is not None
    assert workers is not None
    shown = job.tls[1].contexts()[1] if job.tls else None
    doors = [Door(wan, shown), Door(workers)]
    visits = [(how, doors) for how in VISITS]
    if shown is not None:
        visits += [(how, [Door(wan)]) for how in BEFORE_TLS]
    secret = Job(job.topology.cluster, job.topology.digest(), 0, bytes(32))
    done = threading.Event()

    def keep_visiting(how: Visit, doors: list[Door], number: int) -> None:
        random = Random(number)
        for _ in range(visits_each):
            visit(how, random.choice(doors), secret, random)

    with running(job) as links, ThreadPoolExecutor(len(visits) + 1) as pool:
        exchanged = pool.submit(exchange_until, done, links)
        visiting = [pool.submit(keep_visiting, *each, number) for number, each in enumerate(visits)]
        try:
            finish(visiting, deadline_s)
        finally:
            done.set()
        assert exchanged.result(30) > 0
    assert job.join() == {0: None, 1: None}


def finish(tasks: list[Future[None]], deadline_s: float) -> None:
    """Raises what a task raised; fails where one takes too long."""
    late = wait(tasks, deadline_s).not_done
    assert not late, f"{len(late)} strangers were not cut off in time"
    for task in tasks:
        task.result()


def sockets() -> int:
    """How many this process holds."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def besieged_job(folder: Path, *, tls: bool) -> JobUnderTest:
    """Two DCs that lose patience with strangers soon, and let in few at once."""
    job = JobUnderTest(make_topology((1, 1)), folder, IMPATIENT, Limits(strangers=4))
    if tls:
        job.tls = certified(folder / "certs", job.topology)
    job.open()
    return job


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_strangers_at_the_gates_disturb_nobody_and_leave_nothing(tmp_path: Path, tls: bool) -> None:
    before = sockets()
    besiege(besieged_job(tmp_path, tls=tls), VISITS_EACH, deadline_s=60)
    assert sockets() == before


@pytest.mark.parametrize("door", ["wan_address", "workers_address"])
def test_a_crowd_at_one_door_keeps_nobody_out_at_another(tmp_path: Path, door: str) -> None:
    job = JobUnderTest(make_topology((1,)), tmp_path, HASTY, Limits(strangers=2))
    job.open()
    with ExitStack() as crowd:
        for _ in range(20):
            crowd.enter_context(socket.create_connection(getattr(job.listeners[0], door), 5))
        with running(job):
            pass
    assert job.join() == {0: None}
