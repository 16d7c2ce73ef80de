"""The baseline: expert parallelism with torch.distributed and nothing else, as one would write it without a runtime.

Every (token, choice) pair is a row, sorted by expert. One small all-to-all tells the counts, one takes the rows to the
workers that own their experts, one brings the results back; both have their mirror image in backward. Dropless.

Shapes: T tokens, H hidden, K choices, W workers, L experts per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridep_rt.moe.experts import expert_kind
from hybridep_rt.moe.router import Router


class _AllToAll(torch.autograd.Function):
    """Rows to other workers; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, to: list[int], come: list[int]) -> torch.Tensor:
        ctx.to, ctx.come = to, come
        return _all_to_all(rows, to, come)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_to_all(grads[0].contiguous(), ctx.come, ctx.to), None, None


class PlainMoELayer(nn.Module):
    """Top-k routed swiglu experts, the same number at each worker. [..., hidden] -> [..., hidden]."""

    def __init__(self, router: Router, experts: Sequence[Sequence[nn.Parameter]], workers: int) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(nn.ParameterList(tensors) for tensors in experts)
        self.aux_loss = torch.zeros(())
        self._workers = workers
        self._expert = expert_kind("swiglu").apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """sum over the top-k experts of gate weight * expert(token)."""
        x_TH = x.reshape(-1, x.shape[-1])
        index_TK, weight_TK, balance, _ = self.router(x_TH)
        self.aux_loss = 0.01 * balance
        expert_P = index_TK.reshape(-1)
        order = torch.argsort(expert_P, stable=True)
        row = order // index_TK.shape[1]
        counts_WL = torch.bincount(expert_P, minlength=self._workers * len(self.experts)).view(self._workers, -1)
        y = self._experts_of_all(x_TH.index_select(0, row), counts_WL)
        weighted = y * weight_TK.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(x_TH).index_add(0, row, weighted).view_as(x)

    def _experts_of_all(self, rows: torch.Tensor, counts_WL: torch.Tensor) -> torch.Tensor:
        if self._workers == 1:
            return self._compute(rows, counts_WL.tolist())
        theirs_WL = torch.empty_like(counts_WL)
        dist.all_to_all_single(theirs_WL, counts_WL)
        to, come = counts_WL.sum(1).tolist(), theirs_WL.sum(1).tolist()
        arrived = _AllToAll.apply(rows, to, come)
        answer: torch.Tensor = _AllToAll.apply(self._compute(arrived, theirs_WL.tolist()), come, to)
        return answer

    def _compute(self, rows: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """`rows` are sorted by (worker they come from, expert), and so are the results."""
        parts = rows.split([count for worker in counts for count in worker])
        local, workers = len(self.experts), len(counts)
        results: list[torch.Tensor] = [rows] * len(parts)
        for number, tensors in enumerate(self.experts):
            mine = range(number, len(parts), local)
            batch = torch.cat([parts[i] for i in mine]) if workers > 1 else parts[number]
            answers = self._expert(list(tensors), batch).split([len(parts[i]) for i in mine])
            for i, answer in zip(mine, answers, strict=True):
                results[i] = answer
        return torch.cat(results)


def average_gradients(dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], workers: int) -> None:
    """Dense gradients become their mean over workers; experts' are sums over all workers' tokens, to be divided."""
    if workers == 1:
        return
    present = [p.grad for p in dense if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in present])
    dist.all_reduce(flat)
    flat.div_(workers)
    for grad, part in zip(present, flat.split([grad.numel() for grad in present]), strict=True):
        grad.copy_(part.view_as(grad))
    for parameter in experts:
        if parameter.grad is not None:
            parameter.grad.div_(workers)


def _all_to_all(rows: torch.Tensor, to: list[int], come: list[int]) -> torch.Tensor:
    arrived = rows.new_empty((sum(come), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, come, to)
    return arrived
