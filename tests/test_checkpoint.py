"""A run that stops, is saved, and goes on in new processes ends with the bits of one that never stopped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hybridep_rt
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import Rung
from hybridep_rt.errors import ConfigError
from hybridep_rt.moe.layer import aux_loss
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.runtime.session import Runtime
from tests.fleet import run_fleet
from tests.oracle import Case, Model, loss_of
from tests.test_oracle import tokens
from tests.test_switch import some_plans

LAYOUT = Layout((2, 1, 1))
CASE = Case(num_experts=5, top_k=2, steps=6, micro_tokens=tokens(LAYOUT, 6))
PLANS = some_plans(LAYOUT, 5)
LOSSY = Rung("lossy", Codecs("bf16", "delta-1bit:predict=0.5", "1bit:vs=2:adapt=1", dense="2bit"), warm_up_steps=2)
FOLLOWED = Rung(
    "followed",
    Codecs(weights="delta-ternary:dead=1:predict=0.5:zstd=1", gradients="ternary"),
    warm_up_steps=2,
    warm_up=Codecs(weights="delta-2bit:predict=0.5", gradients="2bit:adapt=1"),
)


def begun(runtime: Runtime) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(CASE, runtime)
    draw = torch.Generator().manual_seed(0)
    for parameter in (*model.inward.parameters(), *model.outward.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=draw)
    optimizer = hybridep_rt.AdamW(model.parameters(), lr=0.05)
    runtime.attach(model, optimizer)
    return model, optimizer


def train(
    runtime: Runtime, model: Model, optimizer: torch.optim.Optimizer, steps: range, plans: Sequence[Plan]
) -> dict[str, Any]:
    """Goes over to the next plan after each of the first steps; all that ends up different if anything did."""
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model(CASE.batches(step)[runtime.rank][0].float())) + aux_loss(model)).backward()
        optimizer.step()
        if step + 1 < len(plans):
            runtime.switch(plans[step + 1])
    with torch.no_grad():
        output = model(CASE.batches(CASE.steps)[runtime.rank][0].float())
    return {"output": output, **dict(model.named_parameters())}


def saved(runtime: Runtime) -> bytes:
    buffer = io.BytesIO()
    torch.save(runtime.state_dict(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("rung", [LOSSY, FOLLOWED], ids=lambda rung: rung.name)
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_ends_with_the_same_bits(stop, rung):
    """It stops in the warm-up or after it, under another plan than the one that the job starts with."""
    plans = PLANS[:3]

    def whole(runtime: Runtime) -> dict[str, Any]:
        return train(runtime, *begun(runtime), range(CASE.steps), plans)

    def first(runtime: Runtime) -> bytes:
        train(runtime, *begun(runtime), range(stop), plans)
        return saved(runtime)

    def second(runtime: Runtime) -> dict[str, Any]:
        model, optimizer = begun(runtime)
        runtime.load_state_dict(torch.load(io.BytesIO(files[runtime.rank]), weights_only=True))
        assert runtime.plan.layers == plans[min(stop, 2)].layers
        later = [Plan(runtime.plan.epoch - stop + n, LAYOUT, plan.layers, "") for n, plan in enumerate(plans)]
        return train(runtime, model, optimizer, range(stop, CASE.steps), later)

    expected = run_fleet(plans[0], whole, rung=rung)
    files = run_fleet(plans[0], first, rung=rung)
    found = run_fleet(plans[0], second, rung=rung, seed=1)
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.isfinite(mine[name]).all()
            assert torch.equal(mine[name], theirs[name]), (number, name)


def test_a_checkpoint_of_other_codecs_is_refused():
    def work(runtime: Runtime) -> None:
        begun(runtime)
        state = runtime.state_dict()
        runtime.set_codec("safe")
        with pytest.raises(ConfigError, match="the checkpoint is of a run with"):
            runtime.load_state_dict(state)

    run_fleet(PLANS[0], work)
