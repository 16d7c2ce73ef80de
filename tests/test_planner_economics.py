"""The cost of a plan against a count over every possible routing, by hand, and against published break-even points."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.economics import (
    CHOICE_BACKWARD_BYTES,
    CHOICE_FORWARD_BYTES,
    Exchange,
    LayerShape,
    Workload,
    crossing_probability,
    price,
)
from hybridep_rt.planner.makers import divisors, domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import LayerPlan, Layout
from topology.model import Topology
from topology.read import parse

MB = 1e6


def symmetric(dcs: int, workers: int = 1, rate: str = "8 Mbit/s", latency: str = "40 ms") -> Topology:
    inner = f"  - {{name: gpu, count: {workers}, bandwidth: 10 MB/s}}\n" if workers > 1 else ""
    outer = f"  - {{name: dc, count: {dcs}, bandwidth: {rate}, latency: {latency}}}\n"
    return parse(f"cluster: test\nlevels:\n{outer}{inner}")


UNEVEN = parse(
    """
    cluster: test
    datacenters: {a: {workers: 1, uplink: 12 Mbit/s}, b: {workers: 2}, c: {workers: 3, downlink: 4 Mbit/s}}
    defaults: {link: {bandwidth: 8 Mbit/s, rtt: 40 ms}}
    links: {a -> b: {bandwidth: 80 Mbit/s, rtt: 10 ms}}
    """
)
SMALL = LayerShape(hidden=10, ffn=20, num_experts=6, top_k=2, parameters_per_expert=600)


def counted_tokens(plan: LayerPlan, layout: Layout, shape: LayerShape, work: Workload) -> Counter[tuple[int, int]]:
    """Expected token bytes per link: the mean over all C(E, k) routings of one token at each worker."""
    found: Counter[tuple[int, int]] = Counter()
    routings = list(combinations(range(shape.num_experts), shape.top_k))
    vector = shape.hidden * work.token_bytes
    for dc, workers in enumerate(layout.workers_per_dc):
        tokens = workers * work.tokens_per_worker_per_step / len(routings)
        for chosen in routings:
            for target, choices in Counter(plan.route[dc][expert] for expert in chosen).items():
                if target != dc:
                    found[dc, target] += tokens * (2 * vector + choices * CHOICE_FORWARD_BYTES)
                    found[target, dc] += tokens * (2 * vector + choices * CHOICE_BACKWARD_BYTES)
    return found


@given(st.sampled_from([symmetric(4, 2), symmetric(2, 1), UNEVEN]), st.integers(1, 3), st.data())
def test_link_bytes_are_the_mean_over_all_routings(topology: Topology, top_k: int, data: st.DataObject) -> None:
    layout = Layout(topology.workers_per_dc)
    shape = LayerShape(10, 20, 6, top_k, 600)
    work = Workload((shape,), 7.0, token_bytes=1.0, weight_bytes=0.5, gradient_bytes=0.25)
    plan = domains(layout, 6, (data.draw(st.sampled_from(divisors(layout.dcs))),))
    cost = price([plan], topology, work)
    tokens = counted_tokens(plan, layout, shape, work)
    copies: Counter[tuple[int, int]] = Counter()
    for home, holders in zip(plan.home, plan.holders, strict=True):
        home_dc = layout.locate(home)[0]
        copies.update((home_dc, dc) for dc in {layout.locate(holder)[0] for holder in holders} if dc != home_dc)
    for pair in topology.links:
        link = cost.links.get(pair)
        assert (link.tokens if link else 0) == pytest.approx(tokens[pair])
        assert (link.weights if link else 0) == pytest.approx(copies[pair] * 600 * 0.5)
        assert (link.gradients if link else 0) == pytest.approx(copies[pair[::-1]] * 600 * 0.25)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 12))
def test_crossing_probability_counts_subsets(experts: int, top_k: int, remote: int) -> None:
    top_k, remote = min(top_k, experts), min(remote, experts)
    hits = sum(min(chosen) < remote for chosen in combinations(range(experts), top_k))
    assert crossing_probability(experts, remote, top_k) == pytest.approx(hits / comb(experts, top_k))


def test_plain_ep_by_hand() -> None:
    topology = symmetric(2)
    shape = LayerShape(hidden=250, ffn=1, num_experts=2, top_k=1, parameters_per_expert=10**6)
    work = Workload((shape,) * 3, 1000.0, token_bytes=2.0, micro_batches=2)
    cost = price([plain_ep(Layout((1, 1)), 2)] * 3, topology, work)
    each_way = 1000 * 0.5 * 500
    metadata = 1000 * 0.5 * 14
    assert cost.links[0, 1].tokens == pytest.approx(3 * (4 * each_way + metadata))
    wire_s = 3 * (4 * each_way + metadata) / MB
    assert cost.tokens_s == pytest.approx(wire_s + 3 * 2 * 2 * 0.040)
    assert cost.total_s == cost.tokens_s
    assert cost.experts_s == cost.copy_bytes_per_worker == 0


def test_full_domains_by_hand() -> None:
    topology = symmetric(2)
    shape = LayerShape(hidden=250, ffn=1, num_experts=2, top_k=1, parameters_per_expert=10**6)
    work = Workload((shape,) * 3, 1000.0, weight_bytes=0.5, gradient_bytes=1.0, pre_expert_s=0.6)
    cost = price([replicate_all(Layout((1, 1)), 2)] * 3, topology, work)
    assert (cost.weights_s, cost.gradients_s) == pytest.approx((1.52, 3.02))
    assert cost.hidden_s == pytest.approx(1.52 + 1.8)
    assert cost.total_s == pytest.approx(1.22)
    assert cost.tokens_s == 0
    assert cost.copy_bytes_per_worker == 3 * 8 * 10**6
    assert cost.uplink_bytes(0) == pytest.approx(3 * 1.5 * 10**6)


def test_uplinks_and_downlinks_bound_the_sum() -> None:
    shape = LayerShape(hidden=10, ffn=1, num_experts=6, top_k=1, parameters_per_expert=10**6)
    work = Workload((shape,), 0.0, weight_bytes=1.0, gradient_bytes=0.0)
    layout = Layout((1, 2, 3))
    cost = price([domains(layout, 6, (3,))], UNEVEN, work)
    assert [cost.uplink_bytes(dc) for dc in range(3)] == [2e6, 4e6, 6e6]
    into_c = (1e6 + 2e6) / 0.5e6 + 0.020
    assert cost.weights_s == pytest.approx(into_c)


def test_chunks_fill_the_idle_wire() -> None:
    exchange = Exchange(count=1, out_s=0.010, back_s=0.010, rtt_s=0.040)
    assert exchange.seconds(1, chunks=1) == pytest.approx(0.060)
    assert exchange.seconds(1, chunks=10) == pytest.approx(0.051)
    assert exchange.seconds(10, chunks=10) == pytest.approx(0.220)


def test_copies_inside_a_dc_cost_inside_time_and_memory() -> None:
    topology = symmetric(2, workers=2)
    layout = Layout((2, 2))
    work = Workload((SMALL,), 100.0)
    across = price([domains(layout, 6, (2, 1), (2, 2))], topology, work)
    everywhere = price([domains(layout, 6, (2, 2), (2, 2))], topology, work)
    assert across.links == everywhere.links
    assert everywhere.copy_bytes_per_worker > across.copy_bytes_per_worker
    assert across.inside_s == pytest.approx(100 * 4 * 20 * crossing_probability(6, 4, 2) / 10e6)
    assert everywhere.inside_s == pytest.approx(4 * 600 * 4 / 10e6)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ffn", "dcs", "q", "tokens"),
    [
        (8, 2, 14336, 2, 0.79, 33e3),
        (128, 8, 768, 4, 0.91, 12e3),
        (64, 8, 1024, 8, 0.68, 6e3),
        (256, 8, 2048, 8, 0.66, 45e3),
    ],
)
def test_break_even_bytes_of_known_models(
    num_experts: int, top_k: int, ffn: int, dcs: int, q: float, tokens: float
) -> None:
    hidden = 4096
    shape = LayerShape(hidden, ffn, num_experts, top_k, 3 * hidden * ffn)
    work = Workload((shape,), tokens, token_bytes=1.0, weight_bytes=0.305, gradient_bytes=0.305)
    layout = Layout((1,) * dcs)
    assert crossing_probability(num_experts, num_experts // dcs, top_k) == pytest.approx(q, abs=0.006)
    plain = price([plain_ep(layout, num_experts)], symmetric(dcs), work).uplink_bytes(0)
    full = price([domains(layout, num_experts, (dcs,))], symmetric(dcs), work).uplink_bytes(0)
    assert plain / full == pytest.approx(1, rel=0.1)


def test_plans_for_another_model_are_refused() -> None:
    work = Workload((SMALL,), 1.0)
    with pytest.raises(PlanError, match="2 layers, the workload 1"):
        price([plain_ep(Layout((1, 1)), 6)] * 2, symmetric(2), work)
    with pytest.raises(PlanError, match="layer 0: the plan has 4 experts, the model 6"):
        price([plain_ep(Layout((1, 1)), 4)], symmetric(2), work)


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match="top-k 3"):
        LayerShape(1, 1, 2, 3, 1)
    with pytest.raises(PlanError, match="at least 1"):
        LayerShape(1, 1, 0, 1, 1)
    with pytest.raises(PlanError, match="weight_bytes"):
        Workload((SMALL,), 1.0, weight_bytes=float("nan"))
    with pytest.raises(PlanError, match="at least one layer"):
        Workload((), 1.0)
    with pytest.raises(PlanError, match="micro_batches"):
        Workload((SMALL,), 1.0, micro_batches=0)
