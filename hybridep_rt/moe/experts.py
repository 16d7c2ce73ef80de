"""What an expert is: its tensors, its seeded start, its function, and the weighted sum of experts over a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    """sum over the pairs of a row of weight * expert(x[row]), as [N,H]. P pairs (row, expert, weight) in any order.

    Experts run in the order of their ids, and a row's terms are added in that order, so that the result does not
    depend on where the rows came from. Raises KeyError for an expert that is not held here.
    """
    order = torch.argsort(expert_P, stable=True)
    ids, counts = torch.unique_consecutive(expert_P[order], return_counts=True)
    row_P, weight_P = row_P[order], weight_P[order]
    batches = x_NH.index_select(0, row_P).split(counts.tolist())
    out_NH = torch.zeros_like(x_NH)
    if not batches:
        return out_NH
    y_PH = torch.cat([apply(held[expert], batch) for expert, batch in zip(ids.tolist(), batches, strict=True)])
    return out_NH.index_add_(0, row_P, y_PH * weight_P.unsqueeze(1).to(y_PH.dtype))
