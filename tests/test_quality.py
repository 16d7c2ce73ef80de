"""benchmarks.quality: one process trains as the DCs that it emulates do, and what is made of its runs."""

from __future__ import annotations

import math

import pytest
import torch

import hybridep_rt
from benchmarks.emulated_dcs import EmulatedDCs, EmulatedLayer
from benchmarks.quality_report import evaluate, results
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import LADDER, Rung
from hybridep_rt.codecs.warm_up import warm_up
from hybridep_rt.planner.makers import plain_ep, subscribe
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet
from tests.oracle import Case, Model, loss_of, train_distributed

DCS, LAYERS, EXPERTS = 3, 2, 6
CASE = Case(EXPERTS, top_k=2, layers=LAYERS, expert="gelu", steps=6, micro_tokens=((20,),) * DCS)
HOME = (0, 0, 1, 1, 2, 2)
HOLDERS = ((0, 1, 2), (0,), (0, 1), (0, 1, 2), (2,), (1, 2))
RUNGS = (
    Rung("default", Codecs(tokens="int8", weights="delta-1bit:predict=0.5", gradients="1bit:vs=2"), 2),
    Rung("safe", Codecs(weights="delta-2bit:t=2", gradients="topk:keep=0.2"), 0),
    Rung("lean", Codecs(tokens="int8", weights="delta-1bit:t=2:predict=0.3", gradients="ternary"), 1),
    Rung("followed", LADDER[3].codecs, 3, LADDER[3].warm_up),
)


def adamw(parameters):
    return hybridep_rt.AdamW(parameters, lr=0.05, weight_decay=0.1)


def emulated(runtime, rung, start):
    model = Model(CASE, runtime).double()
    model.load_state_dict(start)
    parameters = list(model.parameters())
    layer_plan = subscribe(Layout((1,) * DCS), HOME, HOLDERS)
    for number, moe in enumerate(model.layers):
        model.layers[number] = EmulatedLayer(moe, layer_plan, rung, expert=CASE.expert)
    optimizer = adamw(parameters)
    dcs = EmulatedDCs(model.layers, optimizer, parameters, rung)
    for step in range(CASE.steps):
        output = model(torch.cat([worker[0] for worker in CASE.batches(step)]))
        dcs.step(torch.stack([loss_of(part) for part in output.chunk(DCS)]).mean())
    return dict(model.named_parameters())


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.codecs.gradients)
def test_one_process_trains_as_dcs_do(rung):
    warm_up(rung.specs)
    layout = Layout((1,) * DCS)
    plan = Plan(0, layout, (subscribe(layout, HOME, HOLDERS),) * LAYERS, "mixed")
    results = run_fleet(plan, lambda runtime: train_distributed(CASE, runtime, optimize=adamw), rung=rung)
    alone = Layout((1,))
    solo = Plan(0, alone, (plain_ep(alone, EXPERTS),) * LAYERS, "alone")
    start = {name: value for result in results for name, value in result.start.items()}
    (found,) = run_fleet(solo, lambda runtime: emulated(runtime, rung, start))
    wanted = {name: value for result in results for name, value in result.parameters.items()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=0, atol=1e-10, msg=name)


def one_run(final, weights=0.0):
    sent = {"weights": weights, "gradients": 0.25, "weights_mean": 1.0, "gradients_mean": 2.0, "shared": 0.5}
    return {"final": final, "curve": [{"step": 10, "loss": final + 1, "distance": 0.01}], "bytes": sent}


def test_gaps_are_between_means_and_steps_come_from_longer_training():
    exact = {("exact", seed): one_run(2.0 + seed) for seed in range(3)}
    longer = {("longer", seed): one_run(1.9 + seed) for seed in range(3)}
    lean = {("lean", 0): one_run(3.1, 0.125), ("lean", 7): one_run(3.3, 0.125)}
    (found,) = evaluate({**exact, **longer, **lean})
    assert (found.row, found.seeds, found.losses) == ("lean", (0, 7), (3.1, 3.3))
    assert found.gap.value == pytest.approx(0.2)
    assert found.extra_steps.value == pytest.approx(1.2**2 - 1)
    assert (found.weight_bytes, found.gradient_bytes, found.mean_bytes) == (0.625, 0.25, 3.5)
    assert found.curve == ((10, pytest.approx(0.2)),)
    (alone,) = evaluate({**exact, **lean})
    assert alone.extra_steps is None
    assert evaluate(lean) == []


def test_longer_training_that_gains_nothing_tells_no_steps():
    runs = {("exact", 0): one_run(2.0), ("longer", 0): one_run(2.1), ("lean", 0): one_run(2.2)}
    (found,) = evaluate(runs)
    assert found.extra_steps is None
    (row, _) = results([found], runs)
    assert row["gap"] == {"value": pytest.approx(0.2), "low": None, "high": None}


def test_a_gap_that_no_steps_would_close_has_no_end():
    runs = {("exact", 0): one_run(2.0), ("longer", 0): one_run(2.0 - 1e-6), ("lean", 0): one_run(9.0)}
    (found,) = evaluate(runs)
    assert (found.extra_steps.low, found.extra_steps.value, found.extra_steps.high) == (-1, math.inf, math.inf)


def test_exact_training_that_began_a_thousandth_off_is_exact_training():
    runs = {
        ("exact", 0): one_run(2.0),
        ("exact", 1): one_run(2.2),
        ("null", 0): one_run(2.6),
        ("safe", 0): one_run(2.4),
    }
    null, safe = sorted(evaluate(runs), key=lambda found: found.row)
    assert (null.row, null.gap.value) == ("null", pytest.approx(0.5))
    assert safe.gap.value == pytest.approx(2.4 - 6.8 / 3)
