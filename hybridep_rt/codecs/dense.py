"""Codecs that keep every element: the tensor's own dtype, or a cast to a shorter one."""

from __future__ import annotations

import torch

from hybridep_rt.codecs.buffers import as_bytes, as_tensor
from hybridep_rt.protocol.messages import Bytes


class Exact:
    """The tensor's own bits, whatever its dtype: lossless."""

    name = "exact"

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """`elements` times the dtype's size."""
        return elements * dtype.itemsize

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """As `wire_bytes`: these payloads have no header."""
        return self.wire_bytes(elements, dtype)

    def encode(self, values: torch.Tensor) -> Bytes:
        """The tensor's memory, without a copy where it is contiguous on the CPU."""
        return as_bytes(values)

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Copy the payload's values into `into`."""
        into.copy_(as_tensor(payload, into.dtype, into.shape))


class Cast:
    """Every element rounded to a shorter floating-point dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """`elements` times the size of the wire's dtype; the tensor's own does not matter."""
        return elements * self._dtype.itemsize

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """As `wire_bytes`: these payloads have no header."""
        return self.wire_bytes(elements, dtype)

    def encode(self, values: torch.Tensor) -> Bytes:
        """The values rounded to nearest even in the wire's dtype."""
        return as_bytes(values.to(self._dtype))

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Copy the payload's values into `into`, converted to its dtype."""
        into.copy_(as_tensor(payload, self._dtype, into.shape))
