"""What a training loop sees of the runtime, on the in-memory ports."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import parse_rung
from hybridep_rt.errors import ConfigError, HybridEPError, PeerLost, PositionMismatch
from hybridep_rt.moe.layer import MoELayer, aux_loss
from hybridep_rt.planner.makers import domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet

LAYOUT = Layout((2, 1))
EXPERTS = 4


def plan(maker=plain_ep, layout=LAYOUT):
    return Plan(0, layout, (maker(layout, EXPERTS),), "test")


ONE_AT_A_TIME = threading.Lock()
"""The workers are threads here and share torch's random numbers."""


def build(runtime, hidden=6):
    with ONE_AT_A_TIME:
        torch.manual_seed(7)
        moe = MoELayer(hidden, 5, EXPERTS, 2, runtime=runtime)
        model = nn.Sequential(nn.Linear(3, hidden), moe, nn.Linear(hidden, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime.attach(model, optimizer)
    return model, optimizer


def data(runtime, step=0, tokens=5):
    generator = torch.Generator().manual_seed(100 * step + runtime.rank)
    return torch.randn(tokens, 3, generator=generator, dtype=torch.float64)


def train(runtime, model, optimizer, step=0):
    optimizer.zero_grad()
    loss = model(data(runtime, step)).square().mean() + aux_loss(model)
    loss.backward()
    optimizer.step()


def everything(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_places():
    seen = run_fleet(plan(), lambda r: (r.rank, r.world_size, r.dc, r.local_rank, r.site_size))
    assert seen == [(0, 3, "a", 0, 2), (1, 3, "a", 1, 2), (2, 3, "b", 0, 1)]


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_all_reduce(op, expected):
    def work(runtime):
        runtime.barrier()
        return runtime.all_reduce(torch.full((2, 2), runtime.rank + 1.0), op)

    for result in run_fleet(plan(), work):
        assert torch.equal(result, torch.full((2, 2), expected))


def test_all_reduce_of_less_than_one_element_per_worker_and_of_many():
    def work(runtime):
        return [runtime.all_reduce(torch.arange(n, dtype=torch.float64) + runtime.rank) for n in (0, 1, 2, 1001)]

    for results in run_fleet(plan(), work):
        for total in results:
            assert torch.equal(total, 3 * torch.arange(len(total), dtype=torch.float64) + 3)


def test_all_reduce_names_the_operations_it_knows():
    with pytest.raises(ConfigError, match='"sum", "mean" and "max", not "min"'):
        run_fleet(plan(), lambda r: r.all_reduce(torch.ones(1), "min"))


def test_mailbox_between_any_two_workers():
    def work(runtime):
        box = runtime.mailbox("greetings")
        for peer in range(runtime.world_size):
            box.send(peer, f"{runtime.rank}->{peer}".encode())
        box.send(("b", 0), b"by name")
        received = [bytes(box.receive(peer)) for peer in range(runtime.world_size)]
        if runtime.rank == 2:
            received += [bytes(asyncio.run(box.receive_async(("a", 1))))]
        return received

    for rank, received in enumerate(run_fleet(plan(), work)):
        assert received[:3] == [f"{peer}->{rank}".encode() for peer in range(3)]
        assert received[3:] == ([b"by name"] if rank == 2 else [])


def test_mailbox_waits_no_longer_than_asked():
    def work(runtime):
        if runtime.rank == 0:
            with pytest.raises(TimeoutError, match=r'user/quiet .*worker 0 of DC "b"'):
                runtime.mailbox("quiet").receive(("b", 0), timeout_s=0.05)
        runtime.barrier()

    run_fleet(plan(), work)


def test_mailbox_says_that_a_peer_has_ended():
    def work(runtime):
        if runtime.rank == 0:
            runtime.mailbox("quiet").receive(("b", 0))

    with pytest.raises(PeerLost, match='worker 0 of DC "b": ended'):
        run_fleet(plan(), work)


def test_mailbox_refuses_unknown_places_and_bad_names():
    def work(runtime):
        with pytest.raises(ConfigError, match='no DC "z": there are a, b'):
            runtime.mailbox("x").send(("z", 0), b"")
        with pytest.raises(ConfigError, match="no worker 4 in DC 1"):
            runtime.mailbox("x").send(("b", 4), b"")
        with pytest.raises(ConfigError, match="1 to 48"):
            runtime.mailbox("")

    run_fleet(plan(), work)


def test_a_worker_in_eval_mode_is_named():
    def work(runtime):
        model, optimizer = build(runtime)
        if runtime.rank == 2:
            with torch.no_grad():
                model(data(runtime))
        train(runtime, model, optimizer)

    with pytest.raises(PositionMismatch, match="under no_grad") as caught:
        run_fleet(plan(), work)
    assert "step 0, micro-batch 0, layer 0" in caught.value.mine


def test_a_worker_that_skipped_a_step_is_named():
    def work(runtime):
        model, optimizer = build(runtime)
        loss = model(data(runtime)).sum()
        loss.backward()
        if runtime.rank != 1:
            optimizer.step()
        train(runtime, model, optimizer)

    with pytest.raises(PositionMismatch) as caught:
        run_fleet(plan(), work)
    assert {caught.value.mine.split(",")[0], caught.value.theirs.split(",")[0]} == {"step 0", "step 1"}


@pytest.mark.parametrize("early", [0, 2])
def test_a_worker_whose_data_ran_out_is_named(early):
    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(2 if runtime.rank == early else 3):
            train(runtime, model, optimizer, step)

    with pytest.raises(HybridEPError) as caught:
        run_fleet(plan(), work, operation_s=5)
    assert "step 2" in str(caught.value)


@pytest.mark.parametrize("maker", [plain_ep, replicate_all])
def test_a_gradient_that_is_not_finite_at_one_expert_is_seen_by_all(maker):
    def work(runtime):
        model, _ = build(runtime)
        if runtime.rank == 2:
            with torch.no_grad():
                next(iter(model[1].experts.parameters())).fill_(float("inf"))
        runtime.publish()
        model(data(runtime)).square().mean().backward()
        own = [bool(torch.isfinite(p.grad).all()) for p in model.parameters()]
        norm = runtime.clip_grad_norm_(1.0)
        return runtime.found_nonfinite, all(own), bool(torch.isfinite(norm))

    assert run_fleet(plan(maker), work) == [(True, False, False)] * 3


def test_gradient_scaling_skips_the_step_everywhere_or_nowhere():
    def work(runtime):
        model, optimizer = build(runtime)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1000)
        hot = [step == 1 and runtime.rank == 0 for step in range(3)]
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if hot[step] else 1.0
            scaler.scale(model(data(runtime, step)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return runtime.clock.step, scaler.get_scale()

    assert run_fleet(plan(), work) == [(2, 8.0)] * 3


def test_dense_parameters_start_as_the_first_workers():
    def work(runtime):
        torch.manual_seed(runtime.rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(runtime.rank + 1.0)
        runtime.attach(model, torch.optim.SGD(model.parameters()))
        return model[0].weight.detach().clone(), model[1].running_mean.clone()

    results = run_fleet(Plan(0, LAYOUT, (), "no layers"), work)
    for weight, mean in results:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(mean, torch.ones(4))


def test_a_model_that_differs_is_named():
    def work(runtime):
        build(runtime, hidden=6 + (runtime.rank == 2))

    with pytest.raises(ConfigError, match=r'there differs: model at worker 0 of DC "b"'):
        run_fleet(plan(), work)


def test_codecs_that_differ_are_named():
    def work(runtime):
        if runtime.rank == 1:
            runtime.rung = parse_rung("tokens=bf16")
        build(runtime)

    with pytest.raises(ConfigError, match=r'there differs: codecs at worker 1 of DC "a"'):
        run_fleet(plan(), work)


def test_forward_before_attach_says_what_to_do():
    def work(runtime):
        MoELayer(4, 4, EXPERTS, 1, runtime=runtime)(torch.ones(1, 4))

    with pytest.raises(ConfigError, match="attach"):
        run_fleet(plan(), work)


@pytest.mark.parametrize("maker", [plain_ep, lambda layout, e: domains(layout, e, (2,)), replicate_all])
def test_bf16_on_the_wire_stays_close_to_exact(maker):
    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(3):
            train(runtime, model, optimizer, step)
        return everything(model)

    exact = run_fleet(plan(maker), work)
    short = run_fleet(plan(maker), work, codecs=Codecs("bf16", "bf16", "bf16"))
    for expected, found in zip(exact, short, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.002)
    assert any(not torch.equal(exact[n][k], short[n][k]) for n in range(3) for k in exact[n])


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        ("tokens=int8,weights=int8,gradients=int8", 0.05),
        ("tokens=fp8,weights=delta-2bit,gradients=4bit", 0.2),
        ("weights=delta-1bit,gradients=1bit", 0.3),
        ("weights=delta-topk,gradients=topk:keep=0.1", 0.3),
        ("dense=bf16", 0.05),
    ],
)
@pytest.mark.parametrize("layout", [LAYOUT, Layout((2, 2))], ids=str)
@pytest.mark.parametrize("maker", [lambda layout, e: domains(layout, e, (2,)), replicate_all], ids=["dcs", "all"])
def test_light_codecs_train(maker, layout, spec, tolerance):
    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(6):
            train(runtime, model, optimizer, step)
        return everything(model)

    exact = run_fleet(plan(maker, layout), work)
    light = run_fleet(plan(maker, layout), work, codecs=Codecs.parse(spec))
    for expected, found in zip(exact, light, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("maker", [plain_ep, replicate_all])
def test_two_backwards_without_zero_grad_add_up(maker):
    def work(runtime):
        model, _ = build(runtime)
        model(data(runtime, 0)).square().mean().backward()
        model(data(runtime, 1)).square().mean().backward()
        both = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        model(data(runtime, 0)).square().mean().backward()
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        model(data(runtime, 1)).square().mean().backward()
        return both, {name: p.grad + first[name] for name, p in model.named_parameters()}

    for both, apart in run_fleet(plan(maker), work):
        for name, value in both.items():
            torch.testing.assert_close(value, apart[name], rtol=0, atol=1e-12)


def test_weights_that_are_loaded_reach_the_copies_with_publish():
    def work(runtime):
        model, _ = build(runtime)
        with torch.no_grad():
            before = model(data(runtime))
            for parameter in model[1].experts.parameters():
                parameter.mul_(2)
            runtime.publish()
            return before, model(data(runtime))

    plain = run_fleet(plan(plain_ep), work)
    copies = run_fleet(plan(replicate_all), work)
    for (_, expected), (before, found) in zip(plain, copies, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert not torch.equal(before, found)


def test_a_layer_that_the_loss_does_not_use_changes_nothing():
    def work(runtime):
        model, optimizer = build(runtime)
        model(data(runtime))
        optimizer.zero_grad()
        model[0](data(runtime)).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    for gradients in run_fleet(plan(replicate_all), work):
        assert gradients["0.weight"] is not None
        assert gradients["2.weight"] is None


def test_a_graph_is_walked_once():
    def work(runtime):
        model, _ = build(runtime)
        loss = model(data(runtime)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once only"):
            loss.backward()

    run_fleet(Plan(0, Layout((1,)), (plain_ep(Layout((1,)), EXPERTS),), "test"), work)


def test_wan_bytes_are_counted_by_destination_and_class():
    def work(runtime):
        model, optimizer = build(runtime)
        train(runtime, model, optimizer)
        return runtime.metrics.snapshot()

    counted = run_fleet(plan(), work)
    assert {key[0] for key in counted[0].sent_bytes} == {1}
    assert {key[0] for key in counted[2].sent_bytes} == {0}
    assert all(nbytes > 0 for snapshot in counted for nbytes in snapshot.sent_bytes.values())
