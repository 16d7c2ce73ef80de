"""The mean of a layer's experts, the same at every worker, that `sr` tells experts apart from (the paper's SR)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.collectives import Collectives, Reduction, VectorCodecs


class SharedWeights:
    """Flat float32 means over all experts of a layer, tensor by tensor, refreshed every `period` published versions.

    A refresh hides behind a step: sums over all workers leave when weights are published, the most patient class of
    traffic; totals leave in the backward pass; the next version is told apart from the mean of the version before it.
    Every worker calls the same methods in the same order. The first mean is waited for.
    """

    def __init__(
        self,
        layer: int,
        num_experts: int,
        shapes: Sequence[tuple[int, int]],
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        *,
        period: int,
        device: torch.device,
        collectives: Collectives,
    ) -> None:
        self._layer = layer
        self._num_experts = num_experts
        self._shapes = shapes
        self._parameters = parameters
        self._period = period
        self._device = device
        self._collectives = collectives
        self._running: Reduction | None = None
        self._totals_sent = False
        self._first = 0
        self.number = 0
        """How many means there were."""
        self.tensors: list[torch.Tensor] = []

    def rebind(self, parameters: Mapping[int, Sequence[torch.nn.Parameter]]) -> None:
        """Other experts are homed here from now on. A refresh that runs has its sums already."""
        self._parameters = parameters

    def before_publish(self, version: int) -> bool:
        """Whether there is a new mean for this version; waits for the one that is due."""
        if not self.number:
            self._first = version
            self._begin(version)
        return self.finish()

    def after_publish(self, version: int) -> None:
        """Begin the next refresh, if it is due with the next version. The optimizer has not changed the weights yet."""
        if (version + 1 - self._first) % self._period == 0:
            self._begin(version)

    def in_backward(self) -> None:
        """Send the totals on. Waits for sums that left a forward pass ago."""
        if self._running is not None and not self._totals_sent:
            self._running.send_totals()
            self._totals_sent = True

    def finish(self) -> bool:
        """Wait for the refresh that runs; whether there was one."""
        if self._running is None:
            return False
        self.in_backward()
        self.tensors = [total / self._num_experts for total in self._running.result()]
        self._running, self._totals_sent = None, False
        self.number += 1
        return True

    def _begin(self, version: int) -> None:
        vectors = [(self._sum_here(n), VectorCodecs()) for n in range(len(self._shapes))]
        position = Position(version, self.number, self._layer, Phase.SHARED)
        channel = f"/shared/{self._layer}"
        self._running = Reduction(self._collectives, vectors, position, traffic=Traffic.GRADIENTS, channel=channel)

    def _sum_here(self, number: int) -> torch.Tensor:
        rows, columns = self._shapes[number]
        total = torch.zeros(rows * columns, dtype=torch.float32, device=self._device)
        for tensors in self._parameters.values():
            total.add_(tensors[number].detach().reshape(-1))
        return total
