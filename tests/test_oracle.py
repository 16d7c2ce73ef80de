"""The main correctness test, on the in-memory ports: any plan, any layout, any routing equals one dense process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridep_rt.planner.makers import domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import LayerPlan, Layout, Plan
from tests.fleet import run_fleet
from tests.oracle import Case, compare, train_distributed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def check(case: Case, plan: Plan, seed: int = 0, device: str = "cpu") -> None:
    results = run_fleet(plan, lambda runtime: train_distributed(case, runtime, device), seed=seed, chunks=case.chunks)
    compare(case, plan, results)


def tokens(layout: Layout, *counts: int) -> tuple[tuple[int, ...], ...]:
    """The same micro-batch sizes at every worker, varied a little by worker."""
    return tuple(tuple(count + worker % 3 for count in counts) for worker in range(layout.workers))


def plan_of(layout: Layout, *layers: LayerPlan) -> Plan:
    return Plan(0, layout, layers, "test")


LAYOUTS = {"1x1": (1,), "1x2": (2,), "2x1": (1, 1), "2x2": (2, 2), "2+1": (2, 1), "3+1+2": (3, 1, 2), "4x2": (2,) * 4}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("maker", [plain_ep, replicate_all])
def test_plain_ep_and_replicate_all(name, maker):
    layout = Layout(LAYOUTS[name])
    case = Case(num_experts=7, top_k=2, micro_tokens=tokens(layout, 5))
    check(case, plan_of(layout, maker(layout, 7)))


@pytest.mark.parametrize(
    ("workers", "scaling", "sizes"),
    [
        ((2, 2), (2, 2), (2, 1)),
        ((2, 2), (2, 2), (1, 2)),
        ((2, 2), (2, 2), (2, 2)),
        ((1,) * 4, (4,), (2,)),
        ((1,) * 4, (4,), (4,)),
        ((4, 4), (2, 2, 2), (2, 1, 1)),
        ((4, 4), (2, 2, 2), (1, 2, 1)),
        ((4, 4), (2, 2, 2), (2, 1, 2)),
        ((4, 4), (2, 2, 2), (2, 2, 2)),
        ((2, 1), None, (2,)),
        ((3, 1, 2), None, (3,)),
        ((3, 1, 2, 1), None, (2,)),
    ],
)
def test_every_domain_size(workers, scaling, sizes):
    layout = Layout(workers)
    case = Case(num_experts=8, top_k=2, chunks=2, micro_tokens=tokens(layout, 5), steps=2)
    check(case, plan_of(layout, domains(layout, 8, sizes, scaling)))


@pytest.mark.parametrize("top_k", [1, 2, 4, 6])
@pytest.mark.parametrize("expert", ["swiglu", "gelu"])
def test_top_k(top_k, expert):
    layout = Layout((2, 1))
    case = Case(num_experts=6, top_k=top_k, expert=expert, renormalise=top_k > 1, micro_tokens=tokens(layout, 6))
    check(case, plan_of(layout, domains(layout, 6, (2,))))


@pytest.mark.parametrize("maker", [plain_ep, replicate_all])
def test_all_tokens_to_one_expert_and_the_others_to_none(maker):
    layout = Layout((2, 2))
    case = Case(num_experts=5, top_k=1, renormalise=False, router_bias=(0, 0, 9, 0, 0), micro_tokens=tokens(layout, 6))
    check(case, plan_of(layout, maker(layout, 5)))


def test_a_worker_whose_tokens_all_leave_and_workers_without_tokens():
    layout = Layout((1, 2))
    case = Case(num_experts=3, top_k=1, renormalise=False, micro_tokens=((6,), (0,), (1,)), chunks=3)
    check(
        case,
        plan_of(layout, LayerPlan((1, 1, 2), ((1,), (1,), (2,)), ((1,) * 3,) * 2, ((-1,) * 3, (1, 1, 2), (1, 1, 2)))),
    )


def test_fewer_experts_than_workers():
    layout = Layout((2, 3))
    case = Case(num_experts=2, top_k=2, micro_tokens=tokens(layout, 4))
    check(case, plan_of(layout, domains(layout, 2, (2,))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("maker", [plain_ep, replicate_all])
def test_accumulation_with_uneven_tokens_and_clipping(maker, device):
    layout = Layout((2, 1))
    micro_tokens = ((5, 0, 3), (1, 7, 2), (4, 4, 9))
    case = Case(num_experts=4, top_k=2, layers=2, micro_tokens=micro_tokens, clip=0.05, chunks=2)
    check(case, plan_of(layout, *[maker(layout, 4)] * 2), device=device)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Case]:
    """Any layout, any homes, holders, routes and serves that are legal, and a model to train under them."""
    layout = Layout(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))))
    num_experts = draw(st.integers(1, 6))
    layers = tuple(draw(layer_plans(layout, num_experts)) for _ in range(draw(st.integers(1, 2))))
    micro_batches = draw(st.integers(1, 2))
    counts = st.lists(st.integers(0, 6), min_size=micro_batches, max_size=micro_batches)
    return plan_of(layout, *layers), Case(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        layers=len(layers),
        steps=2,
        chunks=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([None, 0.1])),
        micro_tokens=tuple(tuple(draw(counts)) for _ in range(layout.workers)),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def layer_plans(draw: st.DrawFn, layout: Layout, num_experts: int) -> LayerPlan:
    home, holders, route, serve = [], [], [], []
    place = [layout.locate(worker)[0] for worker in range(layout.workers)]
    for _ in range(num_experts):
        owner = draw(st.integers(0, layout.workers - 1))
        copies = draw(st.sets(st.integers(0, layout.workers - 1)))
        holding = tuple(sorted({owner, *copies}))
        home.append(owner)
        holders.append(holding)
        route.append([draw(st.sampled_from(sorted({place[h] for h in holding}))) for _ in range(layout.dcs)])
        near = [[h for h in holding if place[h] == place[worker]] for worker in range(layout.workers)]
        serve.append([draw(st.sampled_from(candidates)) if candidates else -1 for candidates in near])
    return LayerPlan(tuple(home), tuple(holders), tuple(zip(*route, strict=True)), tuple(zip(*serve, strict=True)))


@given(plans(), st.integers(0, 1 << 16))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_legal_plan(drawn, seed):
    plan, case = drawn
    check(case, plan, seed)
