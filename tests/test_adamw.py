"""The runtime's AdamW: torch's steps, and the bytes of a step and an encoding that are done apart."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hybridep_rt
from hybridep_rt.codecs import kernels
from hybridep_rt.codecs.codec import Codecs, make_codec
from hybridep_rt.codecs.update import numbers, update_and_encode, update_of
from hybridep_rt.errors import ConfigError
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.makers import replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WEIGHTS = [
    *("exact", "bf16", "int8", "delta-1bit", "delta-1bit:t=2:scale=1.3", "delta-1bit:predict=0.5", "delta-2bit:t=3")
]


def walk(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], first: int, steps: int) -> None:
    """Steps with gradients of many sizes; every third step a parameter has none."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 10.0 ** (number - 2)
            parameter.grad = None if (step + number) % 3 == 0 else gradient.to(parameter.dtype)
        optimizer.step()


def start(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(9)
    shapes = ((3, 5), (257,), (), (2, 0), (16, 64))
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95), (0.3, 0.5)])
def test_the_same_bits_as_torch_in_float64(betas):
    mine, theirs = start(torch.float64), start(torch.float64)
    walk(hybridep_rt.AdamW(mine, **{**SETTINGS, "betas": betas}), mine, 0, 7)
    walk(torch.optim.AdamW(theirs, **{**SETTINGS, "betas": betas}), theirs, 0, 7)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95), (0.3, 0.5)])
def test_a_step_in_float32_is_right_to_rounding(betas):
    for step in range(6):
        mine, theirs = start(torch.float32), start(torch.float32)
        optimizer = torch.optim.AdamW(theirs, **{**SETTINGS, "betas": betas})
        walk(optimizer, theirs, 0, step)
        other = hybridep_rt.AdamW(mine, **{**SETTINGS, "betas": betas})
        other.load_state_dict(deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            for ours, torchs in zip(mine, theirs, strict=True):
                ours.copy_(torchs)
        walk(optimizer, theirs, step, 1)
        walk(other, mine, step, 1)
        for ours, torchs in zip(mine, theirs, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=2e-7, atol=1e-6 * SETTINGS["lr"])
            for name in ("exp_avg", "exp_avg_sq") if ours in other.state and ours.numel() else ():
                mine_now, theirs_now = other.state[ours][name], optimizer.state[torchs][name]
                # Averages may cancel out: rounding is then that of their terms.
                terms = 2e-7 * float(theirs_now.abs().max())
                torch.testing.assert_close(mine_now, theirs_now, rtol=3e-7, atol=terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_either_loads_what_the_other_saved(dtype):
    kinds = {"ours": hybridep_rt.AdamW, "torch": torch.optim.AdamW}
    ends = []
    for first, second in (("ours", "torch"), ("torch", "ours"), ("torch", "torch")):
        parameters = start(dtype)
        optimizer = kinds[first](parameters, **SETTINGS)
        walk(optimizer, parameters, 0, 4)
        resumed = kinds[second](parameters, lr=1.0)
        resumed.load_state_dict(optimizer.state_dict())
        walk(resumed, parameters, 4, 4)
        ends.append([p.detach() for p in parameters])
    for end in ends[:2]:
        for mine, theirs in zip(end, ends[2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_loaded_state_that_asks_for_more_is_refused():
    parameters = start(torch.float32)
    optimizer = hybridep_rt.AdamW(parameters)
    optimizer.load_state_dict(torch.optim.AdamW(parameters, amsgrad=True).state_dict())
    with pytest.raises(ConfigError, match="amsgrad"):
        walk(optimizer, parameters, 0, 1)


def test_a_closure_and_groups_with_their_own_rates():
    mine, theirs = start(torch.float64), start(torch.float64)
    ends = []
    for kind, parameters in ((hybridep_rt.AdamW, mine), (torch.optim.AdamW, theirs)):
        optimizer = kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5, "weight_decay": 0.0}])

        def closure(optimizer=optimizer, parameters=parameters):
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in parameters)
            loss.backward()
            return loss.detach()

        ends.append([float(optimizer.step(closure)) for _ in range(3)])
    assert ends[0] == ends[1]
    assert all(map(torch.equal, mine, theirs))


