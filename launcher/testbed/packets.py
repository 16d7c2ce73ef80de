"""What the relay reads from a packet: where it goes, how many IP bytes it is on the link; and how to lose a part of it.

A packet from a TUN device with IFF_VNET_HDR is a 10-byte virtio_net_hdr, then an IP packet. With offloads on, that
packet may be a TCP super-packet of up to 64 KiB that stands for many segments; on a link each has its own headers, and
each may be lost. Pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

VNET_HEADER_BYTES = 10
PACKET_BYTES_MAX = VNET_HEADER_BYTES + (1 << 16)
# virtio_net_hdr (flags, gso_type, hdr_len, gso_size, csum_start, csum_offset), then the start of an IPv4 header.
_HEADERS = struct.Struct("=BB2xH4x B8xB6x4s")
_GSO_TYPE_AT, _GSO_SIZE_AT = 1, 4
_NEEDS_CHECKSUM = 1
_IPV4_BYTES_MIN = 20
_TCP = 6
_TCP_BYTES_MIN = 20
_TCP_SEQUENCE_AT, _TCP_OFFSET_AT, _TCP_FLAGS_AT, _TCP_CHECKSUM_AT = 4, 12, 13, 16
_FIN_AND_PUSH, _WINDOW_REDUCED = 0x09, 0x80


class Packet(NamedTuple):
    """`target` is the IPv4 destination address, `size_bytes` all IP bytes of all `segments`."""

    target: bytes
    size_bytes: int
    segments: int


def parse(data: bytes) -> Packet | None:
    """Read one packet; None for what the relay doesn't carry: anything but whole IPv4."""
    if len(data) < VNET_HEADER_BYTES + _IPV4_BYTES_MIN:
        return None
    flags, gso_type, gso_bytes, version_and_words, protocol, target = _HEADERS.unpack_from(data)
    if version_and_words >> 4 != 4:
        return None
    size = len(data) - VNET_HEADER_BYTES
    if not (gso_type and gso_bytes and protocol == _TCP and flags & _NEEDS_CHECKSUM):
        return Packet(target, size, 1)
    ip_bytes, headers = _header_bytes(data)
    if ip_bytes < _IPV4_BYTES_MIN or headers - ip_bytes < _TCP_BYTES_MIN or headers > size:
        return None
    segments = max(1, -(-(size - headers) // gso_bytes))
    return Packet(target, size + (segments - 1) * headers, segments)


def without(data: bytes, segments: int, lost: Collection[int]) -> list[bytes]:
    """A packet that `parse` took for so many segments, less those lost (by number): the runs between them."""
    edges = [-1, *sorted(lost), segments]
    runs = [(before + 1, after) for before, after in pairwise(edges) if after > before + 1]
    return [_run(data, first, end, is_last=end == segments) for first, end in runs]


def _header_bytes(data: bytes) -> tuple[int, int]:
    """Bytes of the IP header, and of it and the TCP header together (0 where the packet is too short to say)."""
    ip_bytes = (data[VNET_HEADER_BYTES] & 15) * 4
    offset_at = VNET_HEADER_BYTES + ip_bytes + _TCP_OFFSET_AT
    return ip_bytes, ip_bytes + (data[offset_at] >> 4) * 4 if offset_at < len(data) else 0


def _run(data: bytes, first: int, end: int, *, is_last: bool) -> bytes:
    """Segments `first` to before `end` of a super-packet, as a super-packet or single packet of its own."""
    ip_bytes, headers = _header_bytes(data)
    (gso_bytes,) = struct.unpack_from("=H", data, _GSO_SIZE_AT)
    body_at = VNET_HEADER_BYTES + headers
    body = data[body_at + first * gso_bytes : len(data) if is_last else body_at + end * gso_bytes]
    vnet, ip = bytearray(data[:VNET_HEADER_BYTES]), bytearray(data[VNET_HEADER_BYTES : VNET_HEADER_BYTES + ip_bytes])
    tcp = bytearray(data[VNET_HEADER_BYTES + ip_bytes : body_at])
    if end - first == 1:
        vnet[_GSO_TYPE_AT] = 0
        struct.pack_into("=H", vnet, _GSO_SIZE_AT, 0)
    _renew_ip(ip, first, len(tcp) + len(body))
    _renew_tcp(tcp, ip, first * gso_bytes, len(body), is_last=is_last)
    return bytes(vnet + ip + tcp) + body


def _renew_ip(ip: bytearray, first: int, content_bytes: int) -> None:
    (identity,) = struct.unpack_from("!H", ip, 4)
    struct.pack_into("!HH", ip, 2, len(ip) + content_bytes, (identity + first) & 0xFFFF)
    struct.pack_into("!H", ip, 10, 0)
    struct.pack_into("!H", ip, 10, _ones_sum(ip) ^ 0xFFFF)


def _renew_tcp(tcp: bytearray, ip: bytearray, skipped_bytes: int, body_bytes: int, *, is_last: bool) -> None:
    (sequence,) = struct.unpack_from("!I", tcp, _TCP_SEQUENCE_AT)
    struct.pack_into("!I", tcp, _TCP_SEQUENCE_AT, (sequence + skipped_bytes) & 0xFFFFFFFF)
    tcp[_TCP_FLAGS_AT] &= 0xFF if is_last else ~_FIN_AND_PUSH & 0xFF
    tcp[_TCP_FLAGS_AT] &= ~_WINDOW_REDUCED & 0xFF if skipped_bytes else 0xFF
    # The kernel adds the rest to the checksum: only the pseudo-header is in it yet.
    pseudo = bytes(ip[12:20]) + struct.pack("!HH", _TCP, len(tcp) + body_bytes)
    struct.pack_into("!H", tcp, _TCP_CHECKSUM_AT, _ones_sum(pseudo))


def _ones_sum(data: bytes | bytearray) -> int:
    """Ones' complement sum of 16-bit words, as Internet checksums use it."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)
