"""Every so often: what coded copies cost in loss, and whether that is too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridep_rt.codecs.ladder import Rung, rung_below
from hybridep_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CodecWatch:
    """`loss()`: this worker's loss on a small batch, always the same. `tolerance`: in the loss's unit."""

    loss: Callable[[], torch.Tensor | float]
    every: int
    tolerance: float

    def __post_init__(self) -> None:
        if self.every < 1 or not self.tolerance >= 0:
            raise ConfigError(f"a watch needs every >= 1 and tolerance >= 0, not {self.every} and {self.tolerance}")

    def is_due(self, step: int, rung: Rung) -> bool:
        """After so many optimizer steps. A warm-up costs nothing, and exact copies are as good as can be."""
        return step % self.every == 0 and step > rung.warm_up_steps and rung.codecs.weights != "exact"

    def verdict(self, cost: float, rung: Rung) -> Rung:
        """The rung to go on with: the next more faithful one where copies cost too much, or nobody can say what."""
        return rung if cost <= self.tolerance else rung_below(rung.name)
