"""Codes in fewer bytes without loss: where most of them are zero, Huffman's code of a zstd frame tells.

Of what zstd does only that matters here, as what repeats is too short to pay: bytes that stand for five values get
codes of 1 to 11 bits. Fewer values that are sent, each less exact, leave a smaller error than all of them at as many
bytes (entropy-constrained quantisation).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import zstandard

from hybridep_rt.codecs.frames import check_size
from hybridep_rt.codecs.reference import Octets, pack_trits
from hybridep_rt.errors import CodecError

_SAMPLE = 1 << 18
_TABLE = 85
"""About what zstd takes to say which byte has which code; little of a large tensor."""

Made = TypeVar("Made")
_of_thread = threading.local()
_NOTHING = np.empty(0, np.uint8)


def most(codes: int) -> int:
    """Bytes that so many bytes of codes take at most: zstd adds up to a 256th to what it can't make smaller."""
    return codes + (codes >> 8) + 128


def check_packed(packed: int, codes: int) -> None:
    """Raises CodecError for a frame of more bytes than that many bytes of codes can take."""
    if packed > most(codes):
        raise CodecError(f"{packed} bytes of packed codes, where {codes} bytes of them take at most {most(codes)}")


def pack(codes: Octets) -> bytes:
    """One zstd frame."""
    return _mine(_compressor).compress(codes.data)


def unpack(packed: Octets, size: int) -> Octets:
    """The `size` bytes of codes that a frame holds; no more memory is taken, whatever it says. Raises CodecError."""
    try:
        check_size(zstandard.frame_content_size(packed.data), size)
        plain = _mine(zstandard.ZstdDecompressor).decompress(packed.data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CodecError(f"packed levels that can't be unpacked: {error}") from None
    check_size(len(plain), size)
    return np.frombuffer(plain, np.uint8)


def scratch(size: int) -> Octets:
    """Memory of this thread's, until it asks again."""
    held: Octets = getattr(_of_thread, "scratch", _NOTHING)
    if len(held) < size:
        held = _of_thread.scratch = np.empty(size, np.uint8)
    return held[:size]


def expected(codes: int, sent: float) -> float:
    """Bytes that packing leaves of so many, of three levels of which a part `sent`, here and there, isn't zero."""
    return codes * _share(sent) + _TABLE


@cache
def _share(sent: float) -> float:
    chance = np.random.default_rng(0).random(_SAMPLE)
    plain = pack_trits(np.where(chance < sent / 2, 1, np.where(chance < sent, 3, 0)).astype(np.uint8))
    return len(pack(plain)) / len(plain)


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
