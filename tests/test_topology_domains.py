"""Algorithm 1 agrees with the holder rule and the route rule."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import TopologyError
from topology.domains import Domains, allowed_sizes, parse_sizes
from topology.location import Tree


@st.composite
def symmetric(draw: st.DrawFn) -> Domains:
    scaling = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    tree = Tree.symmetric(scaling)
    sizes = tuple(draw(st.sampled_from(allowed_sizes(tree, level))) for level in range(len(scaling)))
    return Domains(tree, sizes)


@st.composite
def uneven(draw: st.DrawFn) -> Domains:
    tree = Tree(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))), None)
    return Domains(tree, (draw(st.sampled_from(allowed_sizes(tree, 0))),))


domains = st.one_of(symmetric(), uneven())


@settings(deadline=None)
@given(domains)
def test_a_token_hops_between_a2a_pairs_at_most_once_per_level_and_ends_at_a_holder(domains: Domains) -> None:
    everyone = range(domains.tree.workers)
    for worker in everyone:
        for home in everyone:
            hops = domains.hops(worker, home)
            levels = [hop.level for hop in hops]
            assert levels == sorted(set(levels))
            assert all(domains.role(hop.source, hop.target, hop.level) == "A2A" for hop in hops)
            assert [hop.source for hop in hops] == [worker, *(hop.target for hop in hops)][: len(hops)]
            target = domains.route(worker, home)
            assert target == (hops[-1].target if hops else worker)
            assert domains.holds(target, home)


@settings(deadline=None)
@given(domains)
def test_a_holder_serves_itself(domains: Domains) -> None:
    for home in range(domains.tree.workers):
        assert all(domains.route(holder, home) == holder for holder in domains.holders(home))


@settings(deadline=None)
@given(domains)
def test_ag_pairs_reach_exactly_the_holders(domains: Domains) -> None:
    for home in range(domains.tree.workers):
        holders = domains.holders(home)
        assert list(holders) == [worker for worker in range(domains.tree.workers) if domains.holds(worker, home)]
        # Home -> copies level by level, outermost first: what a level brings, the next spreads further.
        reached = {home}
        for level in range(domains.tree.depth):
            spread = {other for worker in reached for other in domains.partners(worker, level)["AG"]}
            reached |= spread if domains.tree.scaling is not None else spread & set(holders)
        assert reached == set(holders)


@settings(deadline=None)
@given(domains)
def test_roles_are_mutual_and_each_pair_meets_at_one_level(domains: Domains) -> None:
    for worker, other in combinations(range(domains.tree.workers), 2):
        roles = [domains.role(worker, other, level) for level in range(domains.tree.depth)]
        assert roles == [domains.role(other, worker, level) for level in range(domains.tree.depth)]
        assert sum(role is not None for role in roles) <= 1


@settings(deadline=None)
@given(domains)
def test_partners_are_all_the_workers_with_that_role(domains: Domains) -> None:
    everyone = range(domains.tree.workers)
    for worker in everyone:
        for level in range(domains.tree.depth):
            for kind, found in domains.partners(worker, level).items():
                assert list(found) == [other for other in everyone if domains.role(worker, other, level) == kind]


@settings(deadline=None)
@given(domains)
def test_pairs_are_counted(domains: Domains) -> None:
    for level in range(domains.tree.depth):
        partners = [domains.partners(worker, level) for worker in range(domains.tree.workers)]
        for kind, pairs in domains.pairs(level).items():
            assert sum(len(found[kind]) for found in partners) == 2 * pairs


@given(symmetric())
def test_symmetric_rules_by_formula(domains: Domains) -> None:
    tree, sizes = domains.tree, domains.sizes
    for worker in range(tree.workers):
        at = tree.locate(worker)
        for home in range(tree.workers):
            home_at = tree.locate(home)
            target = tuple(h // s * s + m % s for h, m, s in zip(home_at, at, sizes, strict=True))
            assert domains.route(worker, home) == tree.number(target)


def test_plain_expert_parallelism_and_everything_replicated() -> None:
    tree = Tree.symmetric((2, 2, 2))
    assert Domains(tree, (1, 1, 1)).holders(3) == (3,)
    assert Domains(tree, (1, 1, 1)).route(0, 7) == 7
    assert Domains(tree, (2, 2, 2)).holders(3) == tuple(range(8))
    assert Domains(tree, (2, 2, 2)).hops(0, 7) == ()


def test_by_hand_four_dcs_in_domains_of_two() -> None:
    domains = Domains(Tree.symmetric((4, 2)), (2,))
    assert domains.sizes == (2, 1)
    assert domains.role(0, 2, 0) == "AG"
    assert domains.role(0, 4, 0) == "A2A"
    assert domains.role(0, 6, 0) is None
    assert domains.role(0, 1, 1) == "A2A"
    # The paper's pseudo-code, which looks at later levels only, would pair these at level 1.
    assert domains.role(0, 3, 1) is None
    assert domains.holders(5) == (5, 7)
    assert [tuple(hop) for hop in domains.hops(0, 7)] == [(0, 0, 4), (1, 4, 5)]


def test_uneven_by_hand() -> None:
    domains = Domains(Tree((3, 1, 2, 2), None), (2,))
    assert domains.holders(2) == (2, 3)
    assert domains.holders(3) == (0, 3)
    assert domains.holders(5) == (5, 7)
    # Worker 2 is (0, 2): its token for worker 5's experts lands at local index 2 mod 2 of DC 2, then moves inside.
    assert [tuple(hop) for hop in domains.hops(2, 5)] == [(0, 2, 4), (1, 4, 5)]
    assert domains.partners(3, 0) == {"AG": (0, 1, 2), "A2A": (6, 7)}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), "domain size 3 is not possible at level 0, allowed: 1, 2, 4"),
        ((0,), "domain size 0 is not possible at level 0"),
        ((1, 3), "domain size 3 is not possible at level 1, allowed: 1, 2"),
        ((), "found 0 domain sizes, allowed: 1 to 2"),
        ((1, 1, 1), "found 3 domain sizes"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Domains(Tree.symmetric((4, 2)), sizes)


def test_uneven_trees_have_domains_at_level_0_only() -> None:
    with pytest.raises(TopologyError, match="only level 0 has domains"):
        Domains(Tree((2, 4), None), (1, 2))
    with pytest.raises(TopologyError, match="no level 2"):
        Domains(Tree((2, 4), None), (1,)).role(0, 1, 2)


def test_parse_sizes() -> None:
    assert parse_sizes("2, 1,4") == (2, 1, 4)
    for text in ["", "2,", "a", "-1", "1.5", "9" * 20, "²"]:
        with pytest.raises(TopologyError, match="allowed: whole numbers with commas"):
            parse_sizes(text)
