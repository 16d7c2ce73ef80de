"""A byte-level decoder whose feed-forward layers are mixtures of experts. B batch, T sequence, H hidden, V = 256."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import hybridep_rt
from examples.text_shapes import TextShape

VOCABULARY = 256


class Attention(nn.Module):
    """Causal attention, [B, T, H] -> [B, T, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    @staticmethod
    def flops(batch: int, sequence: int, hidden: int) -> float:
        """Of one forward: four projections, and half of the scores and their products, as the mask cuts the rest."""
        return batch * sequence * (8.0 * hidden**2 + 2.0 * sequence * hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x_BTH.shape
        q, k, v = self.qkv(x_BTH).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out_BTH: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return out_BTH


class Block(nn.Module):
    """Attention, then experts, each on normalised input and added to its input."""

    def __init__(self, shape: TextShape, seed: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape.hidden, shape.heads)
        self.expert_norm = nn.RMSNorm(shape.hidden)
        self.moe = hybridep_rt.MoELayer(
            shape.hidden, shape.ffn, shape.experts, shape.top_k, expert=shape.expert, seed=seed
        )

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        normed_BTH = self.attention_norm(x_BTH)
        flops = self.attention.flops(*normed_BTH.shape)
        x_BTH = x_BTH + hybridep_rt.current().kernel(self.attention, normed_BTH, flops)
        out_BTH: torch.Tensor = x_BTH + self.moe(self.expert_norm(x_BTH))
        return out_BTH


class TextModel(nn.Module):
    """Next-byte logits. Output weights are the embedding's."""

    def __init__(self, shape: TextShape, sequence: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.position = nn.Embedding(sequence, shape.hidden)
        # Logits of unit variance; bytes differ more than positions do, else the routers see one token and pick alike.
        nn.init.normal_(self.embedding.weight, std=shape.hidden**-0.5)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape, seed) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> logits [B, T, V]."""
        x_BTH = self.embedding(bytes_BT) + self.position.weight[: bytes_BT.shape[1]]
        for block in self.blocks:
            x_BTH = block(x_BTH)
        return functional.linear(self.norm(x_BTH), self.embedding.weight)

    def loss(self, window_BS: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per byte of windows [B, T + 1]."""
        logits = self(window_BS[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), window_BS[:, 1:].flatten())
