"""The runtime's own model: never slower for more bandwidth, equal to the paper's where its assumptions hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner import paper
from hybridep_rt.planner.economics import CHOICE_FORWARD_BYTES, LayerShape, Workload, price
from hybridep_rt.planner.events import PARTS
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.makers import block_homes, divisors, domains, plain_ep, subscribe
from hybridep_rt.planner.paper import PaperLayer
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import Routing, uniform, zipf
from hybridep_rt.planner.site_plan import SitePlan, canonical_spread, from_layer, plain, site_plan
from hybridep_rt.planner.timeline import timeline
from topology.model import Topology
from topology.presets import preset
from topology.read import parse

SHAPE = LayerShape(hidden=64, ffn=128, num_experts=6, top_k=2, parameters_per_expert=2 * 64 * 128)
BUSY = Compute(
    flops_per_s=1e9,
    pre_expert_flops_per_token=1e4,
    token_codec_s=1e-9,
    weight_codec_s=1e-9,
    gradient_codec_s=2e-9,
    exchange_s=1e-4,
    dense_parameters=1e4,
    optimizer_s=1e-3,
)


def site(*rates: str, uplink: str = "1 Gbit/s", rtt: str = "20 ms", workers: int = 1) -> Topology:
    """DCs a, b, ... with the given rate on the way out to all others."""
    names = "abcdefgh"[: len(rates)]
    dcs = "\n".join(f"  {name}: {{workers: {workers}, uplink: {uplink}}}" for name in names)
    links = "\n".join(
        f"  {a} -> {b}: {{bandwidth: {rate}, rtt: {rtt}}}"
        for a, rate in zip(names, rates, strict=True)
        for b in names
        if a != b
    )
    return parse(f"cluster: t\ndatacenters:\n{dcs}\nlinks:\n{links}")


def job_of(topology: Topology, work: Workload, compute: Compute = BUSY, routing: Routing | None = None) -> Job:
    shape = work.layers[0]
    return Job(topology, work, (routing or uniform(shape.num_experts, shape.top_k, samples=240),), compute)


def step_s(job: Job, plan: Sequence[SitePlan]) -> float:
    return float(Predictor(job).predict([plan]).step_s[0])


def faster(job: Job, factor: float) -> Job:
    return Job(job.topology, job.work, job.routing, job.compute, factor)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Job, list[SitePlan]]:
    """A job over 2-4 uneven DCs and any legal plan for each of its layers."""
    workers = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    rate, rtt = st.integers(1, 200), st.integers(0, 90)
    places = "\n".join(f"  d{i}: {{workers: {w}, uplink: {draw(rate)} Mbit/s}}" for i, w in enumerate(workers))
    links = "\n".join(
        f"  d{i} -> d{j}: {{bandwidth: {draw(rate)} Mbit/s, rtt: {draw(rtt)} ms}}"
        for i, j in permutations(range(len(workers)), 2)
    )
    topology = parse(f"cluster: t\ndatacenters:\n{places}\nlinks:\n{links}")
    work = Workload(
        (SHAPE,) * draw(st.integers(1, 3)),
        draw(st.integers(0, 4000)),
        micro_batches=draw(st.integers(1, 3)),
        token_chunks=draw(st.integers(1, 4)),
    )
    routing = draw(st.sampled_from([uniform(6, 2, samples=90), zipf(6, 2, 1.0, samples=90)]))
    layout = Layout(tuple(workers))
    home = block_homes(6, layout)
    plans = []
    for _ in work.layers:
        holders = [{owner, *draw(st.sets(st.integers(0, layout.workers - 1), max_size=3))} for owner in home]
        plans.append(from_layer(subscribe(layout, home, [sorted(each) for each in holders]), layout))
    flops_per_s = draw(st.sampled_from([1e8, 1e9, 1e11]))
    return job_of(topology, work, replace(BUSY, flops_per_s=flops_per_s), routing), plans


@settings(max_examples=60, deadline=None)
@given(cases(), st.floats(1.0, 10.0))
def test_more_bandwidth_is_never_slower(case: tuple[Job, list[SitePlan]], factor: float) -> None:
    job, plan = case
    assert step_s(faster(job, factor), plan) <= step_s(job, plan) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_one_faster_link_is_never_slower(case: tuple[Job, list[SitePlan]], data: st.DataObject) -> None:
    job, plan = case
    before = step_s(job, plan)
    pair = data.draw(st.sampled_from(sorted(job.topology.links)))
    job.network.bandwidth[pair] *= 3
    job.network.uplink[pair[0]] *= data.draw(st.sampled_from([1, 2]))
    assert step_s(job, plan) <= before * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_dcs_parts_add_up_and_the_critical_chain_fills_the_step(case: tuple[Job, list[SitePlan]]) -> None:
    job, plan = case
    found = timeline(Predictor(job), plan)
    for split in found.parts():
        assert min(split.values()) >= -1e-9
        assert sum(split.values()) == pytest.approx(found.step_s)
    assert found.step_s == pytest.approx(step_s(job, plan))
    assert all(a.start_s <= b.start_s for a, b in pairwise(found.critical))
    assert found.critical[0].start_s == pytest.approx(0, abs=1e-6)
    assert sum(found.critical_seconds().values()) == pytest.approx(found.step_s, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_plans_side_by_side_are_as_each_alone(case: tuple[Job, list[SitePlan]]) -> None:
    job, plan = case
    predictor = Predictor(job)
    spread = canonical_spread(job.layout, 6)
    many = [[site_plan(spread, layer.held, layer.route) for layer in plan], [plain(spread)] * len(plan)]
    together = predictor.predict(many).step_s
    assert together.tolist() == pytest.approx([step_s(job, each) for each in many])


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,)])
def test_infinite_bandwidth_and_no_delay_leave_the_compute_time(sizes: tuple[int, ...]) -> None:
    shape = replace(SHAPE, num_experts=8)
    work = Workload((shape,) * 3, 800.0, micro_batches=2)
    job = faster(job_of(site(*["1 Mbit/s"] * 4, rtt="0 ms"), work, replace(BUSY, token_codec_s=0.0)), float("inf"))
    layer = domains(job.layout, 8, sizes)
    found = timeline(Predictor(job), [from_layer(layer, job.layout)] * 3)
    flops = 3 * 3 * (800 * 1e4 + 2 * 800 * 2 * shape.parameters_per_expert)
    batches = 3 * 2 * 2 * (4 // sizes[0])
    for split in found.parts():
        assert split["compute"] == pytest.approx(flops / 1e9 + batches * 1e-4 + 1e-3)
        assert split["compute"] + split["codecs"] == pytest.approx(found.step_s)


def test_the_step_without_a_wan_is_the_sum_of_its_compute() -> None:
    alone = parse("cluster: t\nlevels:\n - {name: dc, count: 1, bandwidth: 1 Gbit/s, latency: 1 ms}")
    job = job_of(alone, Workload((SHAPE,), 100.0))
    found = timeline(Predictor(job), [from_layer(plain_ep(job.layout, 6), job.layout)])
    assert found.step_s == sum(found.parts()[0][part] for part in ("compute", "codecs"))
    assert found.bottleneck() is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4, 6, 8]), st.integers(1, 3000), st.floats(1, 1e4), st.floats(0, 2), st.data())
def test_equal_to_the_papers_model_under_its_assumptions(
    dcs: int, tokens: int, parameters: float, pre_expert_s: float, data: st.DataObject
) -> None:
    """One layer's forward, equal DCs of one worker that share an uplink, top-1, evenly used experts; no delay, chunks,
    codec time or expert compute. Bytes of routed choices count as half of a token's, dispatch and results alike."""
    size = data.draw(st.sampled_from(divisors(dcs)))
    shape = LayerShape(64, 1, dcs, 1, int(parameters))
    work = Workload((shape,), tokens, pre_expert_s=pre_expert_s)
    topology = site(*["8 Mbit/s"] * dcs, uplink="8 Mbit/s", rtt="0 ms")
    job = job_of(topology, work, Compute(), uniform(dcs, 1, samples=dcs))
    outcome = Predictor(job).predict([[from_layer(domains(job.layout, dcs, (size,)), job.layout)]])
    token_bytes = tokens * (64 * 2.0 + CHOICE_FORWARD_BYTES / 2)
    layer = PaperLayer(token_bytes, int(parameters) * 2.0, dcs, 1e6, pre_expert_s)
    assert outcome.forward_s[0] == pytest.approx(paper.layer_s(layer, paper.p_of_size(size, dcs)), rel=1e-6)


