"""Measure a directed pair of DCs with real sockets in their namespaces. A thin shell."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from launcher.testbed import tun
from launcher.testbed.bed import Testbed
from launcher.testbed.priority import ahead_of_others
from launcher.testbed.verdict import Expected, Measured
from topology.errors import HybridEPError

_PORT = 5201
_CONNECT_S = 20.0
_BLOCK = bytes(1 << 20)
_PINGS_S = 2.0


def measure(bed: Testbed, expected: Expected, seconds: float) -> Measured:
    """Round trips on an idle link, then goodput over so many seconds. Raises HybridEPError if the link is dead."""
    try:
        with ahead_of_others(), _connection(bed, expected) as (sender, receiver):
            rtt_s = _round_trip_s(sender, receiver, expected.rtt_s)
            sender.setblocking(False)
            receiver.setblocking(False)
            _pump(sender, receiver, 0.5 + 16 * expected.rtt_s)
            cpu_s, start = bed.relay_cpu_s(), perf_counter()
            received = _pump(sender, receiver, seconds)
            took_s = perf_counter() - start
            relay_cpu = (bed.relay_cpu_s() - cpu_s) / took_s
            return Measured(received / took_s, rtt_s, _segment_bytes(sender), relay_cpu)
    except OSError as error:
        raise HybridEPError(f"{expected.source} -> {expected.target}: {error}") from None


@contextmanager
def _connection(bed: Testbed, expected: Expected) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection from source to target; both ends are in this process, each in its namespace."""
    address = (bed.address(expected.target), _PORT)
    with tun.inside(bed.path(expected.target)):
        server = socket.create_server(address)
    with server:
        with tun.inside(bed.path(expected.source)):
            sender = socket.socket()
        with sender:
            _prepare(sender, server, expected)
            sender.connect(address)
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_CONNECT_S)
                for end in (sender, receiver):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield sender, receiver


def _prepare(sender: socket.socket, server: socket.socket, expected: Expected) -> None:
    """Have one connection fill the link."""
    for end in (sender, server):
        end.settimeout(_CONNECT_S)
    pipe_bytes = expected.rate_bytes_per_s * expected.rtt_s
    if expected.loss or expected.queue_bytes < pipe_bytes:
        _choose_bbr(sender, needed=expected.loss > 0)
    if not expected.loss:
        # The window holds the pipe and half of its queue: the link is kept full, and little is dropped.
        window = pipe_bytes + expected.queue_bytes / 2
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, int(window))


def _choose_bbr(sender: socket.socket, *, needed: bool) -> None:
    """Have the kernel not take every loss for congestion, nor fill a short queue until it drops."""
    try:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        if needed:
            raise HybridEPError("the rate of a link with loss can only be measured with BBR (tcp_bbr)") from None


def _round_trip_s(sender: socket.socket, receiver: socket.socket, expected_s: float) -> float:
    """Median of one byte's way there and back."""
    times = []
    for _ in range(max(5, min(50, int(_PINGS_S / max(expected_s, 0.001))))):
        start = perf_counter()
        for here, there in ((sender, receiver), (receiver, sender)):
            here.send(b"?")
            there.recv(1)
        times.append(perf_counter() - start)
    return median(times)


def _pump(sender: socket.socket, receiver: socket.socket, seconds: float) -> int:
    """Send as fast as the link takes it for so long: bytes received."""
    received = 0
    unread = bytearray(len(_BLOCK))
    end = perf_counter() + seconds
    while (left_s := end - perf_counter()) > 0:
        readable, writable, _ = select.select([receiver], [sender], (), left_s)
        if writable:
            sender.send(_BLOCK)
        if readable:
            # On TCP the flag has the kernel drop the bytes instead of copying them.
            received += receiver.recv_into(unread, 0, socket.MSG_TRUNC)
    return received


def _segment_bytes(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
