"""Which experts a token needs: softmax top-k gating, the load-balancing loss and the z-loss."""

from __future__ import annotations

import torch
from torch import nn


class Router(nn.Module):
    """Softmax top-k router. Shapes: T tokens, H hidden, E experts, K = top_k.

    The auxiliary loss is the load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4) summed over the K
    choices, E * sum_e fraction_e * probability_e, which is K when balanced; the z-loss is that of ST-MoE
    (arXiv 2202.08906, eq. 5), mean logsumexp(logits)^2. Both are over this worker's tokens.
    """

    def __init__(self, hidden: int, num_experts: int, top_k: int, *, renormalise: bool, seed: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalise = renormalise
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(num_experts, hidden, generator=generator) * hidden**-0.5)

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expert ids [T,K] (int64), their gate weights [T,K], auxiliary loss and z-loss (scalars)."""
        logits_TE = nn.functional.linear(x_TH, self.weight)
        probability_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.promote_types(x_TH.dtype, torch.float32))
        weight_TK, index_TK = torch.topk(probability_TE, self.top_k, dim=-1)
        if self.renormalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        chosen_E = torch.bincount(index_TK.reshape(-1), minlength=self.num_experts).to(probability_TE.dtype)
        tokens = max(x_TH.shape[0], 1)
        balance = self.num_experts * torch.dot(chosen_E / tokens, probability_TE.sum(dim=0) / tokens)
        z_loss = torch.logsumexp(logits_TE.to(probability_TE.dtype), dim=-1).square().sum() / tokens
        return index_TK, weight_TK.to(x_TH.dtype), balance, z_loss
