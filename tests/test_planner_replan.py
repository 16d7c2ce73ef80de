"""When a running job changes plans: not for noise, and homes only move where that pays."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.makers import plain_ep, replicate_all
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.replan import Judge, Proposal, propose, swaps
from hybridep_rt.planner.routing import Routing, uniform
from topology import parse

LAYOUT = Layout((1, 1))
SHAPE = LayerShape(hidden=64, ffn=128, num_experts=4, top_k=1, parameters_per_expert=24576)
TOPOLOGY = parse(
    "cluster: c\ndatacenters: {a: {workers: 1}, b: {workers: 1}}\n"
    "defaults: {link: {bandwidth: 100 Mbit/s, rtt: 2 ms}}\n",
    "test",
)


def job(routing: Routing, tokens: int) -> Job:
    work = Workload((SHAPE,), tokens_per_worker_per_step=tokens, token_bytes=4, weight_bytes=4, gradient_bytes=4)
    return Job(TOPOLOGY, work, (routing,), Compute(flops_per_s=1e12))


def crossed() -> Routing:
    """Each DC's tokens choose the experts that live in the other: 0 and 1 live in DC 0."""
    return Routing(np.array([[[2], [3]] * 32, [[0], [1]] * 32]))


def proposal(step_s: float, change_s: float = 0.0) -> Proposal:
    return Proposal((), "it", 1.0, step_s, change_s)


@pytest.mark.parametrize(
    ("looks", "changes"),
    [
        ([0.8, 0.8], [False, True]),
        ([0.8, 0.95, 0.8, 0.8], [False, False, False, True]),
        ([0.91, 0.91, 0.91], [False, False, False]),
        ([0.8, 0.8, 0.8, 0.8], [False, True, False, True]),
        ([1.2, 0.85, 1.1, 0.85, 1.2, 0.85], [False] * 6),
    ],
)
def test_a_change_has_to_pay_twice_in_a_row(looks, changes):
    judge = Judge()
    assert [judge.judge(proposal(step_s))[0] for step_s in looks] == changes


def test_the_change_itself_is_counted_and_the_reason_names_both_figures():
    judge = Judge(in_a_row=1)
    assert judge.judge(proposal(0.8, 0.15)) == (
        False,
        "the plan stays: it would take 800 ms per step and 150 ms for the change, against 1 s, which is not 10% better",
    )
    assert judge.judge(proposal(0.8, 0.05)) == (True, "it: 800 ms per step and 50 ms for the change, against 1 s")


def test_homes_move_where_each_dc_wants_the_others_experts():
    ep = (plain_ep(LAYOUT, 4),)
    found = propose(job(crossed(), 256), ep, steps=1000)
    assert found.layers[0].home == (1, 1, 0, 0)
    assert found.gain > 0.5


def test_homes_stay_where_few_steps_would_have_to_pay_for_the_move():
    ep = (plain_ep(LAYOUT, 4),)
    found = propose(job(crossed(), 256), ep, steps=1)
    assert found.layers == ep
    assert found.gain == 0
    assert Judge().judge(found)[1].startswith("the plan stays: nothing better is known than its ")


def test_even_routing_moves_no_homes():
    found = propose(job(uniform(4, 1), 256), (plain_ep(LAYOUT, 4),), steps=1000)
    assert found.layers[0].home == (0, 0, 1, 1)


def test_swaps_keep_plans_legal_and_each_dcs_number_of_experts():
    for layer in swaps(replicate_all(LAYOUT, 4), crossed(), LAYOUT):
        layer.check(LAYOUT)
        assert sorted(layer.home) == [0, 0, 1, 1]
    assert [layer.home for layer in swaps(plain_ep(LAYOUT, 4), crossed(), LAYOUT)] == [(1, 0, 0, 1), (1, 1, 0, 0)]
