"""Who is late: the coordinators' inquiry with literal times, and real workers that wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import DeadlineExceeded, HybridEPError, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.envelope import unpack
from hybridep_rt.protocol.frames import pack_fields
from hybridep_rt.protocol.inquiry import ANSWER_S, Ask, Command, Forward, Inquiry, Late, Verdict
from hybridep_rt.transport.worker_link import WorkerLink
from tests.test_coordinator import AT, JobUnderTest, make_topology
from tests.test_link_cuts import close

A0, B0, C0 = (Address(dc, 0) for dc in range(3))
REPORT = Late(B0, "tokens at step 3", 1, 20.0, 700, (A0,))


def inquiry(dc: int, up: bool = True) -> Inquiry:
    return Inquiry(dc, lambda other: up)


def test_fields_survive_the_wire() -> None:
    for late in (REPORT, replace(REPORT, layer=None, bytes_outstanding=None, asked=())):
        assert Late.read(unpack(late.pack())) == late


@pytest.mark.parametrize(
    "change",
    [
        {"dc": -1},
        {"worker": "0"},
        {"reason": 5},
        {"layer": -1},
        {"waited": 5},
        {"waited": float("nan")},
        {"waited": -1.0},
        {"bytes": "many"},
        {"asked": None},
        {"asked": [[0]]},
        {"asked": [[0, 0]] * 33},
        {"asked": [["a", 0]]},
    ],
)
def test_malformed_reports(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        Late.read(unpack(pack_fields(**unpack(REPORT.pack()) | change)))


def test_a_worker_of_another_dc_is_that_coordinators_to_ask() -> None:
    assert inquiry(0).report(REPORT, 0.0) == [Forward(1, REPORT)]


def test_a_dc_that_is_cut_off_is_late_itself() -> None:
    late = replace(REPORT, peer=Address(1, COORDINATOR))
    assert inquiry(0, up=False).report(REPORT, 0.0) == [Verdict(late)]
    assert str(late.error(("a", "b"))) == (
        'tokens at step 3, layer 1: nothing from coordinator of DC "b" for 20.0 s, 700 bytes outstanding'
    )


def test_who_does_not_wait_is_late() -> None:
    here = inquiry(1)
    assert here.report(REPORT, 5.0) == [Ask(B0, REPORT)]
    assert here.report(replace(REPORT, asked=(C0,)), 5.1) == []
    assert here.answer(B0, None, 5.2) == [Verdict(REPORT)]
    assert here.answer(B0, None, 5.3) == []
    assert here.get_timer() is None


def test_who_waits_too_is_excused_and_the_question_goes_on() -> None:
    here = inquiry(1)
    here.report(REPORT, 5.0)
    excuse = Late(C0, "experts at step 3", 0, 19.0)
    assert here.answer(B0, excuse, 5.1) == [Forward(2, replace(excuse, asked=(A0, B0)))]


def test_a_short_wait_is_no_excuse() -> None:
    here = inquiry(1)
    here.report(REPORT, 5.0)
    assert here.answer(B0, Late(C0, "experts", 0, 9.9), 5.1) == [Verdict(REPORT)]


def test_who_does_not_answer_is_late() -> None:
    here = inquiry(1)
    here.report(REPORT, 5.0)
    assert here.get_timer() == 5.0 + ANSWER_S
    assert here.handle_timer(5.9) == []
    assert here.handle_timer(6.0) == [Verdict(REPORT)]
    assert here.get_timer() is None


def test_a_circle_ends_with_a_verdict() -> None:
    circle = replace(REPORT, asked=(A0, B0))
    assert inquiry(1).report(circle, 0.0) == [Verdict(circle)]


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.sets(st.integers(0, 5)), st.integers(0, 5))
def test_every_inquiry_ends_with_one_verdict_about_somebody_in_the_chain(
    waits_for: list[int], busy: set[int], first: int
) -> None:
    """Six DCs of one worker each; every worker waits for another one, or is busy."""
    here = [inquiry(dc) for dc in range(6)]
    start = Late(Address(waits_for[first], 0), "x", None, 20.0, None, (Address(first, 0),))
    way: list[tuple[int, Command]] = [(first, command) for command in here[first].report(start, 0.0)]
    verdicts = []
    while way:
        dc, command = way.pop()
        match command:
            case Forward(there, late):
                way += [(there, each) for each in here[there].report(late, 0.0)]
            case Ask(worker, _):
                excuse = None if worker.dc in busy else Late(Address(waits_for[worker.dc], 0), "x", None, 20.0)
                way += [(dc, each) for each in here[dc].answer(worker, excuse, 0.0)]
            case Verdict(late):
                verdicts.append(late.peer.dc)
    [late_dc] = verdicts
    assert late_dc in busy or late_dc in {waits_for[dc] for dc in range(6) if dc not in busy}


TIMEOUTS = Timeouts(
    rendezvous_s=10, handshake_s=5, heartbeat_s=0.1, silence_s=0.6, resume_s=0.6, operation_s=0.8, goodbye_s=1
)


def outcome(call: Callable[[], object]) -> HybridEPError | None:
    try:
        call()
    except HybridEPError as error:
        return error
    return None


def test_every_worker_hears_who_was_late_and_not_who_waited_for_the_late_one(tmp_path: Path) -> None:
    job = JobUnderTest(make_topology((2, 1, 1)), tmp_path, TIMEOUTS)
    job.open()
    job.start(0, 1, 2)
    links = job.connect_all()
    late = links[C0]

    def wait(link: WorkerLink) -> HybridEPError | None:
        """A chain: each waits for the next, the last one for somebody who does something else."""
        peer = {A0: Address(0, 1), Address(0, 1): B0, B0: C0}[link.address]
        return outcome(lambda: link.receive(peer, "tokens", AT))

    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(wait, [link for link in links.values() if link is not late]))
    assert time.monotonic() - started < 5
    errors.append(outcome(late.check))
    for error in [*errors, *(job.join()[dc] for dc in range(3))]:
        assert isinstance(error, DeadlineExceeded)
        assert error.peer == 'worker 0 of DC "c"'
        assert error.operation.startswith("tokens at step 3")
        assert error.layer == 1
        assert error.waited_s >= TIMEOUTS.operation_s / 2
    assert len({str(error) for error in errors}) == 1
    close(links)
