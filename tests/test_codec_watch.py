"""What coded copies cost: figures by layer, exact copies to compare with, and falling back a rung."""

from __future__ import annotations

import math

import pytest
import torch

from hybridep_rt.codecs import delta
from hybridep_rt.codecs.ladder import LADDER, parse_rung, rung
from hybridep_rt.errors import CodecError, ConfigError
from hybridep_rt.planner.makers import domains, replicate_all
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.runtime.codec_watch import CodecWatch
from tests.fleet import run_fleet
from tests.test_rungs import EXPERTS, LAYOUT, build, plan, train
from tests.test_session import data

BAD = "weights=delta-1bit:t=64,gradients=2bit"


def held_by(model):
    """Tensors of the experts homed at a worker, and of its copies."""
    holdings = model[1]._bound
    tensors = {e: [leaf.detach().clone() for leaf in leaves] for e, leaves in holdings._leaves.items()}
    homes = {e: tensors[e] for e in holdings._parameters}
    return homes, {e: each for e, each in tensors.items() if e not in homes}


@pytest.mark.parametrize("layout", [LAYOUT, Layout((2, 2)), Layout((1, 1, 2))], ids=str)
@pytest.mark.parametrize(
    "maker", [lambda layout, e: domains(layout, e, (layout.dcs,)), replicate_all], ids=["dcs", "all"]
)
def test_exact_copies_are_what_homes_have_and_leave_no_trace(maker, layout):
    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(3):
            train(runtime, model, optimizer, step)
        with torch.no_grad():
            before = model(data(runtime).float())
        with runtime.exact_copies():
            held = held_by(model)
            inside = model(data(runtime).float())
        with torch.no_grad():
            after = model(data(runtime).float())
        train(runtime, model, optimizer, 3)
        return held, torch.equal(before, after), torch.equal(before, inside)

    results = run_fleet(plan(maker, layout), work, rung=parse_rung(BAD))
    homes = {e: tensors for (own, _), *_ in results for e, tensors in own.items()}
    assert sorted(homes) == list(range(EXPERTS))
    for (_, copies), unchanged, _ in results:
        assert unchanged
        for expert, tensors in copies.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, homes[expert], strict=True))
    assert not all(same for *_, same in results)


@pytest.mark.parametrize(
    "weights", ["exact", "bf16", "int8", "delta-1bit:t=2", "delta-2bit:predict=0.5", "sr:keep=0.1"]
)
def test_figures_are_how_far_copies_are_from_homes(weights):
    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(4):
            train(runtime, model, optimizer, step)
        with torch.no_grad():
            model(data(runtime).float())
        assert runtime.metrics.snapshot().codec_figures == {}
        figures = runtime.codec_figures()
        assert runtime.metrics.snapshot().codec_figures == figures
        return held_by(model), figures[0]

    results = run_fleet(plan(), work, rung=parse_rung(f"weights={weights}"))
    copies = {e: tensors for (_, others), _ in results for e, tensors in others.items()}
    for (homes, _), figures in results:
        pairs = [pair for e, tensors in homes.items() for pair in zip(tensors, copies[e], strict=True)]
        error = math.hypot(*(float((home - copy).norm()) for home, copy in pairs))
        norm = math.hypot(*(float(home.norm()) for home, _ in pairs))
        assert figures.copy_error == pytest.approx(error / norm if norm else 0.0, rel=1e-4)
        assert figures.owed_norm == 0


@pytest.mark.parametrize("tolerance", [0.0, math.inf])
def test_a_bad_codec_is_left_for_the_next_rung(tolerance):
    """Copies that all but stand still do worse on what is learnt than exact ones would."""

    def work(runtime):
        model, optimizer = build(runtime)
        fixed = data(runtime, 0).float()
        runtime.watch_codec(lambda: model(fixed).square().mean(), every=3, tolerance=tolerance)
        rungs = []
        for _ in range(7):
            train(runtime, model, optimizer)
            rungs.append(runtime.rung)
        with torch.no_grad():
            model(fixed)
        return rungs, held_by(model)

    bad = parse_rung(BAD)
    results = run_fleet(plan(), work, rung=bad)
    homes = {e: tensors for _, (own, _) in results for e, tensors in own.items()}
    for rungs, (_, copies) in results:
        assert rungs == ([bad] * 2 + [LADDER[0]] * 5 if tolerance == 0 else [bad] * 7)
        same = [torch.equal(a, b) for e in copies for a, b in zip(copies[e], homes[e], strict=True)]
        assert all(same) == (tolerance == 0)


def test_a_copy_that_drifted_ends_the_job_and_is_named(monkeypatch):
    monkeypatch.setattr(delta, "DIGEST_EVERY", 4)

    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(6):
            train(runtime, model, optimizer, step)
            if step == 1 and runtime.address == Address(0, 0):
                model[1]._bound.settle()
                copies = held_by(model)[1]
                with torch.no_grad():
                    model[1]._bound._leaves[min(copies)][0][0, 0] += 1e-3

    with pytest.raises(CodecError, match=r"weights of expert \d, layer 0: this copy and its home's differ"):
        run_fleet(plan(layout=Layout((1, 1))), work, rung=parse_rung("weights=delta-1bit"))


def test_a_verdict_is_the_next_more_faithful_rung():
    watch = CodecWatch(lambda: 0.0, every=10, tolerance=0.1)
    assert watch.verdict(0.1, rung("lean")) == rung("lean")
    assert watch.verdict(0.11, rung("lean")) == rung("default")
    assert watch.verdict(math.nan, rung("safe")) == LADDER[0]
    assert watch.verdict(1.0, parse_rung("weights=int8")) == LADDER[0]
    warm_up = rung("default").warm_up_steps
    assert not watch.is_due(warm_up, rung("default"))
    assert watch.is_due(warm_up + 10, rung("default"))
    assert not watch.is_due(warm_up + 11, rung("default"))
    assert not watch.is_due(210, rung("exact"))
    with pytest.raises(ConfigError, match="every >= 1"):
        CodecWatch(lambda: 0.0, every=0, tolerance=0.1)
