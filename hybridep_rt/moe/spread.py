"""The half of dispatch and combine that stays inside a DC: rows go to the workers that hold their experts and return.

Shapes: N rows, H hidden, P (row, expert, gate weight) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.transport.ports import SiteGroup


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens and the pairs that want an expert for a row; pairs are sorted by row."""

    x_NH: torch.Tensor
    row_P: torch.Tensor
    expert_P: torch.Tensor
    weight_P: torch.Tensor


@dataclass(slots=True)
class Spread:
    """What the backward pass of one spread needs."""

    rows: int
    pairs: int
    rows_to: list[torch.Tensor]
    """Rows of the batch that each local worker got."""
    pairs_to: list[torch.Tensor]
    """Pairs of the batch that each local worker got."""
    rows_from: list[int]
    pairs_from: list[int]
    x_leaf: torch.Tensor
    weight_leaf: torch.Tensor
    y: torch.Tensor


Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [N,H], row [P], expert [P], weight [P]) -> weighted sums [N,H]"""


def spread_forward(
    site: SiteGroup, serve_E: torch.Tensor, compute: Compute, batch: Batch, position: Position
) -> tuple[torch.Tensor, Spread]:
    """Weighted sums [N,H] of the batch's rows, computed by the workers that `serve_E` names. A collective of the DC."""
    server_P = serve_E[batch.expert_P]
    pairs_to = [(server_P == worker).nonzero().squeeze(1) for worker in range(site.size)]
    rows_to, parcels = [], []
    for pairs in pairs_to:
        rows, row_in_parcel = torch.unique_consecutive(batch.row_P[pairs], return_inverse=True)
        rows_to.append(rows)
        parcels.append((batch.x_NH[rows], row_in_parcel, batch.expert_P[pairs], batch.weight_P[pairs]))
    received = site.exchange(position, parcels)
    rows_from = [len(parcel[0]) for parcel in received]
    pairs_from = [len(parcel[1]) for parcel in received]
    x_leaf = torch.cat([parcel[0] for parcel in received])
    weight_leaf = torch.cat([parcel[3] for parcel in received])
    first_row = 0
    shifted = []
    for parcel, count in zip(received, rows_from, strict=True):
        shifted.append(parcel[1] + first_row)
        first_row += count
    if position.training:
        x_leaf.requires_grad_()
        weight_leaf.requires_grad_()
    with torch.set_grad_enabled(position.training):
        y = compute(x_leaf, torch.cat(shifted), torch.cat([parcel[2] for parcel in received]), weight_leaf)
    answers = site.exchange(position._replace(phase=Phase.COMBINE), [(part,) for part in y.detach().split(rows_from)])
    out_NH = torch.zeros_like(batch.x_NH)
    for rows, (answer,) in zip(rows_to, answers, strict=True):
        out_NH.index_add_(0, rows, answer)
    return out_NH, Spread(
        len(batch.x_NH), len(batch.row_P), rows_to, pairs_to, rows_from, pairs_from, x_leaf, weight_leaf, y
    )


def spread_backward(
    site: SiteGroup, spread: Spread, grad_NH: torch.Tensor, position: Position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows [N,H] and of the gate weights [P]; gradients of the experts go to their leaves' `.grad`."""
    received = site.exchange(
        position._replace(phase=Phase.COMBINE_GRADIENT), [(grad_NH[rows],) for rows in spread.rows_to]
    )
    grad_y = torch.cat([parcel[0] for parcel in received])
    if spread.y.requires_grad:
        torch.autograd.backward([spread.y], [grad_y])
    grad_x = _grad(spread.x_leaf).split(spread.rows_from)
    grad_weight = _grad(spread.weight_leaf).split(spread.pairs_from)
    answers = site.exchange(
        position._replace(phase=Phase.DISPATCH_GRADIENT), list(zip(grad_x, grad_weight, strict=True))
    )
    grad_rows = grad_NH.new_zeros((spread.rows, grad_NH.shape[1]))
    grad_pairs = spread.weight_leaf.new_zeros(spread.pairs)
    for rows, pairs, (row_grad, pair_grad) in zip(spread.rows_to, spread.pairs_to, answers, strict=True):
        grad_rows.index_add_(0, rows, row_grad)
        grad_pairs[pairs] = pair_grad
    spread.y = spread.x_leaf = spread.weight_leaf = spread.y.new_empty(0)
    return grad_rows, grad_pairs


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
