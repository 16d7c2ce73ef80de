"""The paper's SR in a running job: every worker holds the same mean, and copies are that plus the largest residuals."""

from __future__ import annotations

import pytest
import torch

from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.ladder import parse_rung
from hybridep_rt.planner.makers import domains, replicate_all
from hybridep_rt.planner.plan import Layout
from tests.fleet import run_fleet
from tests.test_rungs import EXPERTS, build, plan, train
from tests.test_session import data

STEPS = 7


def watch(runtime):
    """After each version was used: the mean, and the copies and homes that this worker has."""
    model, optimizer = build(runtime)
    holdings = model[1]._bound
    seen = []
    for step in range(STEPS):
        if step:
            train(runtime, model, optimizer, step)
        with torch.no_grad():
            model(data(runtime).float())
        tensors = {e: [leaf.detach().clone() for leaf in leaves] for e, leaves in holdings._leaves.items()}
        seen.append((list(holdings._mean.tensors), tensors, set(holdings._parameters)))
    return seen


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1, 1)], ids=str)
def test_copies_are_the_mean_and_the_largest_residuals(workers, period):
    layout = Layout(workers)
    maker = replicate_all if period == 1 else lambda layout, e: domains(layout, e, (layout.dcs,))
    spec = f"sr:keep=0.1:t_shared={period}"
    workers_saw = run_fleet(plan(maker, layout), watch, rung=parse_rung(f"weights={spec}"))
    exact = []
    for version in range(STEPS):
        homes = {e: held[e] for _, held, own in (saw[version] for saw in workers_saw) for e in own}
        assert sorted(homes) == list(range(EXPERTS))
        exact.append(homes)
        # Of the version before the one that first used it; the very first mean has none before it.
        since = version // period * period
        expected = [torch.stack(each).mean(0) for each in zip(*exact[max(since - 1, 0)].values(), strict=True)]
        for mean, held, own in (saw[version] for saw in workers_saw):
            for tensor, first, wanted in zip(mean, workers_saw[0][version][0], expected, strict=True):
                assert torch.equal(tensor, first)
                torch.testing.assert_close(tensor, wanted.reshape(-1), rtol=0, atol=1e-6)
            for expert in held.keys() - own:
                for copy, weights, tensor in zip(held[expert], homes[expert], mean, strict=True):
                    assert torch.equal(copy, restored(spec, weights, tensor))


def restored(spec, weights, mean):
    sender, receiver = make_codec(spec), make_codec(spec)
    sender.set_shared(mean, 1)
    receiver.set_shared(mean, 1)
    into = torch.empty_like(weights)
    receiver.decode(sender.encode(weights), into)
    return into


def test_a_mean_is_used_while_its_codec_is():
    def work(runtime):
        model, optimizer = build(runtime)
        for step, text in enumerate(["weights=sr:t_shared=1", "exact", "weights=sr:keep=0.5", "safe", "exact"]):
            runtime.set_codec(text)
            train(runtime, model, optimizer, step)
        with torch.no_grad():
            model(data(runtime).float())
        holdings = model[1]._bound
        return holdings._mean, {e: leaves[0].detach().clone() for e, leaves in holdings._leaves.items()}

    results = run_fleet(plan(), work)
    assert all(shared is None for shared, _ in results)
    for _, held in results:
        assert all(torch.equal(held[e], results[0][1][e]) for e in held)
