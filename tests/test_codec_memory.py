"""Memory for copies: what is said at attach is what codecs hold, and both of the planner's models count the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

import hybridep_rt
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.delta import Delta
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.codecs.ladder import LADDER, Rung
from hybridep_rt.codecs.sizes import HeldBytes
from hybridep_rt.planner.economics import LayerShape, Workload, price
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.makers import domains, replicate_all
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import uniform
from hybridep_rt.planner.search import search
from hybridep_rt.planner.site_plan import to_layer
from tests.fleet import run_fleet
from tests.test_rungs import build, plan, train
from topology import parse

SITES = """
cluster: t
datacenters: {a: {workers: 2}, b: {workers: 1}, c: {workers: 3}}
defaults: {link: {bandwidth: 100 Mbit/s, rtt: 10 ms}}
"""


def measure(runtime):
    """What the runtime says at attach, and what there is after some steps."""
    model, optimizer = build(runtime, optimizer=hybridep_rt.AdamW)
    said = runtime.memory()
    for step in range(3):
        train(runtime, model, optimizer, step)
    holdings = model[1]._bound
    copies = [leaves for e, leaves in holdings._leaves.items() if e not in holdings._parameters]
    weights = [
        holdings._weights.of(e, holdings._version) for e in holdings._tables.homes if holdings._tables.is_published(e)
    ]
    found = {
        "copies": 2 * sum(leaf.nbytes for leaf in chain(*copies)),
        "replicas": sum(codec.bytes_held() for codec in chain(*weights) if isinstance(codec, Delta)),
        "feedback": sum(each.bytes_held() for each in chain(*holdings._outgoing.values())),
        "returns": sum(c.bytes_held() for c in chain(*holdings._incoming.values()) if isinstance(c, Feedback)),
    }
    returning = sum(bool(sources) for sources in holdings._tables.subscribers.values())
    parameters = model[1].shape.parameters_per_expert
    return said, found, (parameters * len(copies), parameters * returning)


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_what_is_said_at_attach_is_what_codecs_hold(rung):
    held = HeldBytes.of(rung.codecs, torch.float32)
    for maker in (lambda layout, e: domains(layout, e, (2,)), replicate_all):
        for said, found, (copied, returning) in run_fleet(plan(maker), measure, rung=replace(rung, warm_up_steps=0)):
            found["copies"] += copied * held.copy
            found["returns"] += held.own_moment * returning
            assert said == found


def test_a_warm_up_that_needs_more_counts():
    light = Rung("light", Codecs(weights="delta-1bit"), 3, Codecs(weights="delta-1bit:predict=0.5"))
    warmed, cold = (run_fleet(plan(), measure, rung=rung) for rung in (light, replace(light, warm_up_steps=0)))
    for (said, *_), (without, *_) in zip(warmed, cold, strict=True):
        assert said["replicas"] == 2 * without["replicas"] > 0


def test_both_models_of_the_planner_count_the_same():
    topology = parse(SITES)
    held = HeldBytes.of(Codecs(weights="delta-1bit:predict=0.5", gradients="1bit:vs=16"), torch.bfloat16)
    assert held == HeldBytes(copy=8, feedback=8, replica=8, returning=4, own_moment=8)
    shape = LayerShape(64, 32, 12, 2, 6000)
    work = Workload((shape,) * 2, 1e4, **held.workload_bytes(4.0))
    assert (work.copy_bytes, work.home_bytes, work.subscriber_bytes) == (20, 16, 4)
    job = Job(topology, work, (uniform(12, 2),), Compute(flops_per_s=1e12))
    for option in search(Predictor(job)).named:
        layers = [to_layer(layer, job.layout) for layer in option.layers]
        assert price(layers, topology, work).copy_bytes_per_worker == option.copy_bytes
