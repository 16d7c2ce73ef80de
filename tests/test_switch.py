"""Plans that change while a model trains: the run equals one dense process that knows nothing of plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hybridep_rt
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.errors import ConfigError, PlanError
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.makers import domains, plain_ep, replicate_all, subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout, Plan
from hybridep_rt.runtime.session import Runtime
from tests.fleet import run_fleet
from tests.oracle import FFN, HIDDEN, Case, Model, Optimize, adamw, compare, loss_of, train_distributed
from tests.test_oracle import layer_plans, plans, tokens


def sequence(layout: Layout, *layers: Sequence[LayerPlan]) -> list[Plan]:
    return [Plan(epoch, layout, tuple(each), "test") for epoch, each in enumerate(layers)]


def check(case: Case, plans: Sequence[Plan], seed: int = 0, optimize: Optimize = adamw) -> None:
    first, *later = plans
    results = run_fleet(
        first,
        lambda runtime: train_distributed(case, runtime, switches=later, optimize=optimize),
        seed=seed,
        chunks=case.chunks,
    )
    compare(case, first, results, optimize=optimize)


def rotated(layout: Layout, experts: int) -> tuple[int, ...]:
    """Every expert homed at another worker than by default, where there are several."""
    return tuple((expert + 1) % layout.workers for expert in range(experts))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw": adamw,
    "ours": lambda p: hybridep_rt.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_homes_move_with_all_that_an_optimizer_keeps(name):
    layout = Layout((2, 1))
    case = Case(num_experts=4, top_k=2, layers=2, steps=4, micro_tokens=tokens(layout, 5, 3))
    moved = plain_ep(layout, 4, homes=rotated(layout, 4))
    ep, full = plain_ep(layout, 4), domains(layout, 4, (2,))
    check(case, sequence(layout, (ep, ep), (moved, ep), (full, moved), (ep, ep)), optimize=OPTIMIZERS[name])


@st.composite
def plan_sequences(draw: st.DrawFn) -> tuple[list[Plan], Case]:
    """Any legal plan, then others for the same model, homes included."""
    first, case = draw(plans())
    later = [
        Plan(epoch, first.layout, tuple(draw(layer_plans(first.layout, case.num_experts)) for _ in first.layers), "")
        for epoch in range(1, draw(st.integers(2, 4)))
    ]
    return [first, *later], dataclasses.replace(case, steps=len(later) + 1)


@given(plan_sequences(), st.integers(0, 1 << 16))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_sequence_of_plans(drawn, seed):
    plans, case = drawn
    check(case, plans, seed)


def lossy_run(plans: Sequence[Plan], codecs: Codecs, *, steps: int, rate: float, seed: int = 0) -> list[dict]:
    """Trains under each of the plans in turn; what each worker sent, holds and owes, by expert, at the end."""
    layout, experts = plans[0].layout, plans[0].layers[0].num_experts
    case = Case(experts, 2, steps=steps, micro_tokens=tokens(layout, 6))
    kept: dict[int, MoELayer] = {}

    def work(runtime: Runtime) -> dict:
        model = Model(case, runtime)
        draw = torch.Generator().manual_seed(0)  # the default generator is shared by the workers' threads
        for parameter in (*model.inward.parameters(), *model.outward.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=draw)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        runtime.attach(model, optimizer)
        layer = kept[runtime.rank] = model.layers[0]
        sums: dict[str, torch.Tensor] = {}
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model(case.batches(step)[runtime.rank][0].float())).backward()
            for name, parameter in layer.experts.named_parameters():
                sums[name] = sums.get(name, 0) + parameter.grad.clone() * runtime.world_size
            optimizer.step()
            if 0 < step < len(plans):
                runtime.switch(plans[step])
        layer.settle()
        return sums

    sums = run_fleet(plans[0], work, codecs=codecs, seed=seed)
    return [{"sums": each, "layer": kept[number]} for number, each in enumerate(sums)]


def some_plans(layout: Layout, experts: int) -> list[Plan]:
    """Subscribers come, stay and leave, gateways change, homes move to subscribers and back."""
    moved = rotated(layout, experts)
    some = [tuple(sorted({home, (home + 2) % layout.workers})) for home in moved]
    return sequence(
        layout,
        [domains(layout, experts, (layout.dcs,))],
        [replicate_all(layout, experts)],
        [subscribe(layout, moved, some)],
        [replicate_all(layout, experts, homes=moved)],
        [plain_ep(layout, experts)],
        [domains(layout, experts, (layout.dcs,))],
    )


@pytest.mark.parametrize("weights", ["delta-1bit:predict=0.5", "bf16", "int8", "sr:keep=0.1:t_shared=2"])
def test_every_copy_is_the_one_that_its_home_knows(weights):
    plans = some_plans(Layout((2, 1, 1)), 5)
    for count in (3, len(plans)):
        held = lossy_run(plans[:count], Codecs(weights=weights), steps=count + 2, rate=0.1)
        layers = [worker["layer"] for worker in held]
        for expert, home in enumerate(plans[count - 1].layers[0].home):
            streams = layers[home]._holdings.home_streams(expert)["weights"]
            for holder in plans[count - 1].layers[0].holders[expert]:
                if holder == home:
                    continue
                weight = layers[home]._homes()[expert]
                copies = layers[holder]._holdings._leaves[expert]
                for stream, parameter, copy in zip(streams, weight, copies, strict=True):
                    if hasattr(stream, "key_frame"):
                        assert torch.isfinite(copy).all()
                        assert torch.equal(copy.detach().reshape(-1), stream.state()["copy"]), (count, expert, holder)
                    else:
                        there = torch.empty_like(parameter)
                        stream.decode(stream.encode(parameter), there.detach())
                        assert torch.equal(copy, there), (count, expert, holder)


@pytest.mark.parametrize("gradients", ["2bit", "ternary", "topk:keep=0.1"])
def test_nothing_that_is_owed_gets_lost_or_comes_twice(gradients):
    """With a learning rate of 0 gradients don't depend on codecs: what came home and what is owed is all there was."""
    plans = some_plans(Layout((2, 1, 1)), 5)
    owing = 0.0
    for count in (2, len(plans)):
        exact, lossy = (
            lossy_run(plans[:count], Codecs(gradients=codec), steps=count + 1, rate=0.0)
            for codec in ("exact", gradients)
        )
        for expert in range(5):
            total = sum_of(lossy, expert) + owed(lossy, expert)
            owing += float(owed(lossy, expert).norm())
            torch.testing.assert_close(total, sum_of(exact, expert), rtol=0, atol=1e-4, msg=f"{count}, expert {expert}")
    assert owing > 0.1, "nothing was owed: the test tells nothing"


