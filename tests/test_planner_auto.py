"""The automatic choice: it is the cheapest, it can be plain EP or full replication, and its break-even holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.auto import SAME, decide, make_plan
from hybridep_rt.planner.economics import LayerShape, Workload, price
from hybridep_rt.planner.makers import plain_ep
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_file import to_file
from hybridep_rt.planner.plan_spec import parse_plan_spec
from topology.presets import preset
from topology.read import parse

SHAPE = LayerShape(hidden=512, ffn=1024, num_experts=8, top_k=2, parameters_per_expert=3 * 512 * 1024)
FOUR = parse(
    """
    cluster: t
    datacenters:
      a: {workers: 1, uplink: 100 Mbit/s}
      b: {workers: 1, uplink: 100 Mbit/s}
      c: {workers: 1, uplink: 100 Mbit/s}
      d: {workers: 1, uplink: 100 Mbit/s}
    defaults: {link: {bandwidth: 100 Mbit/s, rtt: 20 ms}}
    """
)
TREE = preset("three-level")
UNEVEN = preset("three-uneven")


@settings(max_examples=40)
@given(
    st.sampled_from([FOUR, TREE, UNEVEN]),
    st.floats(0, 1e6),
    st.floats(0, 4),
    st.integers(1, 4),
    st.integers(1, 8),
    st.floats(0, 1),
)
def test_the_choice_is_the_cheapest(
    topology: object, tokens: float, coded: float, micro_batches: int, chunks: int, hidden_s: float
) -> None:
    work = Workload((SHAPE,) * 2, tokens, 2.0, coded, coded, micro_batches, chunks, hidden_s)
    decision = decide(topology, work)  # type: ignore[arg-type]
    assert decision.choice.cost.total_s <= min(c.cost.total_s for c in decision.candidates) * (1 + SAME)
    again = make_plan(parse_plan_spec("auto"), topology, work)  # type: ignore[arg-type]
    assert price(again.layers, topology, work) == decision.choice.cost  # type: ignore[arg-type]
    assert again.reason == decision.reason


@pytest.mark.parametrize("topology", [FOUR, TREE, UNEVEN])
def test_experts_cross_the_wan_only_above_the_break_even(topology: object) -> None:
    work = Workload((SHAPE,), 1000.0, weight_bytes=0.3, gradient_bytes=0.3)
    tokens = decide(topology, work).break_even_tokens  # type: ignore[arg-type]
    assert tokens is not None
    assert tokens > 0
    for factor, plain in ((0.9, True), (1.1, False)):
        decision = decide(topology, replace(work, tokens_per_worker_per_step=tokens * factor))  # type: ignore[arg-type]
        assert (decision.choice.sizes[0] == 1) is plain
        assert decision.break_even_tokens == pytest.approx(tokens, rel=1e-4)


def test_candidates_are_every_feasible_tuple_of_sizes() -> None:
    names = [candidate.name for candidate in decide(TREE, Workload((SHAPE,), 100.0)).candidates]
    assert len(names) == 2 * 2 * 3
    assert names[0] == "ep"
    assert names[-1] == "replicate"
    assert "domains:2,1,2" in names
    assert [c.name for c in decide(UNEVEN, Workload((SHAPE,), 100.0)).candidates] == ["ep", "domains:3"]


def test_many_tokens_and_free_experts_mean_replication() -> None:
    work = Workload((SHAPE,), 1e7, weight_bytes=0.01, gradient_bytes=0.01)
    assert decide(TREE, work).choice.name == "replicate"
    assert decide(FOUR, work).choice.name == "replicate"


def test_few_tokens_mean_plain_ep_with_a_reason() -> None:
    decision = decide(FOUR, Workload((SHAPE,), 16.0))
    assert decision.choice.name == "ep"
    assert "the best alternative, domains:2" in decision.reason
    assert "this step has 16." in decision.reason


def test_memory_bounds_the_domains() -> None:
    work = Workload((SHAPE,), 1e6, weight_bytes=0.1, gradient_bytes=0.1)
    free = decide(FOUR, work)
    assert free.choice.name == "replicate"
    half = decide(FOUR, work, memory_budget_bytes=2 * SHAPE.parameters_per_expert * 8)
    assert half.choice.name == "domains:2"
    assert "replicate would take" in half.reason
    assert decide(FOUR, work, memory_budget_bytes=0).choice.name == "ep"
    with pytest.raises(PlanError, match="memory budget"):
        decide(FOUR, work, memory_budget_bytes=-1)


def test_one_site_has_nothing_to_decide() -> None:
    alone = parse("cluster: t\nlevels:\n - {name: dc, count: 1, bandwidth: 1 Gbit/s, latency: 1 ms}")
    decision = decide(alone, Workload((SHAPE,), 1e6))
    assert decision.choice.name == "ep"
    assert decision.break_even_tokens is None
    assert decision.choice.cost.total_s == 0


def test_specs_make_plans(tmp_path: Path) -> None:
    work = Workload((SHAPE,) * 2, 100.0)
    layout = Layout(FOUR.workers_per_dc)
    plain = make_plan(parse_plan_spec("ep"), FOUR, work, epoch=3)
    assert plain == Plan(3, layout, (plain_ep(layout, 8),) * 2, "ep, as asked for")
    path = str(tmp_path / "plan.yaml")
    to_file(plain, path)
    assert make_plan(parse_plan_spec(path), FOUR, work) == plain
    with pytest.raises(PlanError, match="the model has"):
        make_plan(parse_plan_spec(path), FOUR, Workload((SHAPE,), 100.0))
