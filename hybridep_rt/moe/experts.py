"""What an expert is: its tensors, its seeded start, its function, and the weighted sum of experts over a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from hybridep_rt.errors import ConfigError

Tensors: TypeAlias = Sequence[torch.Tensor]
"""One expert's tensors, in the order of `ExpertKind.shapes`."""


Apply: TypeAlias = Callable[[Tensors, torch.Tensor], torch.Tensor]
"""One expert: (tensors, x [N,H]) -> [N,H]."""


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """A two-matrix ("gelu") or three-matrix ("swiglu") MLP. H hidden, F ffn."""

    names: tuple[str, ...]
    shapes: Callable[[int, int], tuple[tuple[int, int], ...]]
    apply: Apply


def _swiglu(tensors: Tensors, x_NH: torch.Tensor) -> torch.Tensor:
    gate_up, down = tensors
    gate_NF, up_NF = functional.linear(x_NH, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate_NF) * up_NF, down)


def _gelu(tensors: Tensors, x_NH: torch.Tensor) -> torch.Tensor:
    up, down = tensors
    return functional.linear(functional.gelu(functional.linear(x_NH, up)), down)


KINDS: Mapping[str, ExpertKind] = {
    "swiglu": ExpertKind(("gate_up", "down"), lambda hidden, ffn: ((2 * ffn, hidden), (hidden, ffn)), _swiglu),
    "gelu": ExpertKind(("up", "down"), lambda hidden, ffn: ((ffn, hidden), (hidden, ffn)), _gelu),
}


def expert_kind(name: str) -> ExpertKind:
    """Look a kind up. Raises ConfigError that lists the names."""
    if name not in KINDS:
        raise ConfigError(f'expert="{name}" is unknown: choose one of {", ".join(KINDS)}')
    return KINDS[name]


def expert_seed(seed: int, layer: int, expert: int) -> int:
    """A start for each (layer, global expert id), the same in every layout."""
    return (seed * 1_000_003 + layer * 65_537 + expert + 1) % (1 << 63)


def initial_tensors(kind: ExpertKind, hidden: int, ffn: int, seed: int) -> list[torch.Tensor]:
    """Normal values with standard deviation 1/sqrt(fan-in), drawn on the CPU in the default dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in kind.shapes(hidden, ffn)]


def weighted_sum(
    apply: Apply,
    held: Mapping[int, Tensors],
    x_NH: torch.Tensor,
    row_P: torch.Tensor,
    expert_P: torch.Tensor,
    weight_P: torch.Tensor,
) -> torch.Tensor:
    """sum over the pairs of a row of weight * expert(x[row]), as [N,H]. P pairs (row, expert, weight), sorted by row.

    A row's terms are added in the order of its pairs, so that the result does not depend on where the rows came from.
    Raises KeyError for an expert that is not held here.
    """
    if not len(row_P):
        return torch.zeros_like(x_NH)
    pairs = _pairs(row_P, expert_P, len(x_NH))
    ids, counts = torch.unique_consecutive(expert_P[pairs.order], return_counts=True)
    batches = _Gather.apply(x_NH, pairs).split(counts.tolist())  # type: ignore[no-untyped-call]
    y_PH = torch.cat([apply(held[expert], batch) for expert, batch in zip(ids.tolist(), batches, strict=True)])
    out_NH: torch.Tensor = _Combine.apply(y_PH, weight_P.to(y_PH.dtype), pairs)  # type: ignore[no-untyped-call]
    return out_NH


@dataclass(frozen=True, slots=True)
class _Pairs:
    """`order`: the pairs by expert. `row`: their rows, in that order. `place`: where each pair is in that order.

    `first`: the first pair of each row.
    """

    order: torch.Tensor
    row: torch.Tensor
    place: torch.Tensor
    first: torch.Tensor


def _pairs(row_P: torch.Tensor, expert_P: torch.Tensor, rows: int) -> _Pairs:
    order = torch.argsort(expert_P, stable=True)
    numbers = torch.arange(max(len(order), rows), device=order.device)
    place = torch.empty_like(order)
    place[order] = numbers[: len(order)]
    return _Pairs(order, row_P[order], place, torch.searchsorted(row_P, numbers[:rows]))


class _Gather(torch.autograd.Function):
    """x [N,H] -> the pairs' rows, by expert [P,H]. Backward adds up in the order of the pairs, on GPUs too."""

    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        ctx.pairs = pairs
        return x_NH.index_select(0, pairs.row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return functional.embedding_bag(ctx.pairs.place, grads[0], ctx.pairs.first, mode="sum"), None


class _Combine(torch.autograd.Function):
    """Results by expert [P,H] and gate weights by pair [P] -> weighted sums by row [N,H], in the order of the pairs."""

    @staticmethod
    def forward(ctx: Any, y_PH: torch.Tensor, weight_P: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        ctx.save_for_backward(y_PH, weight_P)
        ctx.pairs = pairs
        return functional.embedding_bag(pairs.place, y_PH, pairs.first, mode="sum", per_sample_weights=weight_P)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y_PH, weight_P = ctx.saved_tensors
        order = ctx.pairs.order
        grad_PH = grads[0].index_select(0, ctx.pairs.row)
        grad_weight = torch.empty_like(weight_P)
        grad_weight[order] = torch.linalg.vecdot(grad_PH, y_PH)
        return grad_PH.mul_(weight_P[order].unsqueeze(1)), grad_weight, None
