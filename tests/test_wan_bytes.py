"""What the planner counts for each rung is what workers send to other DCs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import hybridep_rt
from hybridep_rt.codecs.codec import bytes_per_element
from hybridep_rt.codecs.ladder import LADDER, parse_rung
from hybridep_rt.codecs.sizes import wire_bytes
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.economics import Workload, price
from hybridep_rt.planner.makers import domains
from hybridep_rt.planner.plan import Layout, Plan
from tests.fleet import run_fleet
from topology import parse

HIDDEN, FFN, EXPERTS, TOKENS = 128, 256, 8, 80
SITES = """
cluster: t
datacenters: {a: {workers: 2}, b: {workers: 1}, c: {workers: 1}, d: {workers: 2}}
defaults: {link: {bandwidth: 100 Mbit/s, rtt: 10 ms}}
"""
SETTLE, STEPS = 60, 4
"""Where bytes depend on the values: first steps of an optimizer are all as large and take more, and strides need some
gradients of one size, as those of noise are under a small learning rate."""


def work(runtime, hidden=HIDDEN, ffn=FFN):
    """Bytes by destination over some steps, when streams have begun; the shape of the layer and the dense values."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, hidden), MoELayer(hidden, ffn, EXPERTS, EXPERTS, runtime=runtime))
    optimizer = hybridep_rt.AdamW(model.parameters(), lr=1e-5)
    runtime.attach(model, optimizer)
    generator = torch.Generator().manual_seed(runtime.rank)

    def step():
        optimizer.zero_grad()
        x, wanted = (torch.randn(TOKENS, size, generator=generator) for size in (16, hidden))
        (model(x) - wanted).square().mean().backward()
        optimizer.step()

    for _ in range(SETTLE if "ternary" in runtime.rung.codecs.gradients else 2):
        step()
    before = runtime.metrics.snapshot()
    for _ in range(STEPS):
        step()
    sent = Counter()
    for (dc, _), nbytes in runtime.metrics.snapshot().minus(before).sent_bytes.items():
        sent[dc] += nbytes / STEPS
    dense = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    return sent, model[1].shape, dense


@pytest.mark.parametrize(
    "rung",
    [*LADDER, parse_rung("tokens=fp8,token_gradients=bf16,weights=int8,gradients=2bit,dense=bf16")],
    ids=lambda rung: rung.name,
)
def test_predicted_and_counted_bytes_agree(rung):
    """All tokens choose all experts, so that what crosses is known; domains of two DCs send both tokens and experts."""
    topology = parse(SITES)
    layout = Layout(topology.workers_per_dc)
    layer = domains(layout, EXPERTS, (2,))
    results = run_fleet(Plan(0, layout, (layer,), "test"), work, rung=replace(rung, warm_up_steps=0))
    _, shape, dense = results[0]
    for dc, workers in enumerate(layout.workers_per_dc):
        mine = range(layout.first(dc), layout.first(dc) + workers)
        counted = sum(sum(results[worker][0].values()) for worker in mine)
        assert counted == pytest.approx(predicted_bytes(rung, topology, layer, shape, dense, dc), rel=0.02)


def predicted_bytes(rung, topology, layer, shape, dense, dc):
    """Of a DC's uplink in one step."""
    layout = Layout(topology.workers_per_dc)
    load = Workload((shape,), TOKENS, **wire_bytes(rung.codecs, torch.float32, shape.hidden, shape.ffn))
    share = layout.workers_per_dc[dc] / layout.workers
    # Sums of units that others own, and totals of its own to every other DC.
    sums = dense * bytes_per_element(rung.codecs.dense, torch.float32) * (1 - share + share * (layout.dcs - 1))
    links = price([layer], topology, load).links
    return sums + sum(link.total for (source, _), link in links.items() if source == dc)
