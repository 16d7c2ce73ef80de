"""What travels between two workers, and how urgent it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.position import Position

Bytes: TypeAlias = bytes | bytearray | memoryview

Payload: TypeAlias = Sequence[Bytes]
"""Buffers that are sent one after the other and arrive as one contiguous buffer."""


class Traffic(IntEnum):
    """Classes of traffic on a link, most urgent first: compute waits for tokens, then for the next layer's experts."""

    CONTROL = 0
    TOKENS = 1
    EXPERTS = 2
    GRADIENTS = 3
    USER = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One message as its receiver sees it. `payload` is writable and belongs to the receiver."""

    source: Address
    to: Address
    channel: str
    position: Position
    payload: memoryview
    counts: tuple[int, ...] = field(default=())
    """Small integers that describe the payload (rows, pairs, widths): they travel in the header."""
