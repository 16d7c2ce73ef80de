"""Strangers that never finish TLS: they take no place for longer than the handshake may last."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import control_frame, encode_frame
from hybridep_rt.protocol.link import NONCE_BYTES, Job, LinkMachine, Send
from hybridep_rt.transport.tls import Tls
from tests.certificates import certified
from tests.test_coordinator import JobUnderTest, make_topology, running

TIMEOUTS = Timeouts(
    rendezvous_s=20, handshake_s=0.5, heartbeat_s=0.2, silence_s=10, resume_s=15, operation_s=30, goodbye_s=3
)
PATIENCE_S = 10.0


def test_failed_tls_handshakes_take_no_place(tmp_path: Path) -> None:
    job = JobUnderTest(make_topology((1, 1)), tmp_path, TIMEOUTS, Limits(strangers=4))
    job.tls = certified(tmp_path / "certs", job.topology)
    job.open()
    at = job.listeners[0].wan_address
    assert at is not None
    with running(job):
        for _ in range(30):
            with suppress(ConnectionError), socket.create_connection(at, 5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3)
                while stranger.recv(100):
                    pass
        deadline = time.monotonic() + PATIENCE_S
        while not is_let_in(at, job.tls[1]):
            assert time.monotonic() < deadline, "strangers that are gone keep others out"
    assert job.join() == {0: None, 1: None}


def is_let_in(at: tuple[str, int], tls: Tls) -> bool:
    """Whether a DC with the right certificate gets an answer to its hello."""
    job = Job("test", "digest", 0, bytes(32))
    machine = LinkMachine(Address(1, COORDINATOR), job, TIMEOUTS, bytes(NONCE_BYTES), 0.0, peer=Address(0, COORDINATOR))
    [hello] = machine.start()
    assert isinstance(hello, Send)
    with (
        suppress(ConnectionError),
        socket.create_connection(at, 5) as raw,
        tls.contexts()[1].wrap_socket(raw) as sock,
    ):
        sock.sendall(encode_frame(control_frame(hello.kind, hello.metadata), 0))
        return sock.recv(1) != b""
    return False
