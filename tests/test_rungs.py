"""Rungs of the codec ladder in a running job: warm-up, changes between steps, and what must not get lost in them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridep_rt.codecs import ladder
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import LADDER, Rung, parse_rung
from hybridep_rt.errors import ConfigError
from hybridep_rt.moe.layer import MoELayer, aux_loss
from hybridep_rt.planner.makers import domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.protocol.messages import Traffic
from tests.fleet import run_fleet
from tests.oracle import Case, compare, train_distributed
from tests.test_session import ONE_AT_A_TIME, data, everything

LAYOUT = Layout((2, 1))
EXPERTS, HIDDEN, FFN = 4, 6, 5


def plan(maker=replicate_all, layout=LAYOUT):
    return Plan(0, layout, (maker(layout, EXPERTS),), "test")


def build(runtime, *, lr=0.1, optimizer=torch.optim.SGD):
    with ONE_AT_A_TIME:
        torch.manual_seed(7)
        model = nn.Sequential(
            nn.Linear(3, HIDDEN), MoELayer(HIDDEN, FFN, EXPERTS, 2, runtime=runtime), nn.Linear(HIDDEN, 2)
        )
    made = optimizer(model.parameters(), lr=lr)
    runtime.attach(model, made)
    return model, made


def train(runtime, model, optimizer, step=0):
    optimizer.zero_grad()
    loss = model(data(runtime, step).float()).square().mean() + aux_loss(model)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", LADDER[0]),
        ("lean", LADDER[3]),
        ("tokens=bf16", Rung("exact", Codecs(tokens="bf16"), 0)),
        ("safe,gradients=2bit", replace(LADDER[1], codecs=replace(LADDER[1].codecs, gradients="2bit"))),
        ("default,warm_up=7", replace(LADDER[2], warm_up_steps=7)),
    ],
)
def test_a_rung_and_what_differs_from_it(text, expected):
    assert parse_rung(text) == expected


def test_what_differs_leaves_the_codecs_of_the_warm_up(monkeypatch):
    light = replace(LADDER[2], warm_up=Codecs(weights="int8", gradients="4bit"))
    monkeypatch.setattr(ladder, "LADDER", (light,))
    changed = parse_rung("default,gradients=2bit,warm_up=7")
    first, later = changed.codecs_at(6), changed.codecs_at(7)
    assert (first.weights, first.gradients, first.tokens) == ("int8", "4bit", light.codecs.tokens)
    assert (later.weights, later.gradients) == (light.codecs.weights, "2bit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", 'no rung "fast": choose one of exact, safe'),
        ("default,lean", '"lean" should be KIND=CODEC'),
        ("default,colours=bf16", "one of tokens, weights"),
        ("tokens=bf16,tokens=int8", "each KIND once"),
        ("default,warm_up=-1", "warm_up=STEPS"),
        ("gradients=delta-1bit", "not one for gradients"),
        ("dense=2bit:vs=16", "leave out vs"),
        ("dense=1bit:adapt=1", "leave out vs and adapt"),
        ("gradients=4bit:adapt=1", 'no option "adapt"'),
    ],
)
def test_a_rung_that_is_none_says_what_to_write(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_rung(text)


def test_gradients_of_one_bit_need_an_optimizer_that_takes_second_moments():
    rung = parse_rung("gradients=1bit:t=2:vs=32")
    assert rung.without_moments().codecs.gradients == "2bit:t=2"
    assert all(each.without_moments() == each for each in LADDER)

    def work(runtime):
        build(runtime)
        return runtime.rung.codecs.gradients

    assert run_fleet(plan(), work, rung=rung) == ["2bit:t=2"] * 3


def test_a_warm_up_is_exact_and_ends_everywhere_at_once():
    """The codecs set in with what step 3 sends: a key frame, so that the weights of step 3 are exact, too."""

    def work(runtime):
        model, optimizer = build(runtime)
        seen = []
        for step in range(6):
            train(runtime, model, optimizer, step)
            seen.append(everything(model))
        return seen

    exact = run_fleet(plan(), work)
    warmed = run_fleet(plan(), work, rung=parse_rung("weights=delta-1bit,gradients=1bit,warm_up=3"))
    for expected, found in zip(exact, warmed, strict=True):
        same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(expected, found, strict=True)]
        assert same[:3] == [True] * 3
        assert not same[5]


@pytest.mark.parametrize("maker", [lambda layout, e: domains(layout, e, (2,)), replicate_all], ids=["dcs", "all"])
@pytest.mark.parametrize("layout", [LAYOUT, Layout((2, 2))], ids=str)
def test_lossless_changes_leave_the_run_as_it_is(maker, layout):
    """fp32 loses nothing of these, nor do key frames, whether anybody used the copies in between or not."""

    def work(runtime, texts):
        model, optimizer = build(runtime)
        for step in range(6):
            train(runtime, model, optimizer, step)
            if step in texts:
                runtime.set_codec(texts[step])
        return everything(model)

    unchanged = run_fleet(plan(maker, layout), lambda runtime: work(runtime, {}))
    texts = {0: "tokens=fp32,weights=fp32", 2: "gradients=fp32,dense=fp32", 4: "weights=delta-1bit"}
    changed = run_fleet(plan(maker, layout), lambda runtime: work(runtime, texts))
    for expected, found in zip(unchanged, changed, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("first", ["exact", "weights=sr:keep=0.5:t_shared=1"])
def test_copies_that_are_a_step_behind_are_decoded_by_the_codec_they_were_sent_in(first):
    def work(runtime, texts):
        model, optimizer = build(runtime)
        for step in range(6):
            train(runtime, model, optimizer, step)
            if step in texts:
                runtime.set_codec(texts[step])
        return everything(model)

    texts = {1: "exact", 3: "weights=delta-2bit", 4: "weights=fp32", 5: "weights=int8"}
    sent = {1: "exact", 3: "weights=fp32"}
    layout = Layout((2, 1, 1))
    rung = parse_rung(first)
    found = run_fleet(plan(layout=layout), lambda runtime: work(runtime, texts), rung=rung, staleness=1)
    expected = run_fleet(plan(layout=layout), lambda runtime: work(runtime, sent), rung=rung, staleness=1)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_oracle_holds_across_changes():
    """fp32 rounds the oracle's float64; a gradient that was lost or sent twice would show."""
    layout = Layout((2, 1))
    case = Case(num_experts=4, top_k=2, layers=2, micro_tokens=((5, 2), (3, 0), (4, 6)), steps=4)
    both = Plan(0, layout, (replicate_all(layout, 4), domains(layout, 4, (2,))), "test")
    texts = ["weights=fp32,gradients=fp32,dense=fp32", "tokens=fp32,token_gradients=exact", "exact", "weights=fp32"]

    def work(runtime):
        return train_distributed(case, runtime, after_step=lambda step: runtime.set_codec(texts[step]))

    compare(case, both, run_fleet(both, work), tolerance=1e-4)


