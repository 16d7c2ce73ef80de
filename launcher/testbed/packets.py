"""What the relay reads from a packet: where it goes and how many IP bytes it is on the link. Pure functions.

A packet from a TUN device with IFF_VNET_HDR is a 10-byte virtio_net_hdr, then an IP packet. With offloads on, that
packet may be a TCP super-packet of up to 64 KiB that stands for many segments; on a link each has its own headers.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

VNET_HEADER_BYTES = 10
PACKET_BYTES_MAX = VNET_HEADER_BYTES + (1 << 16)
_GSO_NONE = 0
_TCP = 6
# virtio_net_hdr (flags, gso_type, hdr_len, gso_size, csum_start, csum_offset), then the IPv4 header.
_HEADERS = struct.Struct("=xB2xH4x B8xB6x4s")
_IPV4_BYTES_MIN = 20
_TCP_OFFSET_AT = 12


class Packet(NamedTuple):
    """`target` is the IPv4 destination address, `size_bytes` all IP bytes of all segments."""

    target: bytes
    size_bytes: int


def parse(data: bytes) -> Packet | None:
    """Read one packet; None for what the relay doesn't carry: anything but whole IPv4."""
    if len(data) < VNET_HEADER_BYTES + _IPV4_BYTES_MIN:
        return None
    gso_type, gso_bytes, version_and_words, protocol, target = _HEADERS.unpack_from(data)
    if version_and_words >> 4 != 4:
        return None
    size = len(data) - VNET_HEADER_BYTES
    if gso_type == _GSO_NONE or gso_bytes == 0 or protocol != _TCP:
        return Packet(target, size)
    return _segments(data, target, size, (version_and_words & 15) * 4, gso_bytes)


def _segments(data: bytes, target: bytes, size: int, ip_bytes: int, gso_bytes: int) -> Packet | None:
    """The size of a TCP super-packet once it is cut into segments of `gso_bytes` payload."""
    offset_at = VNET_HEADER_BYTES + ip_bytes + _TCP_OFFSET_AT
    if offset_at >= len(data):
        return None
    headers = ip_bytes + (data[offset_at] >> 4) * 4
    segments = max(1, -(-(size - headers) // gso_bytes))
    return Packet(target, size + (segments - 1) * headers)
