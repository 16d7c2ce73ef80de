"""The handshake, heartbeats and the end of a link: two machines, commands carried by hand, literal times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import ConnectionLost, HandshakeRefused, PeerRestarted, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.envelope import unpack
from hybridep_rt.protocol.frames import Control, Kind, pack_fields
from hybridep_rt.protocol.link import (
    PROTOCOL_VERSION,
    Admit,
    Closed,
    Code,
    Command,
    Job,
    LinkMachine,
    Notice,
    Opened,
    Refusal,
    Send,
    State,
    pack_peer,
    read_peer,
)

A, B = Address(0, COORDINATOR), Address(1, COORDINATOR)
JOB = Job("lab", "digest", 4, b"t" * 32)
HELLO: dict[str, Any] = {
    "version": PROTOCOL_VERSION,
    "cluster": "lab",
    "digest": "",
    "epoch": 0,
    "dc": 1,
    "worker": -1,
    "nonce": bytes(32),
}
TIMEOUTS = Timeouts(handshake_s=10, heartbeat_s=1, silence_s=5, resume_s=5, operation_s=100)


def dialler(job: Job = JOB, me: Address = B) -> LinkMachine:
    return LinkMachine(me, job, TIMEOUTS, b"d" * 32, 100.0, peer=A, peer_name="DC a")


def acceptor(job: Job = JOB, admit: Admit = lambda address, standing: None) -> LinkMachine:
    return LinkMachine(A, job, TIMEOUTS, b"a" * 32, 100.0, admit=admit)


def control(kind: Kind, raw: bytes) -> Control:
    return Control(kind, raw, unpack(raw))


def carry(left: LinkMachine, right: LinkMachine) -> tuple[list[Command], list[Command]]:
    """Run both until nothing is on the way; what each owner is told."""
    told: tuple[list[Command], list[Command]] = ([], [])
    way = [(1, command) for command in left.start()]
    while way:
        side, command = way.pop(0)
        if isinstance(command, Send):
            answers = (left, right)[side].control_received(control(command.kind, command.metadata))
            way += [(1 - side, answer) for answer in answers]
        else:
            told[1 - side].append(command)
    return told


def opened() -> tuple[LinkMachine, LinkMachine]:
    left, right = dialler(), acceptor()
    assert carry(left, right) == ([Opened(A)], [Opened(B)])
    return left, right


def refusal_of(commands: list[Command]) -> str:
    [closed] = commands
    assert isinstance(closed, Closed)
    assert isinstance(closed.error, HandshakeRefused)
    return closed.error.reason


def test_both_sides_open() -> None:
    left, right = opened()
    assert left.state is right.state is State.OPEN


def test_the_token_never_travels() -> None:
    left, right = dialler(), acceptor()
    sent = b"".join(command.metadata for command in left.start() if isinstance(command, Send))
    assert JOB.run_token not in sent
    assert repr(JOB.run_token) not in repr(JOB)
    carry(left, right)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (replace(JOB, run_token=b"u" * 32), "run token differs"),
        (replace(JOB, cluster="other"), "cluster differs"),
        (replace(JOB, digest="x"), "topology differs"),
        (replace(JOB, epoch=5), "plan epoch differs: 5 there, 4 here"),
    ],
)
def test_jobs_that_do_not_belong_together(job: Job, reason: str) -> None:
    left, right = carry(dialler(job), acceptor())
    assert reason in refusal_of(left)
    assert reason in refusal_of(right)


def test_admission_has_the_last_word() -> None:
    left, right = carry(
        dialler(), acceptor(admit=lambda address, standing: Refusal(Code.CONNECTED, "already connected"))
    )
    assert refusal_of(left) == refusal_of(right) == "already connected"


def test_a_stranger_without_the_token_learns_nothing_about_the_topology() -> None:
    asked: list[Address] = []
    stranger = dialler(replace(JOB, run_token=b"u" * 32, digest="x"))
    carry(stranger, acceptor(admit=lambda address, standing: asked.append(address)))
    assert asked == []


def test_the_dialler_refuses_an_impostor() -> None:
    left, right = dialler(), acceptor()
    [hello] = left.start()
    assert isinstance(hello, Send)
    [challenge] = right.control_received(control(hello.kind, hello.metadata))
    assert isinstance(challenge, Send)
    left.control_received(control(challenge.kind, challenge.metadata))
    commands = left.control_received(control(Kind.WELCOME, pack_fields(proof=bytes(32))))
    assert refusal_of(commands[1:]) == "run token differs"


def test_the_dialler_refuses_another_address_than_it_dialled() -> None:
    wrong = LinkMachine(Address(2, COORDINATOR), JOB, TIMEOUTS, b"a" * 32, 100.0)
    assert "coordinator of DC 2 answers at this address" in refusal_of(carry(dialler(), wrong)[0])


def test_a_proof_cannot_be_replayed_to_another_nonce() -> None:
    left, right = dialler(), acceptor()
    sent = []
    [hello] = left.start()
    [challenge] = right.control_received(control(Kind.HELLO, hello.metadata))  # type: ignore[union-attr]
    [proof] = left.control_received(control(Kind.CHALLENGE, challenge.metadata))  # type: ignore[union-attr]
    sent = [hello, proof]
    again = LinkMachine(A, JOB, TIMEOUTS, b"z" * 32, 100.0)
    again.control_received(control(Kind.HELLO, sent[0].metadata))  # type: ignore[union-attr]
    commands = again.control_received(control(Kind.PROOF, sent[1].metadata))  # type: ignore[union-attr]
    assert refusal_of(commands[1:]) == "run token differs"


def test_another_protocol_version_is_told_so() -> None:
    hello = HELLO | {"version": PROTOCOL_VERSION + 1}
    commands = acceptor().control_received(control(Kind.HELLO, pack_fields(**hello)))
    assert refusal_of(commands[1:]) == "protocol version differs: 3 there, 2 here"


@pytest.mark.parametrize(
    "change",
    [{"version": "1"}, {"cluster": 5}, {"digest": None}, {"epoch": -1}, {"dc": True}, {"worker": -2}, {"nonce": b""}],
)
def test_a_malformed_hello(change: dict[str, Any]) -> None:

    with pytest.raises(RemoteProtocolError):
        acceptor().control_received(control(Kind.HELLO, pack_fields(**HELLO | change)))


@given(st.sampled_from([kind for kind in Kind if kind is not Kind.HELLO]))
def test_nothing_but_a_hello_opens_the_conversation(kind: Kind) -> None:
    with pytest.raises(RemoteProtocolError, match="arrived while this side waits for a hello"):
        acceptor().control_received(control(kind, pack_fields()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Kind)),
            st.dictionaries(
                st.sampled_from(
                    ["version", "cluster", "digest", "epoch", "dc", "worker", "nonce", "proof", "code", "text"]
                ),
                st.one_of(st.integers(-2, 3), st.just("lab"), st.just(bytes(32)), st.none(), st.lists(st.none())),
            ),
        ),
        max_size=5,
    )
)
def test_no_sequence_of_control_frames_opens_a_link_without_the_token(
    frames: list[tuple[Kind, dict[str, Any]]],
) -> None:
    for machine in (acceptor(), dialler()):
        try:
            for kind, fields in frames:
                commands = machine.control_received(control(kind, pack_fields(**fields)))
                assert not any(isinstance(command, Opened) for command in commands)
        except RemoteProtocolError:
            pass
        assert machine.state is not State.OPEN


def test_a_slow_handshake_ends() -> None:
    machine = acceptor()
    assert machine.get_timer() == 110.0
    assert machine.handle_timer(109.0) == []
    [closed] = machine.handle_timer(110.0)
    assert isinstance(closed, Closed)
    assert str(closed.error) == "a stranger: no handshake within 10 s"
    assert machine.ended() == []


def test_an_open_link_sends_heartbeats_and_a_silent_one_is_lost() -> None:
    left, _ = opened()
    left.bytes_received(103.0)
    assert left.handle_timer(104.0) == [Send(Kind.HEARTBEAT, pack_fields(at=104.0, echo=None, held=0.0))]
    assert left.get_timer() == 105.0
    assert left.handle_timer(104.9) == []
    left.handle_timer(107.5)
    assert left.get_timer() == 108.0
    [closed] = left.handle_timer(108.0)
    assert isinstance(closed, Closed)
    assert isinstance(closed.error, ConnectionLost)
    assert closed.error.reason == "silent for 5 s"


def test_heartbeats_measure_the_round_trip_of_clocks_that_differ() -> None:
    left, right = opened()
    [sent] = left.handle_timer(101.0)
    assert isinstance(sent, Send)
    right.bytes_received(5000.02)
    right.control_received(control(sent.kind, sent.metadata))
    [answer] = right.handle_timer(5000.5)
    assert isinstance(answer, Send)
    left.bytes_received(101.53)
    left.control_received(control(answer.kind, answer.metadata))
    assert left.rtt_s == pytest.approx(0.05)
    assert right.rtt_s is None


@pytest.mark.parametrize("fields", [{"at": "x"}, {"at": float("nan")}, {"echo": 1}, {"held": float("inf")}])
def test_a_malformed_heartbeat(fields: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="seconds"):
        opened()[0].control_received(control(Kind.HEARTBEAT, pack_fields(**fields)))


def test_standings_are_exchanged_and_proved() -> None:
    asked: list[bytes] = []

    def admit(address: Address, standing: bytes) -> None:
        asked.append(standing)

    left = LinkMachine(B, JOB, TIMEOUTS, b"d" * 32, 100.0, peer=A, admit=admit, standing=lambda address: b"left")
    right = LinkMachine(A, JOB, TIMEOUTS, b"a" * 32, 100.0, admit=admit, standing=lambda address: b"right")
    assert carry(left, right) == ([Opened(A, b"right")], [Opened(B, b"left")])
    assert asked == [b"left", b"right"]


def test_a_changed_standing_is_noticed() -> None:
    left, right = dialler(), acceptor()
    [hello] = left.start()
    assert isinstance(hello, Send)
    [challenge] = right.control_received(control(hello.kind, hello.metadata))
    assert isinstance(challenge, Send)
    [proof] = left.control_received(control(challenge.kind, challenge.metadata))
    assert isinstance(proof, Send)
    fields = unpack(proof.metadata) | {"standing": b"forged"}
    assert refusal_of(right.control_received(control(Kind.PROOF, pack_fields(**fields)))[1:]) == "run token differs"


def test_restarted_and_superseded_are_told_by_type() -> None:
    for code, kind in ((Code.RESTARTED, PeerRestarted), (Code.SUPERSEDED, ConnectionLost)):
        refusal = Refusal(code, "reason")
        told = carry(dialler(), acceptor(admit=lambda address, standing, refusal=refusal: refusal))  # type: ignore[misc]
        for [closed] in told:
            assert isinstance(closed, Closed)
            assert type(closed.error) is kind


def test_heartbeats_are_not_passed_on_and_notices_are() -> None:
    left, _ = opened()
    assert left.control_received(control(Kind.HEARTBEAT, pack_fields())) == []
    assert left.control_received(control(Kind.READY, pack_fields())) == [Notice(Kind.READY, {})]
    with pytest.raises(RemoteProtocolError, match="HELLO arrived while this side open"):
        left.control_received(control(Kind.HELLO, pack_fields()))


def test_the_end_without_goodbye_is_a_loss() -> None:
    left, _ = opened()
    [closed] = left.ended()
    assert isinstance(closed, Closed)
    assert str(closed.error) == "DC a: its connection ended without goodbye"
    assert left.ended() == []


def test_the_end_after_either_sides_goodbye_is_in_order() -> None:
    left, right = opened()
    left.say_goodbye()
    assert right.control_received(control(Kind.GOODBYE, pack_fields())) == [Notice(Kind.GOODBYE, {})]
    assert left.ended() == right.ended() == [Closed(None)]


def test_hanging_up_during_the_handshake() -> None:
    [closed] = dialler().ended()
    assert isinstance(closed, Closed)
    assert str(closed.error) == "DC a: it hung up during the handshake"


def test_the_dialler_may_refuse_what_the_acceptor_has_opened() -> None:
    [[mine], [opened, theirs]] = carry(
        LinkMachine(
            B,
            JOB,
            TIMEOUTS,
            b"d" * 32,
            100.0,
            peer=A,
            peer_name="DC a",
            admit=lambda address, standing: Refusal(Code.SUPERSEDED, "another connection came first"),
        ),
        acceptor(),
    )
    assert opened == Opened(B)
    for closed in (mine, theirs):
        assert isinstance(closed, Closed)
        assert isinstance(closed.error, ConnectionLost)
        assert closed.error.reason == "another connection came first"


def test_peers_in_notices() -> None:
    assert read_peer(unpack(pack_peer(B, "line\nbreak\x1b[0m"))) == (B, "line break [0m")
    assert len(read_peer(unpack(pack_peer(B, "x" * 9999)))[1]) == 500
    for fields in (
        {},
        {"dc": 0, "worker": 0},
        {"dc": 0, "worker": 0, "reason": 5},
        {"dc": -1, "worker": 0, "reason": ""},
    ):
        with pytest.raises(RemoteProtocolError):
            read_peer(fields)