@pytest.mark.parametrize("maker", [plain_ep, replicate_all, lambda layout, e: domains(layout, e, (2,))])
def test_the_oracle_holds_where_all_is_packed_without_loss(maker):
    layout = Layout((2, 1))
    case = Case(num_experts=4, top_k=2, layers=2, micro_tokens=((5, 2), (3, 0), (4, 6)), steps=3)
    packed = Plan(0, layout, (maker(layout, 4),) * 2, "test")
    kinds = ("tokens", "token_gradients", "weights", "gradients", "dense")
    rung = parse_rung(",".join(f"{kind}=exact:zstd=1" for kind in kinds))
    compare(case, packed, run_fleet(packed, lambda runtime: train_distributed(case, runtime), rung=rung))


def test_a_change_before_the_last_weights_were_used():
    """What was published in the old codec is decoded by it, though another is in use already."""

    def work(runtime):
        model, optimizer = build(runtime)
        train(runtime, model, optimizer)
        for text in ("weights=delta-2bit", "weights=int8", "exact"):
            runtime.set_codec(text)
            runtime.publish()
        with torch.no_grad():
            return model(data(runtime).float())

    def plain(runtime):
        model, optimizer = build(runtime)
        train(runtime, model, optimizer)
        with torch.no_grad():
            return model(data(runtime).float())

    for expected, found in zip(run_fleet(plan(), plain), run_fleet(plan(), work), strict=True):
        assert torch.equal(expected, found)


