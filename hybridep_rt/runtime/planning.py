"""Where a run's Plan comes from: the words on the command line, the topology and the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from hybridep_rt.codecs.codec import bytes_per_element
from hybridep_rt.codecs.ladder import EXACT, Rung
from hybridep_rt.codecs.sizes import HeldBytes, wire_bytes
from hybridep_rt.errors import PlanError
from hybridep_rt.planner.auto import make_plan
from hybridep_rt.planner.calibration import Calibration, measured_compute, usable
from hybridep_rt.planner.choice import automatic
from hybridep_rt.planner.comparison import predicted_parts
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.makers import block_homes
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_file import from_file
from hybridep_rt.planner.plan_spec import Maker, PlanSpec
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import uniform
from hybridep_rt.runtime.kernel_rate import measure_flops_per_s
from topology import Topology
from topology.units import format_flops

_SAMPLES = 1024
"""Tokens whose choices stand for all."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker does in one optimizer step, as far as the program says: `plan auto` needs the tokens."""

    tokens_per_step: int | None = None
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    rung: Rung = EXACT
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense_parameters: int = 0


class PlanSource(Protocol):
    """Homes are needed when a layer is built, the rest of the plan once all layers are known."""

    def is_led(self, load: Load) -> bool:
        """Whether worker 0 of the first DC makes the plan for all. Raises PlanError where `load` lacks too much."""

    def homes(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """The home of each expert of a layer."""

    def plan(self, shapes: Sequence[LayerShape], load: Load) -> Plan:
        """The plan for all layers."""

    def predicted(self, shapes: Sequence[LayerShape], load: Load, plan: Plan, dc: int) -> dict[str, float] | None:
        """Seconds of a DC's step by `comparison.COMPONENTS`; None where too little is known."""


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """A plan that was made before."""

    fixed: Plan

    def is_led(self, load: Load) -> bool:
        """No: all have it."""
        del load
        return False

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

    def predicted(self, shapes: Sequence[LayerShape], load: Load, plan: Plan, dc: int) -> dict[str, float] | None:
        """None: of the topology nothing is known."""
        del shapes, load, plan, dc
        return None


@dataclass(frozen=True)
class TopologyPlan:
    """The plan that a spec makes for a topology: from a file, by a named maker, or by the planner's search.

    `emulated_flops_per_s`: of workers whose compute is emulated. `calibration`: what was measured at the sites.
    `memory_budget_bytes`: for the copies of one worker, where the plan is searched for; None: no limit.
    """

    spec: PlanSpec
    topology: Topology
    chunks: int
    epoch: int
    emulated_flops_per_s: float | None = None
    calibration: Calibration | None = None
    memory_budget_bytes: float | None = None

    def is_led(self, load: Load) -> bool:
        """A search takes seconds, and what it starts from is measured."""
        if self.spec.maker is Maker.AUTO and load.tokens_per_step is None:
            raise PlanError(
                "plan auto needs the tokens of one worker and optimizer step: pass attach(..., tokens_per_step=N), "
                "or choose --plan ep, replicate or domains:S"
            )
        return self.spec.maker is Maker.AUTO

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
        if self.is_led(load):
            job, known = self.job(shapes, load)
            plan = automatic(job, epoch=self.epoch, memory_budget_bytes=self.memory_budget_bytes)
            return replace(plan, reason=f"{plan.reason} {known}")
        return make_plan(self.spec, self.topology, self.workload(shapes, load), epoch=self.epoch)

    def predicted(self, shapes: Sequence[LayerShape], load: Load, plan: Plan, dc: int) -> dict[str, float] | None:
        """Needs the number of tokens, and a model with MoE layers."""
        if load.tokens_per_step is None or not shapes:
            return None
        predictor = Predictor(self.job(shapes, load)[0])
        return predicted_parts(predictor.predict([predictor.site_plans(plan.layers)]), dc)

    def job(self, shapes: Sequence[LayerShape], load: Load) -> tuple[Job, str]:
        """One step as the planner's model sees it, and a sentence on where its compute rate comes from.

        Routing counts as uniform.
        """
        compute, known = self._compute(shapes, load)
        routings = {
            (shape.num_experts, shape.top_k): uniform(shape.num_experts, shape.top_k, samples=_SAMPLES)
            for shape in shapes
        }
        chosen = tuple(routings[shape.num_experts, shape.top_k] for shape in shapes)
        topology = usable(self.topology, self.calibration)
        return Job(topology, self.workload(shapes, load), chosen if len(routings) > 1 else chosen[:1], compute), known

    def _compute(self, shapes: Sequence[LayerShape], load: Load) -> tuple[Compute, str]:
        dense_bytes = bytes_per_element(load.rung.codecs.dense, load.dtype)
        compute = Compute(dense_parameters=float(load.dense_parameters), dense_bytes=dense_bytes)
        if self.calibration is not None and self.calibration.sites:
            specs = asdict(load.rung.codecs)
            measured = measured_compute(compute, self.calibration, self.topology, specs)
            return measured, f"Compute as calibrated on {self.calibration.date}."
        if self.emulated_flops_per_s is not None:
            flops_per_s, known = self.emulated_flops_per_s, f"emulated at {format_flops(self.emulated_flops_per_s)}"
        else:
            flops_per_s = measure_flops_per_s(shapes[0], load.dtype, load.device)
            known = f"{format_flops(flops_per_s)}, measured at the first worker; hybridep calibrate measures all"
        dense = 2.0 * load.dense_parameters / len(shapes)
        return replace(compute, flops_per_s=flops_per_s, pre_expert_flops_per_token=dense), f"Compute: {known}."

    def workload(self, shapes: Sequence[LayerShape], load: Load) -> Workload:
        """The planner's view of the model: bytes per element in the chosen codecs."""
        return Workload(
            layers=tuple(shapes),
            tokens_per_worker_per_step=load.tokens_per_step or 0,
            micro_batches=load.micro_batches,
            token_chunks=self.chunks,
            **wire_bytes(load.rung.codecs, load.dtype, shapes[0].hidden, shapes[0].ffn),
            **HeldBytes.of_rung(load.rung, load.dtype).workload_bytes(2.0 * load.dtype.itemsize),
        )

    @property
    def _layout(self) -> Layout:
        return Layout(self.topology.workers_per_dc)

    @cached_property
    def _file(self) -> FixedPlan | None:
        if self.spec.maker is not Maker.FILE:
            return None
        return FixedPlan(from_file(self.spec.path, self._layout))
