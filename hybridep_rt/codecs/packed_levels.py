"""Levels in fewer bytes without loss: most of three levels with a wide dead zone are zero, and Huffman's code tells.

Of what zstd does only that matters here, as what repeats is too short to pay: bytes that stand for five values get
codes of 1 to 11 bits. A wider dead zone and fewer bits leave a smaller error than a narrow one at as many bytes
(entropy-constrained quantisation).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch
import zstandard

from hybridep_rt.codecs.coders import LevelCoder
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, NewFrame, check_size
from hybridep_rt.codecs.reference import Octets, pack_trits
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError

_SIZE = struct.Struct("<I")
_SAMPLE = 1 << 18
_ADDED = 1.02
"""What is added to packed normal values, as gradients and steps of weights aren't quite normal."""

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
        """What a body takes, by what packing leaves of a sample of normal values."""
        scales, codes = self.inner.parts(elements)
        return _SIZE.size + scales + codes * _packed_share(self.inner.code.dead) * _ADDED

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


@cache
def _packed_share(dead: float) -> float:
    """Of the codes of normal values in three levels: what packing leaves of them."""
    values = np.random.default_rng(0).standard_normal(_SAMPLE)
    codes = (np.abs(values) >= dead) + 2 * (values < 0)
    plain = pack_trits(codes.astype(np.uint8))
    return len(_mine(_compressor).compress(plain.data)) / len(plain)
