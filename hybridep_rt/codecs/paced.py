"""Gradients in three levels by strides alone: no scales, and as many values sent as was asked for."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch

from hybridep_rt.codecs import huffman
from hybridep_rt.codecs.coders import engine
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, NewFrame, check_size
from hybridep_rt.codecs.levels import CHUNK, EVEN_EVERY, STRIDE_RANGE, TINY, TRIT_BYTES, pace
from hybridep_rt.codecs.reference import Floats, Octets, sample, threshold_of
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError

_HEAD = struct.Struct("<If")
_SAMPLE = 4096
_TOO_FEW = 1 / 16
"""Part of what should be sent: strides are so far off only at a stream's start, or where gradients jump."""


@dataclass(frozen=True)
class PacedCoder:
    """Sends the sign of about a part `sent` of the values, which of them by a stride of each: see `levels.Pace`.

    A factor on all strides goes ahead of the codes: 1, but where strides are far off. It is negative for a gradient
    that isn't finite. Every so often strides are kept within bounds of the largest.
    """

    sent: float

    kind = Kind.PACED

    @property
    def form(self) -> int:
        """The part that is sent, in 65536ths."""
        return round(self.sent * 65536)

    def body_bytes(self, elements: int) -> int:
        """The most."""
        return _HEAD.size + huffman.most(_code_bytes(elements))

    def expected_bytes(self, elements: int) -> float:
        """The mean: strides see to it that a part `sent` is."""
        return _HEAD.size + huffman.expected(_code_bytes(elements), self.sent)

    def measure(self, body: memoryview, elements: int) -> int:
        """From the size that a body begins with."""
        if body.nbytes < _HEAD.size:
            raise CodecError(f"{body.nbytes} bytes where a size and a factor need {_HEAD.size}")
        packed, _ = _HEAD.unpack_from(body)
        huffman.check_packed(packed, _code_bytes(elements))
        return int(_HEAD.size + packed)

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
        """See `Coder`; `velocity` are the strides."""
        assert velocity is not None
        assert feedback
        factor = self._factor(values, state, velocity)
        _multiply(velocity, factor)
        codes = huffman.scratch(_code_bytes(len(values)))
        if not engine(values).encode_paced(values, state, velocity, pace(self.sent), codes):
            factor = -factor
            state.zero_()
        _bound(velocity, step)
        packed = huffman.pack(codes)
        size = _HEAD.size + len(packed)
        frame = new_frame(size)
        body = frame[HEADER_BYTES : HEADER_BYTES + size]
        _HEAD.pack_into(body.data, 0, len(packed), factor)
        body[_HEAD.size :] = np.frombuffer(packed, np.uint8)
        return frame

    def decode(self, body: Octets, state: torch.Tensor, velocity: torch.Tensor | None, step: int, add: bool) -> None:
        """See `Coder`; `velocity` are the strides."""
        assert velocity is not None
        assert not add
        check_size(len(body), self.measure(body.data, len(state)))
        _, factor = _HEAD.unpack_from(body.data)
        if not TINY <= abs(factor) <= 1 / TINY:
            raise CodecError(f"strides can't be multiplied by {abs(factor):g}")
        codes = huffman.unpack(body[_HEAD.size :], _code_bytes(len(state)))
        _multiply(velocity, abs(factor))
        engine(state).decode_paced(codes, state, velocity, pace(self.sent))
        _bound(velocity, step)
        if factor < 0:
            state.fill_(math.nan)

    def _factor(self, values: torch.Tensor, owed: torch.Tensor, strides: torch.Tensor) -> float:
        """1 where about as many values of a sample reach their strides as should, else what makes it right."""
        index = torch.from_numpy(sample(len(values), _SAMPLE)).to(values.device)
        ratios = ((values[index] + owed[index]).abs() / strides[index]).cpu().numpy()
        reached = int(np.count_nonzero(ratios >= 1))
        if _TOO_FEW * self.sent * len(ratios) <= reached <= len(ratios) / 2:
            return 1.0
        factor = _wanted(ratios, self.sent)
        return factor if TINY <= factor <= 1 / TINY else 1.0


def _wanted(ratios: Floats, sent: float) -> float:
    """What a part `sent` reaches; the largest of all where so many are zero."""
    wanted = float(threshold_of(ratios, sent))
    return wanted if wanted > TINY else float(ratios.max(initial=0))


def _code_bytes(elements: int) -> int:
    return -(-elements // CHUNK) * TRIT_BYTES


def _multiply(strides: torch.Tensor, factor: float) -> None:
    if factor != 1:
        strides.mul_(factor).clamp_(TINY, 1 / TINY)


def _bound(strides: torch.Tensor, number: int) -> None:
    """The largest of numbers is the same in any order."""
    if number % EVEN_EVERY == 0 and len(strides):
        strides.clamp_(max(float(strides.max()) / STRIDE_RANGE, TINY), 1 / TINY)
