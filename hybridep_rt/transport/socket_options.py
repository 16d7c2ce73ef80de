"""What is set on the sockets of links."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from hybridep_rt.errors import ConfigError

UNSENT_BYTES = 512 << 10
"""Most bytes in the kernel that are not on the wire yet, and most bytes queued in the event loop before it pauses."""

CONGESTION = "bbr"
"""TCP congestion control between DCs: on lossy long paths others collapse."""

_TCP = (socket.AF_INET, socket.AF_INET6)


def limit_unsent(transport: asyncio.Transport, nbytes: int) -> None:
    """Bound what waits in the event loop (and in TLS), and in TCP's unsent part, and so can't be overtaken any more."""
    transport.set_write_buffer_limits(high=nbytes)
    sock = transport.get_extra_info("socket")
    if sock.family in _TCP:
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)


def check_congestion(name: str) -> None:
    """Raise ConfigError unless a congestion control that somebody asked for can be had."""
    if name:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except (OSError, AttributeError):
                allowed = "see sysctl net.ipv4.tcp_allowed_congestion_control"
                raise ConfigError(f"TCP congestion control {name!r} can't be used here; {allowed}") from None


def tune(sock: socket.socket, congestion: str = "") -> None:
    """TCP only: send small frames at once, and use that congestion control where the system has and allows it."""
    if sock.family in _TCP:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, (congestion or CONGESTION).encode())
