"""One TUN device per namespace: opened from outside by visiting the namespace. Needs CAP_NET_ADMIN there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TUN_PATH = Path("/dev/net/tun")
DEVICE = "wan"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Put the calling thread into a network namespace; sockets and devices opened there stay there. Raises OSError."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(other)
        finally:
            os.close(other)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def open_tun(namespace: Path) -> int:
    """Make the device in that namespace: a non-blocking descriptor, one packet per read or write.

    The device is gone when the descriptor is closed, also by the death of the process.
    """
    with inside(namespace):
        descriptor = os.open(TUN_PATH, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def set_super_packets(descriptor: int, allowed: bool) -> None:
    """Whether the kernel may hand over TCP super-packets: much less work, but each is dropped or kept as a whole."""
    offloads = _TUN_F_CSUM | (_TUN_F_TSO4 | _TUN_F_TSO6 if allowed else 0)
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, offloads)
