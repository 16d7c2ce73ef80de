"""Where a worker is in the training loop. Every exchange carries it: workers that diverge are told, not hung."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What an exchange is for."""

    DISPATCH = 1
    COMBINE = 2
    DISPATCH_GRADIENT = 3
    COMBINE_GRADIENT = 4
    EXPERTS = 5
    GRADIENT_RETURN = 6
    ALL_REDUCE = 7
    BARRIER = 8
    ATTACH = 9
    MAILBOX = 10
    SHUTDOWN = 11
    SWITCH = 12
    SHARED = 13


class Position(NamedTuple):
    """`step` counts optimizer steps, `micro_batch` the forwards since then; `layer` and `chunk` are -1 outside a layer,
    where `micro_batch` counts the collectives of all workers.

    `training` tells a forward under grad from one under no_grad.
    """

    step: int
    micro_batch: int
    layer: int
    phase: Phase
    chunk: int = -1
    training: bool = True

    def describe(self) -> str:
        """One readable phrase for error messages."""
        phase = self.phase.name.lower().replace("_", " ")
        if self.phase is Phase.MAILBOX:
            return phase
        if self.layer < 0:
            return f"step {self.step}, {phase} (collective {self.micro_batch})"
        parts = [f"step {self.step}", f"micro-batch {self.micro_batch}", f"layer {self.layer}", phase]
        if self.chunk >= 0:
            parts.append(f"chunk {self.chunk}")
        if not self.training:
            parts.append("under no_grad")
        return ", ".join(parts)