@pytest.mark.parametrize("topology", [preset("three-level"), preset("three-uneven"), preset("four-dc-10g")])
def test_wan_bytes_are_those_of_the_economics(topology: Topology) -> None:
    work = Workload((replace(SHAPE, num_experts=32),) * 2, 500.0, weight_bytes=0.6, gradient_bytes=0.3, micro_batches=2)
    job = job_of(topology, work, routing=uniform(32, 2, samples=1 << 14))
    for size in divisors(job.layout.dcs):
        layer = domains(job.layout, 32, (size,))
        cost = price([layer] * 2, topology, work)
        sent = Predictor(job).predict([[from_layer(layer, job.layout)] * 2]).sent_bytes
        for pair in topology.links:
            link = cost.links.get(pair)
            for name in ("tokens", "weights", "gradients"):
                assert sent[name][(0, *pair)] == pytest.approx(getattr(link, name) if link else 0, rel=0.02)


def test_skewed_routing_loads_the_dc_of_popular_experts() -> None:
    chosen = np.array([[0, 1]] * 10 + [[0, 5]] * 10)[None]
    job = job_of(site("1 Mbit/s", "1 Mbit/s"), Workload((SHAPE,), 100.0), routing=Routing(chosen))
    sent = Predictor(job).predict([[plain(canonical_spread(job.layout, 6))]]).sent_bytes["tokens"][0]
    dispatch, answers = 100 * 2 * 128 + 150 * 10, 50 * 2 * 128 + 50 * 4
    assert sent[1, 0] == pytest.approx(dispatch + answers)


