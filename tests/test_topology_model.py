"""The data model: link tables, checks, digests; and the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology import Datacenter, Host, Level, Link, LinkTable, Topology, TopologyError, load, parse
from topology.presets import preset, preset_names

FAST, SLOW = Link(2e6, 0.01), Link(1e6, 0.02, queue_bytes=1000)


def _topology(**changes: object) -> Topology:
    datacenters = tuple(Datacenter(name, (Host(name, None, 2),)) for name in "ab")
    links = {(0, 1): FAST, (1, 0): SLOW}
    levels = (Level("dc", 2, SLOW), Level("gpu", 2, FAST))
    return replace(Topology("c", datacenters, links, levels), **changes)  # type: ignore[arg-type]


@given(st.integers(1, 5), st.data())
def test_a_link_table_is_what_it_was_made_of(count: int, data: st.DataObject) -> None:
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t]
    full = {pair: data.draw(st.sampled_from([FAST, SLOW])) for pair in pairs}
    common = data.draw(st.sampled_from([FAST, SLOW]))
    short = {pair: link for pair, link in full.items() if link != common or data.draw(st.booleans())}
    table, sparse = LinkTable(count, full), LinkTable(count, short, common)
    assert dict(table) == dict(sparse) == full
    assert table == sparse
    assert (table.common, table.special) == (sparse.common, sparse.special)
    assert list(table) == pairs
    assert len(table) == len(pairs)
    assert table.distinct() == set(full.values())


def test_a_link_table_names_the_missing_pair() -> None:
    with pytest.raises(TopologyError, match="no link from DC 1 to DC 0"):
        LinkTable(2, {(0, 1): FAST})
    with pytest.raises(TopologyError, match=r"no link can join DCs \(0, 2\): there are 2"):
        LinkTable(2, {(0, 2): FAST}, SLOW)
    table = LinkTable(2, {}, FAST)
    for pair in [(0, 0), (0, 2), (-1, 0), "x"]:
        assert pair not in table


def test_names() -> None:
    topology = _topology()
    assert topology.dc_index("b") == 1
    with pytest.raises(TopologyError, match="no DC 'z', there are: a, b"):
        topology.dc_index("z")


def test_contradictions() -> None:
    a, b = _topology().datacenters
    with pytest.raises(TopologyError, match="two DCs are named 'a'"):
        _topology(datacenters=(a, a))
    with pytest.raises(TopologyError, match="at least one DC"):
        _topology(datacenters=(), links={})
    with pytest.raises(TopologyError, match="DC 'b': every host needs at least one worker"):
        _topology(datacenters=(a, replace(b, hosts=(Host("h", None, 0),))))
    with pytest.raises(TopologyError, match=r"levels \(2, 2\) don't fit DCs with \(2, 3\) workers"):
        _topology(datacenters=(a, replace(b, hosts=(Host("h", None, 3),))))


def test_the_digest_covers_what_sites_must_agree_on() -> None:
    topology = _topology()
    a, b = topology.datacenters
    same = [
        topology,
        _topology(source="elsewhere"),
        _topology(datacenters=(replace(a, wan=("x", 1), listen=("y", 2)), b)),
        _topology(datacenters=(replace(a, hosts=(Host("g", "g", 1), Host("h", "h", 1))), b)),
        _topology(links=LinkTable(2, {(0, 1): FAST}, SLOW)),
    ]
    other = [
        _topology(cluster="d"),
        _topology(datacenters=(a, replace(b, name="z"))),
        _topology(datacenters=(a, replace(b, uplink_bytes_per_s=1e6))),
        _topology(links={(0, 1): SLOW, (1, 0): FAST}),
        _topology(links={(0, 1): FAST, (1, 0): FAST}),
        _topology(levels=None),
        _topology(emulate=True),
        _topology(insecure=True),
    ]
    assert {each.digest() for each in same} == {topology.digest()}
    assert len({each.digest() for each in [topology, *other]}) == len(other) + 1


def test_the_digest_is_stable() -> None:
    text = "cluster: c\nlevels: [{name: dc, count: 2, bandwidth: 1 Gbit/s, latency: 1 ms}]"
    assert parse(text).digest() == "f0279b521929a8ebb77a0dd448ff756194749a6153150f5c40d0843652e3098e"


def test_presets() -> None:
    assert {"two-dc", "three-uneven", "three-level", "four-dc-10g"} <= set(preset_names())
    for name in preset_names():
        topology = preset(name)
        assert topology.cluster == name
        assert topology.source == f"preset:{name}"
        assert load(f"preset:{name}") == topology
    assert preset("two-dc").emulate
    assert preset("three-uneven").levels is None
    assert preset("three-level").scaling == (2, 2, 4)


def test_no_such_preset() -> None:
    with pytest.raises(TopologyError, match=r"no preset 'two-d' \(did you mean 'two-dc'\?\), allowed: four-dc-10g, "):
        load("preset:two-d")
