"""Locations and their inverse, in symmetric and uneven trees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology import TopologyError
from topology.location import Tree
from topology.presets import preset

scalings = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
uneven = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(lambda counts: Tree(tuple(counts), None))
trees = st.one_of(scalings.map(Tree.symmetric), uneven)


@given(trees)
def test_number_is_the_inverse_of_locate_and_keeps_the_order(tree: Tree) -> None:
    locations = [tree.locate(worker) for worker in range(tree.workers)]
    assert [tree.number(location) for location in locations] == list(range(tree.workers))
    assert locations == sorted(set(locations))
    assert all(len(location) == tree.depth for location in locations)


@given(trees)
def test_the_first_digit_is_the_datacenter(tree: Tree) -> None:
    dcs = [tree.locate(worker)[0] for worker in range(tree.workers)]
    assert [dcs.count(dc) for dc in range(len(tree.workers_per_dc))] == list(tree.workers_per_dc)


def test_mixed_radix_by_hand() -> None:
    tree = Tree.of(preset("three-level"))
    assert tree.scaling == (2, 2, 4)
    assert tree.locate(0) == (0, 0, 0)
    assert tree.locate(7) == (0, 1, 3)
    assert tree.locate(13) == (1, 1, 1)


def test_uneven_by_hand() -> None:
    tree = Tree((3, 1, 2), None)
    assert [tree.locate(worker) for worker in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("worker", [-1, 6])
def test_no_such_worker(worker: int) -> None:
    with pytest.raises(TopologyError, match=f"no worker {worker}: there are 6"):
        Tree((3, 1, 2), None).locate(worker)


@pytest.mark.parametrize("location", [(0, 3), (1, 1), (3, 0), (0,), (0, 0, 0), (-1, 0), (0, -1), ()])
def test_no_such_location(location: tuple[int, ...]) -> None:
    with pytest.raises(TopologyError, match="no worker at location"):
        Tree((3, 1, 2), None).number(location)


@pytest.mark.parametrize("location", [(2, 0), (0, 4), (0,), (0, -1)])
def test_no_such_symmetric_location(location: tuple[int, ...]) -> None:
    with pytest.raises(TopologyError, match="no worker at location"):
        Tree.symmetric((2, 4)).number(location)
