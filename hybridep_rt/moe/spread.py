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
        parcels.append((_take(batch.x_NH, rows), row_in_parcel, batch.expert_P[pairs], batch.weight_P[pairs]))
    received = site.exchange(position, parcels)
    rows_from = [len(parcel[0]) for parcel in received]
    pairs_from = [len(parcel[1]) for parcel in received]
    x_leaf = _join([parcel[0] for parcel in received]).detach()
    weight_leaf = _join([parcel[3] for parcel in received]).detach()
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
    answers = site.exchange(
        position._replace(phase=Phase.COMBINE),
        [(part,) for part in y.detach().split(rows_from)],
        rows_from=[(len(rows),) for rows in rows_to],
    )
    out_NH = _add_up(len(batch.x_NH), rows_to, [answer for (answer,) in answers])
    return out_NH, Spread(
        len(batch.x_NH), len(batch.row_P), rows_to, pairs_to, rows_from, pairs_from, x_leaf, weight_leaf, y
    )


def spread_backward(
    site: SiteGroup, spread: Spread, grad_NH: torch.Tensor, position: Position
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows [N,H] and of the gate weights [P]; gradients of the experts go to their leaves' `.grad`."""
    received = site.exchange(
        position._replace(phase=Phase.COMBINE_GRADIENT), [(_take(grad_NH, rows),) for rows in spread.rows_to]
    )
    grad_y = _join([parcel[0] for parcel in received])
    if spread.y.requires_grad:
        torch.autograd.backward([spread.y], [grad_y])
    grad_x = _grad(spread.x_leaf).split(spread.rows_from)
    grad_weight = _grad(spread.weight_leaf).split(spread.pairs_from)
    answers = site.exchange(
        position._replace(phase=Phase.DISPATCH_GRADIENT),
        list(zip(grad_x, grad_weight, strict=True)),
        rows_from=[(len(rows), len(pairs)) for rows, pairs in zip(spread.rows_to, spread.pairs_to, strict=True)],
    )
    grad_rows = _add_up(spread.rows, spread.rows_to, [row_grad for row_grad, _ in answers])
    grad_pairs = spread.weight_leaf.new_zeros(spread.pairs)
    for pairs, (_, pair_grad) in zip(spread.pairs_to, answers, strict=True):
        grad_pairs[pairs] = pair_grad
    spread.y = spread.x_leaf = spread.weight_leaf = spread.y.new_empty(0)
    return grad_rows, grad_pairs


def _take(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`values[rows]` for ascending, distinct rows: the values themselves where these are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add_up(count: int, rows_of: list[torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """[count,H]: row rows_of[i][j] is the sum, in the order of the parts, of the parts[i][j]."""
    if len(parts) == 1 and len(parts[0]) == count:
        return parts[0]
    total = parts[0].new_zeros((count, parts[0].shape[1]))
    for rows, part in zip(rows_of, parts, strict=True):
        total.index_add_(0, rows, part)
    return total


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
