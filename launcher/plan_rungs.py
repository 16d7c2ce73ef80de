"""Which rung of the codec ladder, among those allowed: bytes, codec time and memory of each, and the search."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from hybridep_rt.codecs.ladder import LADDER, Rung
from hybridep_rt.codecs.ladder import rung as find_rung
from hybridep_rt.codecs.sizes import HeldBytes, wire_bytes
from hybridep_rt.planner.auto import SAME
from hybridep_rt.planner.calibration import Calibration, measured_compute
from hybridep_rt.planner.economics import Workload
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import Found, search


def with_rung(work: Workload, rung: Rung) -> Workload:
    """The work in a rung's codecs. Weights and gradients are float32 before they are coded, as in the runtime."""
    shape = work.layers[0]
    sizes: dict[str, Any] = wire_bytes(rung.codecs, torch.float32, shape.hidden, shape.ffn)
    return replace(work, **sizes | HeldBytes.of_rung(rung, torch.float32).workload_bytes(work.copy_bytes))


def search_rungs(
    job: Job, names: str, calibration: Calibration | None, memory_budget_bytes: float | None
) -> tuple[str, Job, Found, dict[str, float]]:
    """The rung whose best plan is fastest (of equally fast ones the most faithful), its job and plans, and all rungs'
    step times. Raises ConfigError for a rung that doesn't exist.
    """
    allowed = {find_rung(name).name for name in names.split(",")}
    tried: list[tuple[str, Job, Found]] = []
    for each in (each for each in LADDER if each.name in allowed):
        compute = job.compute
        if calibration is not None:
            compute = measured_compute(compute, calibration, job.topology, asdict(each.codecs))
        coded = replace(job, work=with_rung(job.work, each), compute=compute)
        tried.append((each.name, coded, search(Predictor(coded), memory_budget_bytes=memory_budget_bytes)))
    fastest_s = min(found.choice.step_s for _, _, found in tried)
    name, coded, found = next(entry for entry in tried if entry[2].choice.step_s <= fastest_s * (1 + SAME))
    return name, coded, found, {name: found.choice.step_s for name, _, found in tried}
