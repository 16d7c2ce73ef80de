"""Who is in the job: events in, commands out, literal times."""

from __future__ import annotations

import pytest

from hybridep_rt.errors import ConnectFailed, HandshakeRefused, PeerLost, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Kind, pack_fields
from hybridep_rt.protocol.link import Code, pack_peer
from hybridep_rt.protocol.membership import Command, End, Membership, TellSites, TellWorkers

B0, B1 = Address(1, 0), Address(1, 1)
A0, C0 = Address(0, 0), Address(2, 0)
SITE_A, SITE_C = Address(0, COORDINATOR), Address(2, COORDINATOR)
NONE = pack_fields()


def membership() -> Membership:
    """DC b of three; a and c have one worker, b has two."""
    return Membership(1, (1, 2, 1), ("a", "b", "c"), rendezvous_s=60.0, now=100.0)


def running() -> Membership:
    new = membership()
    for address in (B0, B1, SITE_A, SITE_C):
        new.joined(address)
    new.site_ready(0)
    new.site_ready(2)
    return new


def end_of(commands: list[Command]) -> End:
    [end] = [command for command in commands if isinstance(command, End)]
    return end


def test_workers_start_when_everyone_is_there() -> None:
    new = membership()
    assert new.joined(B0) == []
    assert new.joined(SITE_A) == []
    assert [type(each) for each in new.joined(B1)] == [TellSites]
    assert new.joined(SITE_C) == [TellSites((2,), Kind.SITE_READY, NONE)]
    assert new.missing() == ['workers of DC "a"', 'workers of DC "c"']
    assert new.site_ready(2) == []
    assert new.get_timer() == 161.0
    assert new.site_ready(0) == [TellWorkers(Kind.READY, NONE)]
    assert new.get_timer() is None


def test_who_may_join_where() -> None:
    new = membership()
    assert new.admit_worker(B0) is None
    assert new.admit_site(SITE_A) is None
    assert new.admit_site(SITE_C) is None
    for refusal in (
        new.admit_worker(A0),
        new.admit_worker(Address(1, 2)),
        new.admit_worker(SITE_C),
        new.admit_site(Address(1, COORDINATOR)),
        new.admit_site(C0),
    ):
        assert refusal is not None
        assert refusal.code is Code.ROLE
    new.joined(B0)
    refusal = new.admit_worker(B0)
    assert refusal is not None
    assert (refusal.code, refusal.text) == (
        Code.CONNECTED,
        'worker 0 of DC "b" is already connected: another job with this cluster name?',
    )


def test_the_end_of_the_rendezvous_says_who_is_missing_and_who_was_refused() -> None:
    new = membership()
    new.joined(B0)
    new.joined(SITE_A)
    new.refused(HandshakeRefused("a stranger", "run token differs"), "127.0.0.1")
    assert new.handle_timer(159.9) == []
    commands = new.handle_timer(160.0)
    error = end_of(commands).error
    assert isinstance(error, ConnectFailed)
    assert str(error) == (
        'worker 1 of DC "b", DC "c", workers of DC "a": did not join within 60 s; '
        "last refused attempt: run token differs, from 127.0.0.1"
    )
    assert [type(each) for each in commands] == [TellWorkers, TellSites, End]
    assert new.handle_timer(170.0) == []


def test_a_departure_is_told_behind_the_messages_and_the_last_one_ends_the_job() -> None:
    new = running()
    notice = pack_peer(B0, "step 3")
    assert new.departed(B0, "step 3") == [
        TellWorkers(Kind.DEPART, notice, after=B0),
        TellSites((0, 2), Kind.DEPART, notice, after=B0),
    ]
    assert new.has_departed(B0)
    assert new.departed(A0, "step 3") == [TellWorkers(Kind.DEPART, pack_peer(A0, "step 3"), after=A0)]
    new.departed(C0, "step 3")
    assert end_of(new.departed(B1, "step 3")).error is None
    assert new.lost(SITE_A, "its connection ended") == []
    with pytest.raises(RemoteProtocolError, match="does not exist"):
        new.departed(Address(0, 1), "")


def test_a_coordinator_that_stays_silent_after_the_end_is_waited_for_and_may_be_lost() -> None:
    new = running()
    for worker in (A0, B0, B1, C0):
        new.departed(worker, "step 3")
    assert [new.is_silent(site) for site in (SITE_A, SITE_C, B0)] == [True, True, False]
    new.goodbye(SITE_A)
    assert [new.is_silent(site) for site in (SITE_A, SITE_C)] == [False, True]
    assert new.lost_after_end is None
    assert new.lost(SITE_C, "was silent for 5 s") == []
    assert new.lost(SITE_A, "its connection ended") == []
    assert str(new.lost_after_end) == 'coordinator of DC "c": was silent for 5 s'


def test_the_first_loss_ends_the_job_and_is_told_everyone() -> None:
    new = running()
    commands = new.lost(B1, "its connection ended without goodbye")
    notice = pack_peer(B1, "its connection ended without goodbye")
    assert commands[:2] == [TellWorkers(Kind.FAIL, notice), TellSites((0, 2), Kind.FAIL, notice)]
    error = end_of(commands).error
    assert isinstance(error, PeerLost)
    assert str(error) == 'worker 1 of DC "b": its connection ended without goodbye'
    assert new.lost(SITE_A, "its connection ended") == []
    assert new.departed(B0, "") == []


def test_a_refusal_by_another_dc_ends_the_job_with_that_error() -> None:
    refused = HandshakeRefused('coordinator of DC "a"', "run token differs")
    assert end_of(membership().was_refused(refused)).error is refused
