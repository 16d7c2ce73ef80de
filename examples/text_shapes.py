"""Sizes of the language models that `train_text` can build.

The first four bear the names under which arXiv 2510.19470 evaluates; the paper gives hidden 512 to 1024, 32 experts and
2.1 to 8.4 M parameters per expert, from which two matrices of hidden x 4*hidden follow. Layers and top-k are ours and
the same as in benchmarks/workloads/paper_kind.yaml; heads of width 64, batch and sequence are ours too.

`demo` is made for four processes on two shared cores: experts so narrow that computing a token takes less time than
moving it over 100 Mbit/s, as on a GPU; at wider ones two cores would hide what the link costs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextShape:
    """A decoder of `layers` blocks: attention and a MoE layer of `experts`, `top_k` of them per token.

    `batch` and `sequence` are defaults: sequences of one worker's micro-batch, and bytes of a sequence.
    """

    hidden: int
    ffn: int
    experts: int
    top_k: int
    layers: int
    heads: int
    batch: int
    sequence: int
    expert: str = "gelu"


SHAPES = {
    "llama-tiny": TextShape(512, 2048, 32, 2, layers=8, heads=8, batch=8, sequence=512),
    "mistral-small": TextShape(512, 2048, 32, 4, layers=12, heads=8, batch=8, sequence=512),
    "gpt-medium": TextShape(768, 3072, 32, 2, layers=12, heads=12, batch=8, sequence=512),
    "gpt-large": TextShape(1024, 4096, 32, 2, layers=24, heads=16, batch=4, sequence=512),
    "demo": TextShape(128, 128, 32, 2, layers=2, heads=2, batch=64, sequence=64),
}
