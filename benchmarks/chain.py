"""The bare way from a worker to one of another DC: the same four processes and sockets, and nothing but forwarding."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.pair import ask, processes

_FORWARD_BYTES = 1 << 20
_CONNECT_S = 20.0


@dataclass(frozen=True, slots=True)
class Chain:
    """Sender, two forwarders, receiver. Both ends are told (messages, bytes of each).

    The sender answers when it began, the receiver when it had all, as `time.monotonic()`.
    """

    sender: Connection
    receiver: Connection
    pids: tuple[int, ...]


@contextlib.contextmanager
def running(certificates: str | None = None) -> Iterator[Chain]:
    """The chain lives inside the block. `certificates`: a folder with those of "a" and "b", for TLS in its middle."""
    with tempfile.TemporaryDirectory(prefix="chain-") as folder, processes() as start:
        receiver, receiver_pid = start(_receive, f"{folder}/b")
        ask(receiver)
        far, far_pid = start(_forward, "tcp", f"{folder}/b", certificates)
        near, near_pid = start(_forward, f"{folder}/a", ask(far), certificates)
        ask(near)
        sender, sender_pid = start(_send, f"{folder}/a")
        ask(sender)
        yield Chain(sender, receiver, (near_pid, far_pid, sender_pid, receiver_pid))
        for end in (receiver, sender):
            end.send(None)


def _send(path: str, told: Connection) -> None:
    with _connect(path) as sock:
        told.send("ready")
        while (task := told.recv()) is not None:
            count, nbytes = task
            body = bytes(nbytes)
            told.send(time.monotonic())
            for _ in range(count):
                sock.sendall(body)


def _receive(path: str, told: Connection) -> None:
    with _listen(path) as server:
        told.send("ready")
        sock, _ = server.accept()
    with sock:
        while (task := told.recv()) is not None:
            count, nbytes = task
            for _ in range(count):
                _receive_all(sock, memoryview(bytearray(nbytes)))
            told.send(time.monotonic())


def _forward(listens: str, onward: str | int, certificates: str | None, told: Connection) -> None:
    """One process: what arrives goes on as it is."""
    with _listen(listens) as server:
        told.send(server.getsockname()[1] if listens == "tcp" else "ready")
        near, _ = server.accept()
    near.settimeout(None)
    far = _connect(onward)
    if certificates is not None and listens == "tcp":
        near = _context(ssl.PROTOCOL_TLS_SERVER, f"{certificates}/b", certificates).wrap_socket(near, server_side=True)
    elif certificates is not None:
        far = _context(ssl.PROTOCOL_TLS_CLIENT, f"{certificates}/a", certificates).wrap_socket(far)
    buffer = memoryview(bytearray(_FORWARD_BYTES))
    with near, far, contextlib.suppress(OSError):
        while got := near.recv_into(buffer):
            far.sendall(buffer[:got])


def _context(side: int, files: str, folder: str) -> ssl.SSLContext:
    """TLS 1.3 with a certificate on each side, as coordinators have it."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(f"{folder}/ca.pem")
    context.load_cert_chain(f"{files}.pem", f"{files}.key")
    return context


def _listen(where: str) -> socket.socket:
    if where == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(where)
        server.listen(1)
    server.settimeout(_CONNECT_S)
    return server


def _connect(where: str | int) -> socket.socket:
    if isinstance(where, int):
        sock = socket.create_connection(("127.0.0.1", where), _CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
    sock.settimeout(None)
    return sock


def _receive_all(sock: socket.socket, room: memoryview) -> None:
    while room:
        got = sock.recv_into(room)
        if not got:
            raise RuntimeError("the chain broke")
        room = room[got:]
