"""Where this worker is in the training loop: the source of every Position."""

from __future__ import annotations

from collections import Counter

from hybridep_rt.protocol.position import Phase, Position


class Clock:
    """Counts optimizer steps, forwards of each layer since the last step, and collectives since the start."""

    def __init__(self) -> None:
        self.step = 0
        self._forwards: Counter[tuple[int, bool]] = Counter()
        self._collectives = 0

    def forward(self, layer: int, *, training: bool) -> Position:
        """The position of the next forward of a layer."""
        micro_batch = self._forwards[layer, training]
        self._forwards[layer, training] += 1
        return Position(self.step, micro_batch, layer, Phase.DISPATCH, training=training)

    def collective(self, phase: Phase = Phase.ALL_REDUCE) -> Position:
        """The position of the next collective of all workers; `micro_batch` holds its number."""
        self._collectives += 1
        return Position(self.step, self._collectives, -1, phase)

    def stepped(self) -> None:
        """The optimizer made a step."""
        self.step += 1
        self._forwards.clear()
