"""Packets as TUN devices hand them over: parsing, sizes on the link, and lost segments of super-packets."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.testbed.packets import VNET_HEADER_BYTES, Packet, parse, without

SOURCE, TARGET = socket.inet_aton("198.18.0.1"), socket.inet_aton("198.18.0.2")
TCP, UDP = 6, 17
FIN, PUSH, ACK, WINDOW_REDUCED = 1, 8, 16, 128


def ones_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def super_packet(body: bytes, gso_bytes: int, *, options: int = 12, flags: int = ACK, gso_type: int = 1) -> bytes:
    """A TCP super-packet as Linux hands it over: partial checksum, GSO fields set."""
    tcp_bytes = 20 + options
    vnet = struct.pack("=BBHHHH", 1, gso_type, 20 + tcp_bytes, gso_bytes, 20, 16)
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + tcp_bytes + len(body), 7, 0x4000, 64, TCP, 0))
    ip += SOURCE + TARGET
    struct.pack_into("!H", ip, 10, ones_sum(bytes(ip)) ^ 0xFFFF)
    pseudo = ones_sum(SOURCE + TARGET + struct.pack("!HH", TCP, tcp_bytes + len(body)))
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 0xFFFFFFF0, 5, tcp_bytes // 4 << 4, flags, 100, pseudo, 0) + bytes(options)
    return vnet + bytes(ip) + tcp + body


def plain_packet(protocol: int, body: bytes = b"x" * 100, first: int = 0x45) -> bytes:
    ip = struct.pack("!BBHHHBBH", first, 0, 20 + len(body), 7, 0, 64, protocol, 0) + SOURCE + TARGET
    return bytes(VNET_HEADER_BYTES) + ip + body


@pytest.mark.parametrize("protocol", [TCP, UDP, 1])
def test_a_single_packet_counts_its_ip_bytes(protocol: int) -> None:
    assert parse(plain_packet(protocol)) == Packet(TARGET, 120, 1)


@pytest.mark.parametrize(("body", "segments"), [(1, 1), (1448, 1), (1449, 2), (14480, 10), (14481, 11)])
def test_a_super_packet_counts_headers_for_each_segment(body: int, segments: int) -> None:
    assert parse(super_packet(bytes(body), 1448)) == Packet(TARGET, body + segments * 52, segments)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(VNET_HEADER_BYTES + 19),
        plain_packet(TCP, first=0x65),
        super_packet(b"", 1448)[:35],
        super_packet(bytes(100), 1448)[:45],
        super_packet(bytes(100), 1448)[: VNET_HEADER_BYTES + 51],
    ],
)
def test_what_is_no_whole_ipv4_packet_is_not_carried(data: bytes) -> None:
    assert parse(data) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_none(data: bytes) -> None:
    packet = parse(data)
    assert packet is None or packet.segments >= 1


def test_losing_the_middle_leaves_two_runs_with_right_headers() -> None:
    body = bytes(range(250)) * 2
    data = super_packet(body, 100, flags=ACK | PUSH | FIN | WINDOW_REDUCED)
    first, second = without(data, 5, [2])
    assert first.endswith(body[:200])
    assert second.endswith(body[300:])
    sequences = [struct.unpack_from("!I", piece, VNET_HEADER_BYTES + 24)[0] for piece in (first, second)]
    assert sequences == [0xFFFFFFF0, (0xFFFFFFF0 + 300) % 2**32]
    flags = [piece[VNET_HEADER_BYTES + 33] for piece in (first, second)]
    assert flags == [ACK | WINDOW_REDUCED, ACK | PUSH | FIN]


def test_a_run_of_one_segment_is_a_single_packet() -> None:
    first, second = without(super_packet(bytes(250), 100), 3, [1])
    for piece, size in ((first, 152), (second, 102)):
        assert piece[1] == 0
        assert struct.unpack_from("=H", piece, 4) == (0,)
        assert parse(piece) == Packet(TARGET, size, 1)


@given(st.integers(2, 30), st.integers(1, 100), st.data())
def test_pieces_are_sound_and_hold_exactly_what_was_not_lost(segments: int, last: int, data: st.DataObject) -> None:
    gso_bytes = 100
    body = bytes(number % 251 for number in range((segments - 1) * gso_bytes + last))
    lost = data.draw(st.sets(st.integers(0, segments - 1), max_size=segments - 1))
    pieces = without(super_packet(body, gso_bytes), segments, lost)
    assert b"".join(piece[VNET_HEADER_BYTES + 52 :] for piece in pieces) == b"".join(
        body[number * gso_bytes : (number + 1) * gso_bytes] for number in range(segments) if number not in lost
    )
    parsed = [parse(piece) for piece in pieces]
    assert sum(each.segments for each in parsed if each) == segments - len(lost)
    for piece in pieces:
        ip, tcp = piece[VNET_HEADER_BYTES:][:20], piece[VNET_HEADER_BYTES + 20 :]
        assert ones_sum(ip) == 0xFFFF
        assert struct.unpack_from("!H", ip, 2)[0] == len(piece) - VNET_HEADER_BYTES
        assert struct.unpack_from("!H", tcp, 16)[0] == ones_sum(ip[12:20] + struct.pack("!HH", TCP, len(tcp)))
