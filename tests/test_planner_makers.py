"""Every plan that a maker makes is executable, and follows the domain rule as a second, direct reading states it."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.makers import block_homes, divisors, domains, plain_ep, replicate_all, subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout
from topology.domains import Domains
from topology.location import Tree

layouts = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda counts: Layout(tuple(counts)))
experts = st.integers(1, 17)


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(scaling factors, domain sizes) of up to 3 levels."""
    scaling = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return scaling, tuple(draw(st.sampled_from(divisors(factor))) for factor in scaling)


def even_layout(scaling: tuple[int, ...]) -> Layout:
    return Layout((prod(scaling[1:]),) * scaling[0])


def path(plan: LayerPlan, layout: Layout, worker: int, expert: int) -> tuple[int, int, int]:
    """(start, landing, server) of one token."""
    dc, local = layout.locate(worker)
    target = plan.route[dc][expert]
    landing = worker if target == dc else layout.number(target, layout.landing(local, target))
    return worker, landing, plan.serve[landing][expert]


@given(layouts, experts)
def test_block_homes_are_contiguous_blocks_of_the_stated_bounds(layout: Layout, count: int) -> None:
    home = block_homes(count, layout)
    workers = layout.workers
    for worker in range(workers):
        owned = [expert for expert in range(count) if home[expert] == worker]
        assert owned == list(range(worker * count // workers, (worker + 1) * count // workers))


@given(layouts, experts)
def test_plain_ep_holds_nothing_but_homes(layout: Layout, count: int) -> None:
    plan = plain_ep(layout, count)
    plan.check(layout)
    assert plan.holders == tuple((owner,) for owner in plan.home)
    for expert, owner in enumerate(plan.home):
        assert {row[expert] for row in plan.route} == {layout.locate(owner)[0]}
        assert all(path(plan, layout, worker, expert)[2] == owner for worker in range(layout.workers))


@given(layouts, experts)
def test_full_replication_moves_no_token(layout: Layout, count: int) -> None:
    plan = replicate_all(layout, count)
    plan.check(layout)
    for worker, expert in product(range(layout.workers), range(count)):
        assert path(plan, layout, worker, expert) == (worker, worker, worker)


@given(trees(), experts)
def test_domains_follow_the_rule_at_every_level(tree: tuple[tuple[int, ...], tuple[int, ...]], count: int) -> None:
    scaling, sizes = tree
    layout = even_layout(scaling)
    plan = domains(layout, count, sizes, scaling)
    plan.check(layout)
    places = list(product(*map(range, scaling)))
    for expert, owner in enumerate(plan.home):
        home = places[owner]
        expected = [
            number
            for number, place in enumerate(places)
            if all(x // s == h // s for x, h, s in zip(place, home, sizes, strict=True))
        ]
        assert list(plan.holders[expert]) == expected
        for worker, place in enumerate(places):
            target = tuple(h // s * s + x % s for x, h, s in zip(place, home, sizes, strict=True))
            assert places[path(plan, layout, worker, expert)[2]] == target


@given(trees(), experts)
def test_a_token_takes_at_most_one_hop_per_level(tree: tuple[tuple[int, ...], tuple[int, ...]], count: int) -> None:
    scaling, sizes = tree
    layout = even_layout(scaling)
    plan = domains(layout, count, sizes, scaling)
    places = list(product(*map(range, scaling)))
    for worker, expert in product(range(layout.workers), range(count)):
        start, landing, server = (places[stop] for stop in path(plan, layout, worker, expert))
        assert start[1:] == landing[1:]
        assert landing[0] == server[0]
        needed = sum(x // s != h // s for x, h, s in zip(start, places[plan.home[expert]], sizes, strict=True))
        assert sum(a != b for a, b in zip(start, server, strict=True)) == needed


@given(layouts, experts, st.data())
def test_uneven_domains_put_copies_at_the_homes_local_index(layout: Layout, count: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(divisors(layout.dcs)))
    plan = domains(layout, count, (size,))
    plan.check(layout)
    for expert, owner in enumerate(plan.home):
        home_dc, home_local = layout.locate(owner)
        group = [dc for dc in range(layout.dcs) if dc // size == home_dc // size]
        assert plan.holders[expert] == tuple(layout.number(dc, home_local % layout.workers_per_dc[dc]) for dc in group)
        for dc in range(layout.dcs):
            served_by = plan.route[dc][expert]
            assert served_by == dc if dc in group else served_by == group[dc % size]


@given(trees(), experts)
def test_full_domains_are_full_replication(tree: tuple[tuple[int, ...], tuple[int, ...]], count: int) -> None:
    scaling, _ = tree
    layout = even_layout(scaling)
    assert domains(layout, count, scaling, scaling) == replicate_all(layout, count)


@given(layouts, experts, st.data())
def test_any_holders_get_executable_routes(layout: Layout, count: int, data: st.DataObject) -> None:
    worker = st.integers(0, layout.workers - 1)
    home = data.draw(st.lists(worker, min_size=count, max_size=count))
    extra = data.draw(st.lists(st.sets(worker), min_size=count, max_size=count))
    plan = subscribe(layout, home, [sorted({owner, *more}) for owner, more in zip(home, extra, strict=True)])
    plan.check(layout)
    for expert, holders in enumerate(plan.holders):
        assert all(plan.serve[holder][expert] == holder for holder in holders)


@given(trees(), experts)
def test_tables_are_the_rule_of_the_topology(tree: tuple[tuple[int, ...], tuple[int, ...]], count: int) -> None:
    scaling, sizes = tree
    layout = even_layout(scaling)
    assert_tables_follow(domains(layout, count, sizes, scaling), layout, Domains(Tree.symmetric(scaling), sizes))


@given(layouts, experts, st.data())
def test_uneven_tables_are_the_rule_of_the_topology(layout: Layout, count: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(divisors(layout.dcs)))
    rule = Domains(Tree(layout.workers_per_dc, None), (size,))
    assert_tables_follow(domains(layout, count, (size,)), layout, rule)


def assert_tables_follow(plan: LayerPlan, layout: Layout, rule: Domains) -> None:
    for expert, home in enumerate(plan.home):
        assert plan.holders[expert] == rule.holders(home)
        for worker in range(layout.workers):
            assert path(plan, layout, worker, expert)[2] == rule.route(worker, home)


@pytest.mark.parametrize(
    ("sizes", "scaling", "says"),
    [
        ((3,), None, "size 3 is not possible at level 0, allowed: 1, 2, 4"),
        ((2, 2), None, "only level 0 has domains"),
        ((2, 3), (4, 2), "size 3 is not possible at level 1, allowed: 1, 2"),
        ((2, 1, 1), (4, 2), "allowed: 1 to 2"),
        ((), (4, 2), "found 0"),
        ((0,), (4, 2), "size 0 is not possible"),
        ((2,), (4, 3), "don't describe"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...], scaling: tuple[int, ...] | None, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        domains(Layout((2,) * 4), 8, sizes, scaling)