def sum_of(workers: Sequence[dict], expert: int) -> torch.Tensor:
    """All gradients that were ever final at a home of the expert, flat."""
    parts = [worker["sums"] for worker in workers]
    names = (f"{expert}.gate_up", f"{expert}.down")
    return torch.cat([sum(part[name] for part in parts if name in part).reshape(-1) for name in names])


def owed(workers: Sequence[dict], expert: int) -> torch.Tensor:
    """What streams owe and what is kept for the next sum, flat."""
    total = torch.zeros(3 * HIDDEN * FFN)
    for holdings in (worker["layer"]._holdings for worker in workers):
        streams = [stream.state().get("codec.owed") for stream in holdings.outgoing.get(expert, [])]
        for parts in (streams, [part.reshape(-1) for part in holdings.carried.get(expert, [])]):
            if parts and parts[0] is not None:
                total += torch.cat(parts)
    return total


def test_a_plan_that_is_no_successor_or_comes_amid_a_step_is_refused():
    layout = Layout((1, 1))
    case = Case(num_experts=2, top_k=1, micro_tokens=tokens(layout, 3))
    first, second, third = sequence(layout, *[[maker(layout, 2)] for maker in (plain_ep, replicate_all, plain_ep)])
    other = Plan(1, layout, (plain_ep(layout, 3),), "test")

    def work(runtime: Runtime) -> None:
        with pytest.raises(ConfigError, match="attach"):
            runtime.switch(second)
        model = Model(case, runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtime.attach(model, optimizer)
        for wrong, message in ((third, "must have epoch 1, not 2"), (other, r"for layers of \[3\] experts")):
            with pytest.raises(PlanError, match=message):
                runtime.switch(wrong)
        with runtime.no_sync():
            loss_of(model(case.batches(0)[runtime.rank][0].float())).backward()
        with pytest.raises(ConfigError, match="plans change between"):
            runtime.switch(second)

    run_fleet(first, work)


def test_plans_that_differ_between_workers_are_named():
    layout = Layout((1, 1))
    case = Case(num_experts=2, top_k=1, micro_tokens=tokens(layout, 3))
    first, mine, theirs = sequence(layout, *[[maker(layout, 2)] for maker in (plain_ep, replicate_all, plain_ep)])

    def work(runtime: Runtime) -> None:
        model = Model(case, runtime)
        runtime.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        plan = mine if runtime.rank == 0 else dataclasses.replace(theirs, epoch=1)
        with pytest.raises(ConfigError, match="there differs: plan"):
            runtime.switch(plan)

    run_fleet(first, work)