def test_workers_that_ask_for_different_rungs_are_named():
    def work(runtime):
        build(runtime)
        runtime.set_codec("safe" if runtime.rank == 2 else "exact")

    with pytest.raises(ConfigError, match=r'there differs: codecs at worker 0 of DC "b"'):
        run_fleet(plan(), work)


@pytest.mark.parametrize("kind", ["gradients", "dense"])
@pytest.mark.parametrize("codec", ["4bit", "2bit", "topk:keep=0.1"])
def test_no_gradient_is_lost_in_a_change(kind, codec):
    """Weights stand still; after the change to exact the sum of all gradients is what it would have been."""

    def work(runtime, texts):
        model, optimizer = build(runtime, lr=0.0)
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(7):
            runtime.set_codec(texts[step])
            train(runtime, model, optimizer, step)
            for name, parameter in model.named_parameters():
                total[name] += parameter.grad
        return total, math.hypot(*(each.owed_norm for each in runtime.codec_figures().values()))

    texts = [f"{kind}={codec}"] * 3 + [f"{kind}=2bit:block=128", f"{kind}={codec}", f"{kind}={codec}", "exact"]
    exact = run_fleet(plan(), lambda runtime: work(runtime, ["exact"] * 7))
    coarse = run_fleet(plan(), lambda runtime: work(runtime, texts))
    still = run_fleet(plan(), lambda runtime: work(runtime, [*texts[:6], texts[5]]))
    assert sum(owed for _, owed in still) > 0
    for (expected, _), (found, debt), (behind, _) in zip(exact, coarse, still, strict=True):
        assert debt == 0
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        assert any(not torch.equal(behind[name], found[name]) for name in behind)


@pytest.mark.parametrize("codec", ["int8", "4bit", "2bit", "1bit", "topk:keep=0.2"])
def test_dense_parameters_stay_equal_everywhere_under_coarse_sums(codec):
    layout = Layout((2, 1, 2))

    def work(runtime):
        model, optimizer = build(runtime)
        for step in range(5):
            train(runtime, model, optimizer, step)
        return {name: p.detach().clone() for name, p in model.named_parameters() if "experts" not in name}

    results = run_fleet(plan(plain_ep, layout), work, codecs=Codecs(dense=codec))
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in results[0])


def test_tokens_and_their_gradients_have_codecs_of_their_own():
    def work(runtime):
        model, optimizer = build(runtime)
        model(data(runtime).float())
        forward = dict(runtime.metrics.snapshot().sent_bytes)
        train(runtime, model, optimizer)
        return forward, runtime.metrics.snapshot().sent_bytes, everything(model)

    def spent(text):
        there, back, values = [], [], []
        for forward, both, found in run_fleet(plan(plain_ep), work, rung=parse_rung(text)):
            first = sum(n for (_, traffic), n in forward.items() if traffic == Traffic.TOKENS)
            total = sum(n for (_, traffic), n in both.items() if traffic == Traffic.TOKENS)
            there.append(first)
            back.append(total - 2 * first)
            values.append(found)
        return sum(there), sum(back), values

    exact, alike, mixed = spent("exact"), spent("tokens=bf16"), spent("tokens=bf16,token_gradients=exact")
    assert mixed[0] == alike[0] < exact[0]
    assert mixed[1] == exact[1] > alike[1]
    assert all(math.isfinite(float(value.sum())) for value in mixed[2][0].values())
