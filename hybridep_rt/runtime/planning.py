"""Where a run's Plan comes from: the words on the command line, the topology and the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one MoE layer. `parameters_per_expert` counts elements."""

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    parameters_per_expert: int


class PlanSource(Protocol):
    """Homes are needed when a layer is built, the rest of the plan once all layers are known."""

    def homes(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """The home of each expert of a layer."""

    def plan(self, shapes: Sequence[LayerShape], tokens_per_worker: int | None) -> Plan:
        """The plan for all layers."""


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """A plan that was made before."""

    fixed: Plan

    def homes(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Raises PlanError where the plan has no such layer or another number of experts."""
        if layer >= len(self.fixed.layers):
            raise PlanError(f"the plan has {len(self.fixed.layers)} layers, the model has more")
        found = self.fixed.layers[layer].num_experts
        if found != num_experts:
            raise PlanError(f"layer {layer}: the plan has {found} experts, the model {num_experts}")
        return self.fixed.layers[layer].home

    def plan(self, shapes: Sequence[LayerShape], tokens_per_worker: int | None) -> Plan:
        """The plan, if the model has exactly its layers."""
        del tokens_per_worker
        if len(shapes) != len(self.fixed.layers):
            raise PlanError(f"the plan has {len(self.fixed.layers)} layers, the model has {len(shapes)}")
        return self.fixed
