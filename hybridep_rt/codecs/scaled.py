"""Every value as 8 bits times a scale that some neighbours share: a token's row, or a block of weights or gradients."""

from __future__ import annotations

import numpy as np
import torch

from hybridep_rt.codecs.coders import engine
from hybridep_rt.codecs.flat import Flat, is_flat
from hybridep_rt.codecs.frames import HEADER_BYTES, FramePool, Kind, check_size, expect, octets, read_header, words
from hybridep_rt.codecs.reference import Coded, Octets
from hybridep_rt.protocol.messages import Bytes


class Scaled:
    """int8, or fp8 with 4 bits of exponent and 3 of mantissa. `block` values share a scale. Nothing is remembered."""

    def __init__(self, name: str, block: int, *, fp8: bool) -> None:
        self.name = name
        self._block = block
        self._fp8 = fp8
        self._frames = FramePool()
        self._input = Flat()
        self._output = Flat()

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """A header, 2 bytes for each block begun, 1 for each value."""
        return HEADER_BYTES + 2 * -(-elements // self._block) + elements

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """The size is known beforehand. Raises CodecError where the payload is of another codec."""
        expect(read_header(payload), Kind.SCALED, int(self._fp8))
        return self.wire_bytes(elements, dtype)

    def encode(self, values: torch.Tensor) -> Bytes:
        """The values, each rounded to the nearest multiple of its block's scale that 8 bits can tell."""
        flat = self._input.of(values)
        frame = self._frames.new_frame(
            Kind.SCALED, int(self._fp8), self._block, self.wire_bytes(len(flat), flat.dtype) - HEADER_BYTES
        )
        engine(flat).encode_scaled(flat, self._block, self._fp8, self._split(frame, len(flat), copy=False))
        return frame.data

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Overwrite `into`. Raises CodecError where size, kind or block differ."""
        header = read_header(payload)
        expect(header, Kind.SCALED, int(self._fp8))
        check_size(header.number, self._block)
        frame = octets(payload)
        check_size(len(frame), self.wire_bytes(into.numel(), into.dtype))
        flat = into.detach().view(-1) if is_flat(into) else self._output.of(into)
        engine(flat).decode_scaled(self._split(frame, len(flat), copy=True), self._block, self._fp8, flat)
        if not is_flat(into):
            into.copy_(flat.view(into.shape))

    def _split(self, frame: Octets, elements: int, *, copy: bool) -> Coded:
        end = HEADER_BYTES + 2 * -(-elements // self._block)
        scales = frame[HEADER_BYTES:end]
        return Coded(words(scales) if copy else scales.view(np.uint16), frame[end:])
