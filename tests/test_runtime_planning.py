"""Where a run's plan comes from: `auto` is the search's answer of one worker, which all take."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridep_rt.errors import PlanError
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.auto import SAME
from hybridep_rt.planner.calibration import Calibration, Figure, LinkFigures, SiteFigures
from hybridep_rt.planner.choice import automatic, settled
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_spec import parse_plan_spec
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import search
from hybridep_rt.runtime.planning import Load, TopologyPlan
from tests.fleet import run_fleet
from topology.read import parse

TWO = parse(
    "cluster: t\nlevels:\n  - {name: dc, count: 2, bandwidth: 100 Mbit/s, latency: 40 ms}\n"
    "  - {name: gpu, count: 2, bandwidth: 1 GB/s}\n"
)
SHAPE = LayerShape(64, 64, 8, 2, 2 * 64 * 64)
LOCK = threading.Lock()


def source(**changes: object) -> TopologyPlan:
    plans = TopologyPlan(parse_plan_spec("auto"), TWO, 1, 3, emulated_flops_per_s=1e12)
    return replace(plans, **changes)


def test_many_tokens_make_auto_replicate_and_few_make_it_plain_ep() -> None:
    many = source().plan([SHAPE] * 2, Load(100_000))
    few = source().plan([SHAPE] * 2, Load(8))
    assert many.epoch == 3
    assert all(len(holders) >= 2 for holders in many.layers[0].holders)
    assert all(len(holders) == 1 for holders in few.layers[0].holders)
    assert "emulated at 1 TFLOP/s" in many.reason
    assert many.terms[0].startswith(("->", "  "))
    assert source().plan([SHAPE] * 2, Load(100_000)) == many


def test_auto_keeps_to_the_memory_of_a_worker() -> None:
    work, copy_bytes = Load(100_000), SHAPE.parameters_per_expert * 8
    budget = source(memory_budget_bytes=2 * copy_bytes).plan([SHAPE] * 2, work)
    none = source(memory_budget_bytes=0.0).plan([SHAPE] * 2, work)
    for plan, most in ((budget, 2), (none, 0)):
        copies = [
            sum(worker in holders and worker != home for home, holders in zip(layer.home, layer.holders, strict=True))
            for layer in plan.layers
            for worker in range(plan.layout.workers)
        ]
        assert sum(copies) <= most * plan.layout.workers


def test_auto_is_as_fast_as_the_search_says() -> None:
    job, _ = source().job([SHAPE] * 2, Load(20_000))
    found = search(Predictor(job))
    assert settled(found).step_s <= found.choice.step_s * (1 + SAME)
    assert settled(found).copy_bytes <= found.choice.copy_bytes
    plan = automatic(job)
    predictor = Predictor(job)
    step_s = predictor.predict([predictor.site_plans(plan.layers)]).step_s[0]
    assert step_s == pytest.approx(settled(found).step_s)


def test_auto_without_tokens_says_what_is_missing() -> None:
    with pytest.raises(PlanError, match="tokens_per_step"):
        source().is_led(Load())


def test_a_rate_nobody_gave_is_measured_and_said() -> None:
    job, known = source(emulated_flops_per_s=None).job([SHAPE], Load(100, dense_parameters=50))
    assert isinstance(job.compute.flops_per_s, float)
    assert job.compute.flops_per_s > 1e6
    assert job.compute.pre_expert_flops_per_token == 100.0
    assert "measured at the first worker" in known


def test_a_calibration_goes_before_what_the_topology_says() -> None:
    def exactly(value: float) -> Figure:
        return Figure(value, value, value)

    figures = (5e9, 2.5, 1e-4, 2e-4, 1e-6, 1e-3, 1e-9, 1e9)
    site = SiteFigures(*map(exactly, figures))
    link = LinkFigures(exactly(1e6), exactly(0.2))
    found = Calibration("t", "2026-11-29T00:00:00", "", {"a": site, "b": site}, {("a", "b"): link, ("b", "a"): link})
    job, known = source(calibration=found).job([SHAPE], Load(100))
    assert job.compute.flops_per_s == (5e9,) * 4
    assert job.network.bandwidth[0, 1] == 1e6
    assert "calibrated on 2026-11-29" in known


def test_all_workers_take_the_plan_of_the_first() -> None:
    plans = source()

    def work(runtime):
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), MoELayer(64, 64, 8, 2, runtime=runtime, expert="gelu"))
        taken = runtime.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens_per_step=100_000)
        model(torch.ones(4, 64)).sum().backward()
        return taken

    taken = run_fleet(Plan(0, Layout((2, 2)), (), "unused"), work, plans=plans)
    assert all(plan == taken[0] for plan in taken)
    assert all(len(holders) >= 2 for holders in taken[3].layers[0].holders)


def test_a_plan_is_predicted_where_tokens_are_known() -> None:
    plans = source()
    plan = plans.plan([SHAPE], Load(5000))
    parts = plans.predicted([SHAPE], Load(5000), plan, 0)
    assert parts is not None
    assert set(parts) == {"compute", "tokens", "experts", "gradients", "dense"}
    assert plans.predicted([SHAPE], Load(), plan, 0) is None
