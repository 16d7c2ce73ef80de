"""Levels in fewer bytes without loss: most of three levels with a wide dead zone are zero, and Huffman's code tells.

Of what zstd does only that matters here, as codes never repeat: bytes that stand for five values get codes of 1 to 11
bits. A wider dead zone and fewer bits leave a smaller error than a narrow one at as many bytes (entropy-constrained
quantisation).
"""

from __future__ import annotations

import heapq
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import zstandard

from hybridep_rt.codecs.coders import LevelCoder
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, NewFrame, check_size
from hybridep_rt.codecs.levels import CHUNK, TRIT_BYTES, TRITS
from hybridep_rt.codecs.reference import Octets
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError

_SIZE = struct.Struct("<I")
_LONGEST_BITS = 11
_ADDED = 1.02
"""What is added to Huffman's code of normal values: 1 % by zstd, 1 % as values aren't quite normal."""

Made = TypeVar("Made")
_of_thread = threading.local()


@dataclass(frozen=True)
class PackedLevels:
    """What an inner coder of levels writes, its codes as one zstd frame."""

    inner: LevelCoder

    kind = Kind.PACKED_LEVELS

    @property
    def form(self) -> int:
        """The inner coder's."""
        return self.inner.form

    def body_bytes(self, elements: int) -> int:
        """The most: zstd adds up to a 256th and a few bytes to what it can't make smaller."""
        scales, codes = self.inner.parts(elements)
        return _SIZE.size + scales + _most(codes)

    def expected_bytes(self, elements: int) -> float:
        """What a body takes where values are normal, five zeros or not in a byte."""
        scales, codes = self.inner.parts(elements)
        return _SIZE.size + scales + codes * _mean_bits(self.inner.code.dead) / 8 * _ADDED

    def measure(self, body: memoryview, elements: int) -> int:
        """From the size that a body begins with."""
        if body.nbytes < _SIZE.size:
            raise CodecError(f"{body.nbytes} bytes where a size needs {_SIZE.size}")
        (packed,) = _SIZE.unpack_from(body)
        scales, codes = self.inner.parts(elements)
        if packed > _most(codes):
            raise CodecError(f"{packed} bytes of codes, where those of {elements} values take at most {_most(codes)}")
        return int(_SIZE.size + scales + packed)

    def encode(
        self,
        values: torch.Tensor,
        state: torch.Tensor,
        velocity: torch.Tensor | None,
        step: int,
        feedback: bool,
        new_frame: NewFrame,
        update: Update | None = None,
    ) -> Octets:
        """See `Coder`."""
        plain = self.inner.encode(values, state, velocity, step, feedback, _unheaded, update)[HEADER_BYTES:]
        scales, _ = self.inner.parts(len(values))
        packed = _mine(_compressor).compress(plain[scales:].data)
        size = _SIZE.size + scales + len(packed)
        frame = new_frame(size)
        body = frame[HEADER_BYTES : HEADER_BYTES + size]
        _SIZE.pack_into(body.data, 0, len(packed))
        body[_SIZE.size : _SIZE.size + scales] = plain[:scales]
        body[_SIZE.size + scales :] = np.frombuffer(packed, np.uint8)
        return frame

    def decode(self, body: Octets, state: torch.Tensor, velocity: torch.Tensor | None, step: int, add: bool) -> None:
        """See `Coder`. No more memory is taken than the inner coder's body has, whatever the frame says."""
        check_size(len(body), self.measure(body.data, len(state)))
        scales, codes = self.inner.parts(len(state))
        packed = body[_SIZE.size + scales :].data
        try:
            check_size(zstandard.frame_content_size(packed), codes)
            plain = _mine(zstandard.ZstdDecompressor).decompress(packed, max_output_size=codes)
        except zstandard.ZstdError as error:
            raise CodecError(f"packed levels that can't be unpacked: {error}") from None
        check_size(len(plain), codes)
        whole = _scratch(scales + codes)
        whole[:scales] = body[_SIZE.size : _SIZE.size + scales]
        whole[scales:] = np.frombuffer(plain, np.uint8)
        self.inner.decode(whole, state, velocity, step, add)


def _unheaded(body_bytes: int) -> Octets:
    """A frame for a body that is not sent as it is."""
    return _scratch(HEADER_BYTES + body_bytes)


def _scratch(size: int) -> Octets:
    """This thread's, until it asks again."""
    if len(getattr(_of_thread, "scratch", b"")) < size:
        _of_thread.scratch = np.empty(size, np.uint8)
    found: Octets = _of_thread.scratch[:size]
    return found


def _most(codes: int) -> int:
    return codes + (codes >> 8) + 128


def _compressor() -> zstandard.ZstdCompressor:
    """One that hardly looks for matches: the few that it finds cost more than they save."""
    chosen = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, chain_log=6, search_log=1
    )
    return zstandard.ZstdCompressor(compression_params=chosen)


def _mine(make: Callable[[], Made]) -> Made:
    """This thread's: no two threads may use one at a time."""
    made = _of_thread.__dict__
    if make.__name__ not in made:
        made[make.__name__] = make()
    found: Made = made[make.__name__]
    return found


def _mean_bits(dead: float) -> float:
    """Of a byte of five normal values in three levels, in Huffman's code."""
    reached = math.erfc(dead / math.sqrt(2))
    signed = {0: 1 - reached, 1: reached / 2, 2: reached / 2}
    likely = [math.prod(signed[byte // 3**k % 3] for k in range(TRITS)) for byte in range(3**TRITS)]
    # As its code isn't longer, zstd treats what is rarer than this as if it were as frequent.
    heap = [(max(each, 2.0**-_LONGEST_BITS), each) for each in likely]
    heapq.heapify(heap)
    bits = 0.0
    while len(heap) > 1:
        (low, real), (high, other) = heapq.heappop(heap), heapq.heappop(heap)
        bits += real + other
        heapq.heappush(heap, (low + high, real + other))
    # The last bytes of a chunk stand for one value less.
    return bits * CHUNK / (TRITS * TRIT_BYTES)
