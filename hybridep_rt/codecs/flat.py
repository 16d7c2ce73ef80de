"""Tensors of any shape and dtype as the flat float32 ones that the coders work on."""

from __future__ import annotations

import torch

from hybridep_rt.errors import CodecError


class Flat:
    """Flat float32 views, or a copy in memory that is kept from step to step where a tensor is of another dtype."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The values: over their own memory where that is contiguous float32."""
        values = values.detach()
        if values.dtype is torch.float32:
            return values.reshape(-1)
        if self._kept is None or self._kept.numel() != values.numel() or self._kept.device != values.device:
            self._kept = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        self._kept.view(values.shape).copy_(values)
        return self._kept


def is_flat(values: torch.Tensor) -> bool:
    """Whether coders can write into a tensor's own memory."""
    return values.dtype is torch.float32 and values.is_contiguous()


def check_elements(found: int, expected: int) -> None:
    """Raises CodecError unless a stream's tensors keep their size."""
    if found != expected:
        raise CodecError(f"{found} values in a stream of {expected}")
