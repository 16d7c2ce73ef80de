"""The bare way from a worker to one of another DC: the same four processes and sockets, and nothing but forwarding."""

from __future__ import annotations

import contextlib
import os
import socket
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
    """Sender, two forwarders, receiver. Tell `sender` and `receiver` (messages, bytes of each); the sender answers."""

    sender: Connection
    receiver: Connection
    pids: tuple[int, ...]


@contextlib.contextmanager
def running() -> Iterator[Chain]:
    """The chain lives inside the block."""
    with tempfile.TemporaryDirectory(prefix="chain-") as folder, processes() as start:
        receiver, receiver_pid = start(_receive, f"{folder}/b")
        ask(receiver)
        far, far_pid = start(_forward, "tcp", f"{folder}/b")
        port = ask(far)
        near, near_pid = start(_forward, f"{folder}/a", port)
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
            start = time.perf_counter()
            for _ in range(count):
                sock.sendall(body)
            _receive_all(sock, memoryview(bytearray(1)))
            told.send(time.perf_counter() - start)


def _receive(path: str, told: Connection) -> None:
    with _listen(path) as server:
        told.send("ready")
        sock, _ = server.accept()
    with sock:
        while (task := told.recv()) is not None:
            count, nbytes = task
            for _ in range(count):
                _receive_all(sock, memoryview(bytearray(nbytes)))
            sock.sendall(b"!")


def _forward(listens: str, onward: str | int, told: Connection) -> None:
    """One process: what arrives goes on as it is; the answer of one byte goes back."""
    with _listen(listens) as server:
        told.send(server.getsockname()[1] if listens == "tcp" else "ready")
        near, _ = server.accept()
    near.settimeout(None)
    with near, _connect(onward) as far:
        back = os.fork()
        if back == 0:
            _pump(far, near, 1)
            os._exit(0)
        _pump(near, far, _FORWARD_BYTES)


def _pump(source: socket.socket, target: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(nbytes))
    with contextlib.suppress(OSError):
        while got := source.recv_into(buffer):
            target.sendall(buffer[:got])
        target.shutdown(socket.SHUT_WR)


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
