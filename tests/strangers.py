"""Who might connect to a coordinator without belonging to the job. Each function is one visit and leaves in the end."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import HybridEPError, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.decoder import FrameDecoder
from hybridep_rt.protocol.frames import Control, Kind, control_frame, encode_frame, pack_fields
from hybridep_rt.protocol.link import NONCE_BYTES, Closed, Job, LinkMachine, Send
from tests.hostile_bytes import generated, valid_stream


class Door(NamedTuple):
    """Where a coordinator listens. `tls`: what the visitor shows there; None: it doesn't begin TLS."""

    address: tuple[str, int]
    tls: ssl.SSLContext | None = None


Visit = Callable[[Door, Job, Random], None]

PATIENCE_S = 5.0
"""Whoever is not cut off by then was not noticed."""
_TICK_S = 0.01
_CROWD = 12
_TURNED_AWAY = (ConnectionError, ssl.SSLError)


def talks_garbage(door: Door, job: Job, random: Random) -> None:
    """Sends what no peer sends, until the other side has enough."""
    with _visiting(door) as sock:
        for data in generated(random.getrandbits(32), 20):
            sock.sendall(data)
        sock.sendall(bytes(10_000))  # now it is more than one header, whatever came before
        _until_closed(sock)


def sends_messages_at_once(door: Door, job: Job, random: Random) -> None:
    """Skips the handshake."""
    with _visiting(door) as sock:
        sock.sendall(valid_stream(random) + bytes(200))
        _until_closed(sock)


def hangs_up(door: Door, job: Job, random: Random) -> None:
    """Resets the connection in the middle of its first frame."""
    with _visiting(door) as sock:
        sock.sendall(_hello(job)[: random.randrange(60)])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def says_nothing(door: Door, job: Job, random: Random) -> None:
    """Connects and waits."""
    with _visiting(door) as sock:
        _until_closed(sock)


def stops_half_way(door: Door, job: Job, random: Random) -> None:
    """Says hello, takes the challenge, and waits."""
    with _visiting(door) as sock:
        sock.sendall(_hello(job))
        _until_closed(sock)


def drips(door: Door, job: Job, random: Random) -> None:
    """One byte now and then: never silent, never done."""
    with _visiting(door) as sock:
        _drip(sock, _hello(job) * 100)


def drips_tls(door: Door, job: Job, random: Random) -> None:
    """The same in the first message of TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    with _visiting(door) as sock:
        _drip(sock, outgoing.read() * 10)


def speaks_another_version(door: Door, job: Job, random: Random) -> None:
    """Is of another release."""
    with _visiting(door) as sock:
        fields = {"cluster": job.cluster, "digest": job.digest, "epoch": job.epoch, "dc": 1, "worker": COORDINATOR}
        hello = pack_fields(version=99, nonce=os.urandom(NONCE_BYTES), **fields)
        sock.sendall(encode_frame(control_frame(Kind.HELLO, hello), 0))
        _until_closed(sock)


def knows_a_wrong_token(door: Door, job: Job, random: Random) -> None:
    """Does everything right but for the token. Has to be told so."""
    wrong = Job(job.cluster, job.digest, job.epoch, random.randbytes(32))
    with _visiting(door) as sock:
        assert _shake_hands(sock, wrong) in ("run token differs", None)


def comes_in_a_crowd(door: Door, job: Job, random: Random) -> None:
    """More connections at once than strangers are let in."""
    with contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(_CROWD):
            with contextlib.suppress(*_TURNED_AWAY):
                crowd.append(stack.enter_context(_visiting(door)))
        for each in crowd:
            _until_closed(each)


VISITS = (
    talks_garbage,
    sends_messages_at_once,
    hangs_up,
    says_nothing,
    stops_half_way,
    drips,
    speaks_another_version,
    knows_a_wrong_token,
    comes_in_a_crowd,
)

BEFORE_TLS = (talks_garbage, hangs_up, says_nothing, drips, drips_tls, comes_in_a_crowd)
"""Those for whom it makes no difference that the other side speaks TLS and they don't."""


def visit(how: Visit, door: Door, job: Job, random: Random) -> None:
    """One visit. That the other side ends the connection, at whatever point, is what has to happen."""
    with contextlib.suppress(*_TURNED_AWAY):
        how(door, job, random)


@contextlib.contextmanager
def _visiting(door: Door) -> Iterator[socket.socket]:
    """A connection, in TLS if the door says so."""
    with socket.create_connection(door.address, PATIENCE_S) as sock:
        if door.tls is None:
            yield sock
        else:
            with door.tls.wrap_socket(sock) as secure:
                yield secure


def _drip(sock: socket.socket, data: bytes) -> None:
    deadline = time.monotonic() + PATIENCE_S
    sock.settimeout(_TICK_S)
    for byte in data:
        sock.sendall(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            if not sock.recv(4096):
                return
        assert time.monotonic() < deadline, "a slow stranger is not cut off"


def _until_closed(sock: socket.socket) -> None:
    """Raises TimeoutError where the other side doesn't close in time."""
    with contextlib.suppress(*_TURNED_AWAY):
        while sock.recv(4096):
            pass


def _hello(job: Job) -> bytes:
    machine = _machine(job)
    [send] = machine.start()
    assert isinstance(send, Send)
    return encode_frame(control_frame(send.kind, send.metadata), 0)


def _machine(job: Job) -> LinkMachine:
    me, peer = Address(1, COORDINATOR), Address(0, COORDINATOR)
    return LinkMachine(me, job, Timeouts(), os.urandom(NONCE_BYTES), 0.0, peer=peer)


def _shake_hands(sock: socket.socket, job: Job) -> str | None:
    """Why the other side refuses; None if it hangs up, as it may when it has too many strangers."""
    machine, decoder = _machine(job), FrameDecoder(Limits())
    todo = machine.start()
    while True:
        for command in todo:
            match command:
                case Send(kind, metadata):
                    sock.sendall(encode_frame(control_frame(kind, metadata), 0))
                case Closed(error):
                    return getattr(error, "reason", None)
        data = sock.recv(4096)
        if not data:
            return None
        try:
            events = decoder.feed(data)
        except RemoteProtocolError as error:
            raise AssertionError(f"the coordinator sent nonsense: {error}") from None
        todo = [each for event in events if isinstance(event, Control) for each in _reply(machine, event)]


def _reply(machine: LinkMachine, event: Control) -> list[object]:
    try:
        return list(machine.control_received(event))
    except HybridEPError as error:
        raise AssertionError(f"the coordinator said what is not due: {error}") from None
