"""Sizes of the models that step benchmarks train. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model and its batch. `tokens` are per worker."""

    workers: int
    tokens: int
    hidden: int
    ffn: int
    experts: int = 8
    top_k: int = 2
    layers: int = 2

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.tokens} tokens each, {self.hidden} x {self.ffn}"


SHAPES = ((512, 256, 512), (2048, 256, 512), (512, 512, 1024), (4096, 256, 512), (2048, 512, 1024))
FULL = tuple(Size(workers, tokens, hidden, ffn) for tokens, hidden, ffn in SHAPES for workers in (2, 1))
QUICK = (Size(2, 512, 256, 512), Size(1, 512, 256, 512))
