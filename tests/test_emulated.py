"""Compute that only takes time, with a clock of the test's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridep_rt.errors import ConfigError
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.makers import replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.runtime.emulated import EmulatedCompute
from tests.fleet import run_fleet
from topology import parse


class Clock:
    def __init__(self, late_s=0.0):
        self.now_s = 0.0
        self.late_s = late_s
        self.slept = []

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds + self.late_s


def compute_with(clock, flops_per_s=1000.0):
    return EmulatedCompute(flops_per_s, now=clock.now, sleep=clock.sleep)


def test_a_kernel_takes_its_time_forward_and_twice_that_backward():
    clock = Clock()
    weight = torch.ones(4, requires_grad=True)
    x = torch.arange(3.0, requires_grad=True)
    y = compute_with(clock).kernel(x, 2000.0, [weight])
    assert clock.now_s == 2.0
    (3 * y).sum().backward()
    assert clock.now_s == 6.0
    assert torch.equal(y.detach(), x.detach())
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert torch.equal(weight.grad, torch.zeros(4))


def test_short_waits_are_saved_up_and_late_sleeps_are_taken_off():
    clock = Clock(late_s=0.1)
    compute = compute_with(clock, 1e6)
    for _ in range(4):
        compute.spend(100.0)
    assert clock.slept == []
    compute.spend(200.0)
    assert clock.slept == [pytest.approx(0.0006)]
    compute.spend(150_000.0)
    assert clock.slept[1:] == [pytest.approx(0.15 - 0.1)]


def test_a_rate_that_makes_no_sense():
    with pytest.raises(ConfigError, match="above 0"):
        EmulatedCompute(0.0)


def test_the_topology_file_knows_the_rate():
    levels = "levels: [{name: dc, count: 2, bandwidth: 1 Gbit/s, latency: 1 ms}]"
    found = parse(f"cluster: x\nemulate_compute: 50 TFLOP/s\n{levels}")
    assert found.emulate_compute_flops_per_s == 50e12
    assert found.digest() != parse(f"cluster: x\n{levels}").digest()


def test_experts_wait_and_their_gradients_still_travel():
    layout = Layout((1, 1))
    plan = Plan(0, layout, (replicate_all(layout, 4),), "test")

    def work(runtime):
        clock = Clock()
        runtime.emulated = compute_with(clock, 1e6)
        layer = MoELayer(8, 16, 4, 2, runtime=runtime)
        dense = nn.Linear(8, 8)
        model = nn.ModuleList([layer, dense])
        runtime.attach(model, torch.optim.SGD(model.parameters()))
        x = torch.randn(10, 8)
        runtime.kernel(dense, layer(x), 5e6).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        return clock.now_s, sum(runtime.metrics.snapshot().sent_bytes.values())

    expert_flops = 2 * 10 * 2 * 3 * 8 * 16
    for seconds, nbytes in run_fleet(plan, work):
        assert seconds == pytest.approx(3 * (5e6 + expert_flops) / 1e6, abs=0.001)
        assert nbytes > 2 * 4 * (2 * 3 * 8 * 16)
