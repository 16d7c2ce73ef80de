"""Three levels of a wide dead zone in fewer bytes without loss: see `huffman`."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch

from hybridep_rt.codecs import huffman
from hybridep_rt.codecs.coders import LevelCoder
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, NewFrame, check_size
from hybridep_rt.codecs.reference import Octets
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError

_SIZE = struct.Struct("<I")
_ADDED = 1.04
"""What is added to packed normal values, as steps of weights aren't quite normal: 2 to 3 % more in training."""


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
        return _SIZE.size + scales + huffman.most(codes)

    def expected_bytes(self, elements: int) -> float:
        """What a body takes, by what packing leaves of a sample of normal values."""
        scales, codes = self.inner.parts(elements)
        sent = math.erfc(self.inner.code.dead / math.sqrt(2))
        return _SIZE.size + scales + huffman.expected(codes, sent) * _ADDED

    def measure(self, body: memoryview, elements: int) -> int:
        """From the size that a body begins with."""
        if body.nbytes < _SIZE.size:
            raise CodecError(f"{body.nbytes} bytes where a size needs {_SIZE.size}")
        (packed,) = _SIZE.unpack_from(body)
        scales, codes = self.inner.parts(elements)
        huffman.check_packed(packed, codes)
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
        packed = huffman.pack(plain[scales:])
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
        plain = huffman.unpack(body[_SIZE.size + scales :], codes)
        whole = huffman.scratch(scales + codes)
        whole[:scales] = body[_SIZE.size : _SIZE.size + scales]
        whole[scales:] = plain
        self.inner.decode(whole, state, velocity, step, add)


def _unheaded(body_bytes: int) -> Octets:
    """A frame for a body that is not sent as it is."""
    return huffman.scratch(HEADER_BYTES + body_bytes)
