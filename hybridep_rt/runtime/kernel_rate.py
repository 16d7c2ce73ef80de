"""How fast this worker computes an expert, roughly: for plans of runs that nobody calibrated."""

from __future__ import annotations

import time

import torch

from hybridep_rt.planner.economics import LayerShape

_ROWS = 256
_ROUNDS = 3


def measure_flops_per_s(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of a few matrix products of `_ROWS` tokens with a matrix of an expert's size."""
    x = torch.ones(_ROWS, shape.hidden, dtype=dtype, device=device)
    weight = torch.ones(shape.hidden, max(1, shape.parameters_per_expert // shape.hidden), dtype=dtype, device=device)
    best_s = min(_timed_s(x, weight) for _ in range(_ROUNDS))
    return 2.0 * _ROWS * weight.numel() / max(best_s, 1e-9)


def _timed_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    started = time.perf_counter()
    float((x @ weight)[-1, -1])  # reading a value waits for the device
    return time.perf_counter() - started