@given(
    st.sampled_from([*WEIGHTS, "delta-topk:keep=0.05"]), st.sampled_from([1, 255, 256, 257, 5000, 40_000]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_one_pass_gives_the_bytes_of_two(spec, elements, with_moment, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(elements, generator=generator)

    def arrays(first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return first.clone(), torch.zeros(elements), torch.zeros(elements)

    first = draw()
    one, two = arrays(first), arrays(first)
    fused, apart = make_codec(spec), make_codec(spec)
    for step in range(1, 5):
        gradient, moment = draw(), draw().square() if with_moment and step > 1 else None
        of_step = numbers(0.01, (0.9, 0.95), 1e-8, 0.1, step)
        update = update_of(one[0], gradient, *one[1:], moment, of_step)
        later = update_of(two[0], gradient, *two[1:], moment, of_step)
        assert update is not None
        assert later is not None
        payload = bytes(update_and_encode(fused, one[0], update))
        later.run()
        assert payload == bytes(apart.encode(two[0]))
        assert all(map(torch.equal, one, two))


def test_a_second_moment_from_elsewhere_takes_the_place_of_the_own():
    ends = []
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.float64).to(dtype))
        optimizer = hybridep_rt.AdamW([parameter], **SETTINGS)
        moment = torch.linspace(0.5, 2, 300, dtype=torch.float64).to(dtype)

        def publish(step, parameter=parameter, moment=moment):
            update = step(parameter, moment)
            assert (update is None) == (parameter.dtype is torch.float64)
            if update is not None:
                update.run()
            assert step(parameter, moment) is None

        optimizer.publish_with(publish)
        walk(optimizer, [parameter], 1, 2)
        bias = 1 - 0.95**2
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], moment * bias)
        ends.append(parameter.detach().double())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)


def test_kernels_release_the_interpreter_lock():
    compiled = [each for each in vars(kernels).values() if hasattr(each, "targetoptions")]
    assert len(compiled) > 20
    assert all(each.targetoptions["nogil"] for each in compiled)


@pytest.mark.parametrize("spec", WEIGHTS)
def test_a_run_sends_the_same_bytes_whether_it_encodes_in_the_step_or_after(spec):

    def work(runtime, publishes):
        dense = nn.Linear(8, 12)
        with torch.no_grad():
            dense.weight.copy_(torch.linspace(-1, 1, 96).view(12, 8))
            dense.bias.zero_()
        model = nn.Sequential(dense, *(MoELayer(12, 20, 4, 2, runtime=runtime) for _ in range(2)))
        optimizer = hybridep_rt.AdamW(model.parameters(), **SETTINGS)
        runtime.attach(model, optimizer)
        if not publishes:
            optimizer.publish_with(lambda step: None)
            optimizer.register_step_post_hook(lambda *_: runtime.publish())
        sent = []
        original = runtime.wan.send

        def send(to, channel, at, payload, **options):
            if channel.startswith("experts"):
                sent.append((to, channel, at, b"".join(map(bytes, payload))))
            original(to, channel, at, payload, **options)

        runtime.wan.send = send
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + runtime.rank))
            model(x).square().mean().backward()
            optimizer.step()
        return sent

    layout = Layout((2, 1))
    plan = Plan(0, layout, (replicate_all(layout, 4),) * 2, "test")
    codecs = Codecs(weights=spec)
    one, two = (run_fleet(plan, lambda r, p=p: work(r, p), codecs=codecs) for p in (True, False))
    assert one == two
    assert all(one)
    layers = [channel for _, channel, _, _ in one[0]]
    assert layers[: len(layers) // 3] == sorted(layers[: len(layers) // 3])


def test_numbers_are_rounded_once():
    found = numbers(0.1, (0.9, 0.999), 1e-8, 0.0, 1)
    assert found.rate == np.float32(0.1 / (1 - 0.9))
    assert found.root == np.float32((1 - 0.999) ** 0.5)
