"""The paper's residual codec (SR): how an expert differs from the mean of its layer's experts, largest parts only."""

from __future__ import annotations

from functools import partial

import torch

from hybridep_rt.codecs.coders import SparseCoder
from hybridep_rt.codecs.flat import Flat, check_elements, is_flat
from hybridep_rt.codecs.frames import HEADER_BYTES, FramePool, Kind, check_size, expect, octets, read_header
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes

_FORM = 1


class SharedResidual:
    """One stream of one tensor: the largest entries of its difference to a shared tensor that both ends hold.

    Both call `set_shared` before their first payload, and again whenever the shared tensor was refreshed.
    """

    NAME = "sr"

    def __init__(self, fraction: float) -> None:
        self.name = self.NAME
        self._coder = SparseCoder(fraction)
        self._frames = FramePool()
        self._input = Flat()
        self._shared: torch.Tensor | None = None
        self._version = 0

    def set_shared(self, shared: torch.Tensor, version: int) -> None:
        """The tensor that experts are told apart from; payloads of another version are refused."""
        self._shared = Flat().of(shared)
        self._version = version

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """The most a payload can be."""
        return HEADER_BYTES + self._coder.body_bytes(elements)

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """Size of the payload that begins here, from its first bytes. Raises CodecError as `Delta.frame_bytes`."""
        expect(read_header(payload), Kind.SPARSE, _FORM)
        return HEADER_BYTES + self._coder.measure(memoryview(payload)[HEADER_BYTES:], elements)

    def encode(self, values: torch.Tensor) -> Bytes:
        """The residual's largest entries."""
        flat = self._input.of(values)
        new_frame = partial(self._frames.new_frame, Kind.SPARSE, _FORM, self._version)
        frame, *_ = self._coder.pick(flat, self._base(len(flat)), feedback=False, new_frame=new_frame)
        return frame.data

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Overwrite `into` with the shared tensor plus the residual. Raises CodecError, then unchanged."""
        header = read_header(payload)
        expect(header, Kind.SPARSE, _FORM)
        check_size(memoryview(payload).nbytes, self.frame_bytes(payload, into.numel(), into.dtype))
        base = self._base(into.numel())
        if header.number != self._version & 0xFFFFFFFF:
            raise CodecError(f"a residual to shared weights {header.number}, where this end holds {self._version}")
        body = octets(payload)[HEADER_BYTES:]
        self._coder.split(body, into.numel())
        flat = into.detach().view(-1) if is_flat(into) else torch.empty_like(base)
        flat.copy_(base)
        self._coder.decode(body, flat, None, 0, add=True)
        if not is_flat(into):
            into.copy_(flat.view(into.shape))

    def _base(self, elements: int) -> torch.Tensor:
        if self._shared is None:
            raise CodecError(f"{self.name} without shared weights: call set_shared first")
        check_elements(elements, len(self._shared))
        return self._shared
