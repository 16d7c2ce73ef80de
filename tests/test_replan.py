"""A running job looks for better plans: what it measures, and that all workers go over together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.makers import plain_ep, replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_spec import parse_plan_spec
from hybridep_rt.planner.replan import Layers, Proposal
from hybridep_rt.protocol.address import Address
from hybridep_rt.runtime import replan
from hybridep_rt.runtime.planning import TopologyPlan
from hybridep_rt.runtime.routing_sample import ROWS, RoutingSample, routing_of
from hybridep_rt.runtime.session import Runtime
from tests.fleet import run_fleet
from tests.oracle import Case, Result, compare, train_distributed
from tests.test_oracle import tokens
from topology import parse

LAYOUT = Layout((2, 1))
PLANS = TopologyPlan(
    parse_plan_spec("ep"),
    parse(
        "cluster: c\ndatacenters: {a: {workers: 2}, b: {workers: 1}}\n"
        "defaults: {link: {bandwidth: 10 Mbit/s, rtt: 2 ms}}\n",
        "test",
    ),
    1,
    0,
    emulated_flops_per_s=1e12,
    memory_budget_bytes=7e9,
)


def test_a_run_goes_over_to_a_better_plan_and_equals_one_process(monkeypatch):
    """The second of two looks that promise the same goes over, homes included; then the plan is the best."""
    jobs: list[Job] = []
    better = plain_ep(LAYOUT, 4, homes=(2, 1, 0, 0))

    def propose(job: Job, current: Layers, steps: int, *, memory_budget_bytes: float | None) -> Proposal:
        assert memory_budget_bytes == 7e9
        jobs.append(job)
        step_s = 1.0 if current == (better,) else 0.5
        return Proposal((better,), "it", 1.0, step_s, 0.0)

    monkeypatch.setattr(replan, "propose", propose)
    case = Case(num_experts=4, top_k=2, steps=7, micro_tokens=tokens(LAYOUT, 5))
    plan = Plan(0, LAYOUT, (plain_ep(LAYOUT, 4),), "test")

    def work(runtime: Runtime) -> tuple[Result, Plan | None]:
        replan.Replanner(runtime, PLANS, every=2)
        return train_distributed(case, runtime), runtime.plan

    found = run_fleet(plan, work)
    compare(case, plan, [result for result, _ in found])
    assert all(last is not None and (last.epoch, last.layers) == (1, (better,)) for _, last in found)
    assert len(jobs) == 3
    assert jobs[0].routing[0].source == "measured"
    assert jobs[0].routing[0].choices.shape[::2] == (2, 2)
    assert jobs[0].network.bandwidth[0, 1] != PLANS.topology.links[0, 1].bandwidth_bytes_per_s


def test_the_real_search_finds_that_slow_links_want_copies():
    case = Case(num_experts=4, top_k=2, steps=2, micro_tokens=tokens(LAYOUT, 5))
    plan = Plan(0, LAYOUT, (replicate_all(LAYOUT, 4),), "test")

    def work(runtime: Runtime) -> Plan | None:
        replan.Replanner(runtime, PLANS, every=1)
        train_distributed(case, runtime)
        return runtime.plan

    assert len({str(found) for found in run_fleet(plan, work)}) == 1


def test_without_the_number_of_tokens_it_says_so():
    runtime_error = "pass attach\\(..., tokens_per_step=N\\)"

    def work(runtime: Runtime) -> None:
        looks = replan.Replanner(runtime, PLANS, every=1)
        runtime.shapes = [object()]
        with pytest.raises(ConfigError, match=runtime_error):
            looks.after_step()

    run_fleet(Plan(0, LAYOUT, (plain_ep(LAYOUT, 4),), "test"), work)


def test_samples_of_all_workers_become_one_routing():
    samples = [RoutingSample() for _ in range(3)]
    samples[0].observe(0, torch.tensor([[0, 1]] * 100))
    samples[1].observe(0, torch.empty(0, 2, dtype=torch.int64))
    samples[2].observe(0, torch.tensor([[2, 3]] * 5))
    addresses = [Address(0, 0), Address(0, 1), Address(1, 0)]
    found = sum(sample.take(0, 2, me, LAYOUT) for sample, me in zip(samples, addresses, strict=True))
    routing = routing_of(found, LAYOUT)
    assert routing is not None
    assert routing.choices.shape == (2, 32, 2)
    assert np.array_equal(np.unique(routing.of(0)), [0, 1])
    assert np.array_equal(np.unique(routing.of(1)), [2, 3])
    assert routing_of(samples[0].take(0, 2, addresses[0], LAYOUT), LAYOUT) is None


def test_a_sample_keeps_the_last_tokens_only():
    sample = RoutingSample()
    for number in range(20):
        sample.observe(0, torch.full((64, 1), number))
    found = sample.take(0, 1, Address(0, 0), LAYOUT)[0, :, 0] - 1
    assert len(found) == ROWS
    assert sorted(set(found.tolist())) == list(range(12, 20))
