"""Compute that only takes time: kernels replaced by waits, so that many GPUs can be timed on a few CPU cores.

All data still flows at full size: activations pass through, and every parameter gets a gradient, of zeros. Only the
arithmetic is gone, so losses mean nothing; times do, for a machine whose kernels run at the given rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hybridep_rt.errors import ConfigError

_LEAST_S = 0.0005
"""Shorter waits are saved up: a sleep is late by some 0.1 ms, and what it was late is taken off the next one."""


class EmulatedCompute:
    """Waits of flops / rate. `now` and `sleep` are for tests."""

    def __init__(
        self,
        flops_per_s: float,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not flops_per_s > 0:
            raise ConfigError(f"emulated compute needs a rate above 0 FLOP/s, not {flops_per_s}")
        self.flops_per_s = flops_per_s
        self._now = now
        self._sleep = sleep
        self._owed_s = 0.0

    def spend(self, flops: float) -> None:
        """Take as long as that many floating-point operations."""
        self._owed_s += flops / self.flops_per_s
        if self._owed_s >= _LEAST_S:
            started = self._now()
            self._sleep(self._owed_s)
            self._owed_s -= self._now() - started

    def kernel(self, x: torch.Tensor, flops: float, parameters: list[torch.Tensor]) -> torch.Tensor:
        """`x` itself, after the time of the forward kernel; the backward pass takes twice that."""
        passed: torch.Tensor = _Kernel.apply(self, flops, x, *parameters)  # type: ignore[no-untyped-call]
        return passed


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: EmulatedCompute, flops: float, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.compute, ctx.flops = compute, flops
        ctx.save_for_backward(*parameters)
        compute.spend(flops)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.compute.spend(2 * ctx.flops)
        zeros = (torch.zeros_like(p) if p.requires_grad else None for p in ctx.saved_tensors)
        return (None, None, grads[0], *zeros)
