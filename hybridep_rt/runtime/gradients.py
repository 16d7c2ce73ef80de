"""Gradients of the dense parameters, summed over all workers of all DCs when a backward pass ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.collectives import Collectives


def average_gradients(
    parameters: Sequence[torch.nn.Parameter],
    collectives: Collectives,
    position: Position,
    divisor: int,
    codec: Codec,
    *,
    flag: bool,
) -> bool:
    """Replace every `.grad` by the sum over all workers / `divisor`; return whether any worker's `flag` is set.

    A parameter that has no gradient at any worker keeps None; one that has it at some gets it at all. Presence and
    the flag travel with the data, in one all-reduce per dtype, so `codec` has to keep small whole numbers exact.
    """
    flags = torch.tensor([flag, *(parameter.grad is not None for parameter in parameters)], dtype=torch.float64)
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    device = parameters[0].device if parameters else torch.device("cpu")
    if not by_dtype:
        by_dtype[torch.float32] = []
    any_flag = False
    present: list[bool] = []
    for number, (dtype, group) in enumerate(sorted(by_dtype.items(), key=lambda item: str(item[0]))):
        head = (
            flags.to(device=device, dtype=dtype) if number == 0 else flags.new_empty(0).to(device=device, dtype=dtype)
        )
        flat = torch.cat([head, *(_flat_gradient(parameter) for parameter in group)])
        total = collectives.all_reduce(flat, position, codec=codec, traffic=Traffic.GRADIENTS)
        if number == 0:
            any_flag = bool(total[0] > 0)
            present = (total[1 : len(flags)] > 0).tolist()
        _write_back(group, total[len(head) :], divisor, dict(zip(map(id, parameters), present, strict=True)))
    return any_flag


def all_finite(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether every gradient that there is has finite values only."""
    return all(_is_finite(p.grad) for p in parameters if p.grad is not None)


def _is_finite(values: torch.Tensor) -> bool:
    # A sum reads the values once and `isfinite` makes several temporaries, so ask the sum first. It may overflow though
    # all values are finite; it never is finite if one of them isn't.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _flat_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().reshape(-1)


def _write_back(
    group: Sequence[torch.nn.Parameter], total: torch.Tensor, divisor: int, present: dict[int, bool]
) -> None:
    parts = total.split([parameter.numel() for parameter in group])
    for parameter, part in zip(group, parts, strict=True):
        if not present[id(parameter)]:
            continue
        average = (part / divisor).view_as(parameter)
        if parameter.grad is None:
            parameter.grad = average
        else:
            parameter.grad.copy_(average)
