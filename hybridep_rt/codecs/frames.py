"""The eight bytes that begin every payload but those of `exact`, `fp32` and `bf16`. FORMAT.md has all bytes."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np

from hybridep_rt.codecs.reference import Octets, Words
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes

VERSION = 1
HEADER_BYTES = 8
_HEADER = struct.Struct("<BBHI")


class Kind(IntEnum):
    """What follows a header."""

    KEY = 1
    LEVELS = 2
    SPARSE = 3
    SCALED = 4
    PACKED = 5
    PACKED_LEVELS = 6
    PACED = 7


class Header(NamedTuple):
    """`form` is the codec's own check that both ends are set alike; `number` counts a stream's steps."""

    kind: Kind
    form: int
    number: int


NewFrame: TypeAlias = Callable[[int], Octets]
"""Gives a payload with its header written, for a body of so many bytes that is still to be filled."""


def new_frame(kind: Kind, form: int, number: int, body_bytes: int) -> Octets:
    """A payload with its header written and its body still to fill."""
    return _headed(np.empty(HEADER_BYTES + body_bytes, np.uint8), kind, form, number)


class FramePool:
    """Memory of a stream's payloads, used again once nobody holds the payload that was in it.

    The system takes tens of MB back when they are freed, and clearing them anew takes longer than coding.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[Octets, weakref.ref[Octets]]] = []

    def new_frame(self, kind: Kind, form: int, number: int, body_bytes: int) -> Octets:
        """As the function of that name. A payload's slices have to be taken from its memoryview."""
        size = HEADER_BYTES + body_bytes
        free = [buffer for buffer, frame in self._lent if frame() is None]
        buffer = next((buffer for buffer in free if len(buffer) >= size), None)
        if buffer is None:
            # Where sizes vary, the next may be a little larger still.
            buffer = np.empty(size + (size // 32 if free else 0), np.uint8)
        frame = buffer[:size]
        self._lent = [(kept, held) for kept, held in self._lent if kept is not buffer and held() is not None]
        self._lent.append((buffer, weakref.ref(frame)))
        return _headed(frame, kind, form, number)


def _headed(frame: Octets, kind: Kind, form: int, number: int) -> Octets:
    _HEADER.pack_into(frame.data, 0, VERSION, kind, form, number & 0xFFFFFFFF)
    return frame


def read_header(payload: Bytes) -> Header:
    """Raises CodecError for a payload that is too short, of another version or of an unknown kind."""
    if memoryview(payload).nbytes < HEADER_BYTES:
        raise CodecError(f"{memoryview(payload).nbytes} bytes where a header needs {HEADER_BYTES}")
    version, kind, form, number = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise CodecError(f"a payload of version {version}, where this program knows {VERSION}")
    if kind not in set(Kind):
        raise CodecError(f"a payload of unknown kind {kind}")
    return Header(Kind(kind), form, number)


def expect(header: Header, kind: Kind, form: int) -> None:
    """Raises CodecError unless the payload comes from a codec of the same kind and settings."""
    if (header.kind, header.form) != (kind, form):
        raise CodecError(
            f"a payload of kind {header.kind.name} and form {header.form}, where {kind.name} and {form} were expected"
        )


def octets(payload: Bytes) -> Octets:
    """A payload's bytes as a writable array: over its memory if that can be written, else over a copy."""
    array = np.frombuffer(payload, np.uint8)
    return array if array.flags.writeable else array.copy()


def words(part: Octets) -> Words:
    """Little-endian 16-bit words, copied so that they are aligned."""
    return part.copy().view(np.uint16)


def check_size(found: int, expected: int) -> None:
    """Raises CodecError that names both sizes."""
    if found != expected:
        raise CodecError(f"{found} bytes where {expected} were expected")
