"""The baseline trains as the runtime does, so that timing one against the other is fair."""

from __future__ import annotations

import pytest
import torch

from benchmarks.arms import batch, plain_arm, runtime_arm
from benchmarks.sizes import Size
from benchmarks.steps import measure_steps
from benchmarks.steps_worker import check_fair
from hybridep_rt.planner.makers import plain_ep
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet

ALONE = Size(workers=1, tokens=24, hidden=8, ffn=6)


def alone(work):
    layout = Layout((1,))
    return run_fleet(Plan(0, layout, (plain_ep(layout, ALONE.experts),) * ALONE.layers, "test"), work)[0]


def test_one_worker_trains_alike():
    def work(runtime):
        first = runtime_arm(ALONE, runtime)
        plain = plain_arm(ALONE, first.model)
        x, target = batch(ALONE, 0)
        losses = check_fair({"runtime": first, "plain": plain}, x, target)
        assert plain.timed_step(x, target)[0] > 0
        for name in ("dense", "norms"):
            theirs = getattr(plain.model, name).state_dict()
            assert theirs.keys() == getattr(first.model, name).state_dict().keys()
        return losses

    losses = alone(work)
    assert losses[0] > losses[-1] > 0


def test_a_baseline_that_trains_otherwise_is_found():
    def work(runtime):
        first = runtime_arm(ALONE, runtime)
        plain = plain_arm(ALONE, first.model)
        with torch.no_grad():
            plain.model.moe[1].experts[3][0].mul_(1.5)
        with pytest.raises(ValueError, match="don't train alike"):
            check_fair({"runtime": first, "plain": plain}, *batch(ALONE, 0))

    alone(work)


@pytest.mark.timeout(110)
def test_a_job_of_two_workers_trains_alike_and_is_timed():
    steps = measure_steps(Size(workers=2, tokens=16, hidden=8, ffn=6), ("plain", "runtime"), rounds=2)
    assert len(steps.losses) == 3
    assert all(
        len(taken) == 2 and min(taken) > 0 for by_arm in (steps.wall_s, steps.cpu_s) for taken in by_arm.values()
    )
    assert steps.job_s > 0
