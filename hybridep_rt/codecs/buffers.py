"""Tensors as byte buffers and back, on any device, with no copy that isn't needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes


def as_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order. Shares memory with a contiguous CPU tensor."""
    flat = values.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    raw = flat.view(torch.uint8)
    host = _staged(raw) if raw.is_cuda else raw
    return memoryview(host.numpy().data).cast("B")


def as_tensor(payload: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A CPU tensor over the payload's memory. Raises CodecError unless the payload has exactly that many bytes."""
    expected = math.prod(shape) * dtype.itemsize
    found = memoryview(payload).nbytes
    if found != expected:
        raise CodecError(f"{found} bytes where {tuple(shape)} values of {dtype} need {expected}")
    if expected == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    view = memoryview(payload).cast("B")
    writable = view if not view.readonly else memoryview(bytearray(view))
    return torch.frombuffer(writable, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def _staged(raw: torch.Tensor) -> torch.Tensor:
    """A GPU tensor's bytes in pinned host memory, which torch's allocator reuses from step to step."""
    host = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(raw, non_blocking=True)
    torch.cuda.current_stream(raw.device).synchronize()
    return host
