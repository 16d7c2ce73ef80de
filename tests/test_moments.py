"""Second moments that senders tell, added up at the home and used by AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridep_rt
from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.codecs.ladder import parse_rung
from hybridep_rt.moe.layer import MoELayer, aux_loss
from hybridep_rt.moe.moments import HomeMoment
from hybridep_rt.planner.makers import replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet
from tests.test_session import ONE_AT_A_TIME

SPEC = "1bit:vs=2:beta=0.8"


def home() -> HomeMoment:
    moment = make_codec(SPEC).new_moment()
    assert moment is not None
    return HomeMoment(moment)


def test_the_sum_over_dcs_of_mean_squares():
    senders, receivers = ([make_codec(SPEC) for _ in range(2)] for _ in range(2))
    at_home, averages, elements = home(), [torch.zeros(1000) for _ in range(3)], 1000
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 41):
        gradients = [torch.randn(elements, generator=generator) * 10.0**size for size in (-3, 0, 1)]
        for average, gradient in zip(averages, gradients, strict=True):
            average.mul_(0.8).add_(gradient.square(), alpha=0.2)
        at_home.observe(gradients[0])
        total, decoded = gradients[0].clone(), torch.empty(elements)
        for sender, receiver, gradient in zip(senders, receivers, gradients[1:], strict=True):
            receiver.decode(sender.encode(gradient), decoded)
            total += decoded
        total /= 3
        at_home.add_up(receivers, 3, total)
        found = at_home.of(total)
        assert (found is None) == (step < 2)
        assert at_home.of(total) is None
    expected = (averages[0] / (1 - 0.8**40) + sum(r.second_moment for r in receivers)) / 9
    torch.testing.assert_close(found, expected)
    assert float((found.sum() / (sum(averages).sum() / 9)).log2().abs()) < 0.3


def test_a_gradient_that_was_scaled_scales_its_moment():
    at_home, gradient = home(), torch.linspace(1, 2, 300)
    at_home.observe(gradient)
    at_home.add_up([], 1, gradient)
    torch.testing.assert_close(at_home.of(gradient * 0.25), gradient.square() / 16)
    at_home.add_up([], 1, gradient)
    assert at_home.of(gradient * float("inf")) is None


def test_a_dc_that_never_had_a_gradient_adds_nothing():
    at_home, gradient = home(), torch.linspace(1, 2, 300)
    at_home.observe(gradient)
    at_home.add_up([make_codec(SPEC)], 2, gradient)
    torch.testing.assert_close(at_home.of(gradient), gradient.square() / 4)


def train(runtime, steps: int, optimizer_of) -> tuple[float, list[torch.Tensor]]:
    """A teacher's function of few dimensions: the mean loss of the last steps, and the experts' second moments."""
    with ONE_AT_A_TIME:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 16), MoELayer(16, 24, 4, 2, runtime=runtime), nn.Linear(16, 1))
    optimizer = optimizer_of(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    runtime.attach(model, optimizer)
    generator = torch.Generator().manual_seed(runtime.rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 4, generator=generator)
        target = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].sin()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        (loss + aux_loss(model)).backward()
        optimizer.step()
        losses.append(float(runtime.all_reduce(loss, "mean")))
    squares = [optimizer.state[p]["exp_avg_sq"] for p in model[1].experts.parameters()]
    return sum(losses[-30:]) / 30, squares


def test_the_default_rung_ends_near_exact_training():
    layout = Layout((1, 1))
    plan = Plan(0, layout, (replicate_all(layout, 4),), "test")
    exact, coarse = (
        run_fleet(plan, lambda r: train(r, 160, hybridep_rt.AdamW), rung=parse_rung(rung))[0][0]
        for rung in ("exact", "default,warm_up=20")
    )
    assert exact < 0.5
    assert coarse == pytest.approx(exact, rel=0.15)


def test_the_home_s_second_moment_is_what_the_dcs_tell():
    layout, told = Layout((1, 1)), []
    plan = Plan(0, layout, (replicate_all(layout, 4),), "test")
    add_up = HomeMoment.add_up

    def spy(self, senders, divisor, gradient):
        add_up(self, senders, divisor, gradient)
        assert all(isinstance(sender, Feedback) for sender in senders)
        parts = [self._own.unbiased(), *(sender.second_moment for sender in senders)]
        if not any(part is None for part in parts):
            told.append(sum(parts) / divisor**2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HomeMoment, "add_up", spy)
        squares = run_fleet(plan, lambda r: train(r, 6, hybridep_rt.AdamW), rung=parse_rung("gradients=1bit:vs=2"))
    expected = sorted(float(moment.sum() * (1 - 0.95**6)) for moment in told[-8:])
    found = sorted(float(square.sum()) for _, of_worker in squares for square in of_worker)
    assert found == pytest.approx(expected, rel=1e-4)
