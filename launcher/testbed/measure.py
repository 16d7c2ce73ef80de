"""Measure a directed pair of DCs with real sockets in their namespaces. A thin shell."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from statistics import median
from time import perf_counter

from launcher.testbed import tun
from launcher.testbed.bed import Testbed
from launcher.testbed.priority import ahead_of_others
from launcher.testbed.verdict import Expected, Measured
from topology.errors import HybridEPError

_PORT = 5201
_CONNECT_S = 20.0
_BLOCK = memoryview(bytes(1 << 20))
_PINGS_S = 2.0
_SO_MAX_PACING_RATE = 47
_PACE = 1.05
_QUEUE_SHARE = 0.75


def measure(bed: Testbed, expected: Expected, seconds: float) -> Measured:
    """Round trips on an idle link, then goodput over so many seconds. Raises HybridEPError if the link is dead."""
    try:
        with ahead_of_others(), _connection(bed, expected) as (sender, receiver):
            rtt_s = _round_trip_s(sender, receiver, expected.rtt_s)
            flow = _Flow(sender, receiver, expected)
            flow.run(0.5 + 16 * expected.rtt_s)
            cpu_s, start = bed.relay_cpu_s(), perf_counter()
            received = flow.run(seconds)
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
            for end in (sender, server):
                end.settimeout(_CONNECT_S)
            _prepare(sender, expected)
            sender.connect(address)
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_CONNECT_S)
                for end in (sender, receiver):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield sender, receiver


def _prepare(sender: socket.socket, expected: Expected) -> None:
    """Have one connection fill the link."""
    if expected.loss:
        # BBR doesn't take every loss for congestion; without it the rate of a lossy link can't be reached.
        _choose(sender, "bbr")
        return
    # Reno doubles until it sees a loss, and will see none: see _Flow for the window; and bursts are stretched to little
    # more than the link's rate.
    _choose(sender, "reno")
    pace = struct.pack("Q", int(_PACE * expected.rate_bytes_per_s))
    sender.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)


def _choose(sender: socket.socket, congestion_control: str) -> None:
    try:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    except OSError as error:
        raise HybridEPError(f"this kernel's TCP lacks {congestion_control}: {error.strerror}") from None


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


class _Flow:
    """Bytes on their way. On a link without loss, no more than fill it and most of its queue: none are dropped."""

    def __init__(self, sender: socket.socket, receiver: socket.socket, expected: Expected) -> None:
        self._sender, self._receiver = sender, receiver
        self._under_way = 0
        way_bytes = expected.rate_bytes_per_s * expected.way_s
        self._most = inf if expected.loss else way_bytes + _QUEUE_SHARE * expected.queue_bytes
        self._unread = bytearray(len(_BLOCK))
        for end in (sender, receiver):
            end.setblocking(False)

    def run(self, seconds: float) -> int:
        """Send as fast as the link takes it for so long: bytes received."""
        received = 0
        end = perf_counter() + seconds
        while (left_s := end - perf_counter()) > 0:
            room = int(min(self._most - self._under_way, len(_BLOCK)))
            readable, writable, _ = select.select([self._receiver], [self._sender] if room > 0 else [], (), left_s)
            if writable:
                self._under_way += self._sender.send(_BLOCK[:room])
            if readable:
                # On TCP the flag has the kernel drop the bytes instead of copying them.
                count = self._receiver.recv_into(self._unread, 0, socket.MSG_TRUNC)
                received += count
                self._under_way -= count
        return received


def _segment_bytes(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