def test_many_micro_batches_take_as_long_as_each() -> None:
    def seconds(count: int) -> float:
        work = Workload((SHAPE,) * 2, 100.0 * count, micro_batches=count)
        job = job_of(site("1 Mbit/s", "2 Mbit/s"), work)
        return step_s(job, [plain(canonical_spread(job.layout, 6))] * 2)

    assert seconds(12) - seconds(11) == pytest.approx(seconds(6) - seconds(5), rel=1e-6)
    assert set(PARTS) == {"compute", "codecs", "tokens", "experts", "gradients", "dense"}


def test_copies_hide_behind_compute() -> None:
    work = Workload((SHAPE,) * 4, 10.0, pre_expert_s=10.0)
    job = job_of(site("8 Mbit/s", "8 Mbit/s"), work, Compute())
    found = timeline(Predictor(job), [from_layer(domains(job.layout, 6, (2,)), job.layout)] * 4)
    assert found.step_s == pytest.approx(4 * 30 + 0, rel=1e-3)
    assert found.parts()[0]["experts"] == 0


def test_jobs_that_make_no_sense_are_refused() -> None:
    topology = site("1 Mbit/s", "1 Mbit/s")
    work = Workload((SHAPE,) * 3, 1.0)
    with pytest.raises(PlanError, match="choose 3 of"):
        job_of(topology, work, routing=uniform(6, 3))
    with pytest.raises(PlanError, match="of 3 DCs; allowed: 1"):
        job_of(topology, work, routing=Routing(np.tile([0, 1], (3, 1, 1))))
    with pytest.raises(PlanError, match="2 routings for 3 layers"):
        Job(topology, work, (uniform(6, 2),) * 2)
    with pytest.raises(PlanError, match="1 compute rates for 2 workers"):
        job_of(topology, work, Compute(flops_per_s=(1.0,)))
    with pytest.raises(PlanError, match="must have 3 layers"):
        Predictor(job_of(topology, work)).predict([[]])
    with pytest.raises(PlanError, match="above 0"):
        Compute(flops_per_s=0.0)
