"""Where a run's Plan comes from: the words on the command line, the topology and the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from hybridep_rt.codecs.codec import Codecs, bytes_per_element
from hybridep_rt.errors import PlanError
from hybridep_rt.planner.auto import make_plan
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.makers import block_homes
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_file import from_file
from hybridep_rt.planner.plan_spec import Maker, PlanSpec
from topology import Topology


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker does in one optimizer step, as far as the program says: `plan auto` needs the tokens.

    `codecs`: those after a warm-up.
    """

    tokens_per_step: int | None = None
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    codecs: Codecs = field(default_factory=Codecs)


class PlanSource(Protocol):
    """Homes are needed when a layer is built, the rest of the plan once all layers are known."""

    def homes(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """The home of each expert of a layer."""

    def plan(self, shapes: Sequence[LayerShape], load: Load) -> Plan:
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

    def plan(self, shapes: Sequence[LayerShape], load: Load) -> Plan:
        """The plan, if the model has exactly its layers."""
        del load
        if len(shapes) != len(self.fixed.layers):
            raise PlanError(f"the plan has {len(self.fixed.layers)} layers, the model has {len(shapes)}")
        return self.fixed


@dataclass(frozen=True)
class TopologyPlan:
    """The plan that a spec makes for a topology: from a file, by a named maker, or by the planner's choice."""

    spec: PlanSpec
    topology: Topology
    chunks: int
    epoch: int

    def homes(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """A plan file's homes, else contiguous blocks."""
        if self._file is not None:
            return self._file.homes(layer, num_experts)
        return block_homes(num_experts, self._layout)

    def plan(self, shapes: Sequence[LayerShape], load: Load) -> Plan:
        """Raises PlanError where the spec doesn't fit, or `auto` lacks the number of tokens."""
        if not shapes:
            return Plan(self.epoch, self._layout, (), "the model has no MoE layer")
        if self._file is not None:
            return self._file.plan(shapes, load)
        if self.spec.maker is Maker.AUTO and load.tokens_per_step is None:
            raise PlanError(
                "plan auto needs the tokens of one worker and optimizer step: pass attach(..., tokens_per_step=N), "
                "or choose --plan ep, replicate or domains:S"
            )
        return make_plan(self.spec, self.topology, self.workload(shapes, load), epoch=self.epoch)

    def workload(self, shapes: Sequence[LayerShape], load: Load) -> Workload:
        """The planner's view of the model: bytes per element in the chosen codecs."""
        codecs, hidden = load.codecs, shapes[0].hidden
        ways = (codecs.tokens, codecs.backward_tokens)
        return Workload(
            layers=tuple(shapes),
            tokens_per_worker_per_step=load.tokens_per_step or 0,
            token_bytes=sum(bytes_per_element(way, load.dtype, width=hidden) for way in ways) / len(ways),
            weight_bytes=bytes_per_element(codecs.weights, load.dtype),
            gradient_bytes=bytes_per_element(codecs.gradients, load.dtype),
            micro_batches=load.micro_batches,
            token_chunks=self.chunks,
            copy_bytes=2.0 * load.dtype.itemsize,
        )

    @property
    def _layout(self) -> Layout:
        return Layout(self.topology.workers_per_dc)

    @cached_property
    def _file(self) -> FixedPlan | None:
        if self.spec.maker is not Maker.FILE:
            return None
        return FixedPlan(from_file(self.spec.path, self._layout))
