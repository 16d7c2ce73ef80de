"""From a topology to its testbed: shapes, names, the file that sites read, and verdicts."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf
from pathlib import Path

import pytest

from launcher.certs import inspect
from launcher.testbed.derive import access_of, shapes_of, text_inside
from launcher.testbed.inside import write_topology
from launcher.testbed.names import Owner, address_of, owner_of, started_in
from launcher.testbed.report import json_of, table_of
from launcher.testbed.shaping import Access, Shape
from launcher.testbed.verdict import Measured, expect, judge
from topology import Topology, TopologyError, load, parse
from topology.presets import preset, preset_names

UNEVEN = """
cluster: demo  # a comment
emulate: true
datacenters:
  no: {hosts: [{address: 10.1.0.1, workers: 2}, {name: x, address: 10.1.0.2, workers: 1}], uplink: 1 Gbit/s}
  bonn: {workers: 2, downlink: 300 Mbit/s}
links:
  no -> bonn: {bandwidth: 200 Mbit/s, rtt: 40 ms, jitter: 2 ms, loss: 0.1 %, queue: 64 KiB}
  bonn -> no: {bandwidth: 100 Mbit/s, rtt: 20 ms}
"""
LEVELS = """
cluster: demo
levels:
  - {name: dc, count: 2, bandwidth: 100 Mbit/s, latency: 40 ms}
  - {name: node, count: 2, bandwidth: 10 GB/s, latency: 20 us}
  - {name: gpu, count: 4, bandwidth: 300 GB/s}
wan: {a: "a.example.org:1", b: "b.example.org:1"}
listen: {a: "10.0.0.1:1"}
hosts: {a: [10.0.0.1, 10.0.0.2]}
"""


def inside(text: str, *, one_mpirun: bool = False) -> Topology:
    layout = parse(text)
    return parse(text_inside(text, layout.dc_names, insecure=layout.insecure, one_mpirun=one_mpirun))


def test_every_ordered_pair_has_its_shape() -> None:
    topology = parse(UNEVEN)
    assert shapes_of(topology) == {(0, 1): Shape(25e6, 0.02, 0.002, 0.001, 65536), (1, 0): Shape(12.5e6, 0.01)}
    assert access_of(topology) == [Access(125e6, inf), Access(inf, 37.5e6)]


def test_an_uneven_topology_keeps_its_meaning_inside() -> None:
    there, here = inside(UNEVEN), parse(UNEVEN)
    assert (there.links, there.workers_per_dc, access_of(there)) == (here.links, here.workers_per_dc, access_of(here))
    assert [dc.wan for dc in there.datacenters] == [("198.18.0.1", 7000), ("198.18.0.2", 7000)]
    assert {host.address for dc in there.datacenters for host in dc.hosts} == {None}
    assert (there.emulate, there.insecure, there.tls_folder) == (False, False, "certs")


def test_a_symmetric_topology_keeps_its_levels_inside() -> None:
    there, here = inside(LEVELS), parse(LEVELS)
    assert there.levels == here.levels
    assert {dc.listen for dc in there.datacenters} == {None}
    assert {host.address for dc in there.datacenters for host in dc.hosts} == {None}


@pytest.mark.parametrize("text", [UNEVEN, LEVELS])
def test_links_are_under_tls_unless_the_topology_is_insecure(tmp_path: Path, text: str) -> None:
    source = tmp_path / "site.yaml"
    for more, insecure in (("tls: {folder: mine}", False), ("insecure: true", True)):
        source.write_text(f"{text}\n{more}\n")
        place = tmp_path / f"{insecure}"
        place.mkdir()
        there = load(str(write_topology(load(str(source)), place)))
        assert (there.insecure, there.tls_folder) == (insecure, None if insecure else "certs")
        if insecure:
            assert [path.name for path in place.iterdir()] == ["topology.yaml"]
            continue
        shown = inspect(place / "certs", datetime.now(UTC))
        assert [each.file for each in shown] == ["ca", *sorted(there.dc_names)]
        assert not any(each.findings for each in shown)
        assert not (place / "certs" / "ca.key").exists()


@pytest.mark.parametrize("text", [UNEVEN, LEVELS])
def test_one_mpirun_reaches_every_host_at_its_dc(text: str) -> None:
    there, here = inside(text, one_mpirun=True), parse(text)
    assert there.workers_per_dc == here.workers_per_dc
    assert [{host.address for host in dc.hosts} for dc in there.datacenters] == [{"198.18.0.1"}, {"198.18.0.2"}]


@pytest.mark.parametrize("name", preset_names())
def test_presets_can_be_played(name: str) -> None:
    topology = preset(name)
    if len(topology.datacenters) > 64:
        with pytest.raises(TopologyError, match="2 to 64 DCs"):
            shapes_of(topology)
    else:
        assert len(shapes_of(topology)) == len(topology.links)


def test_names_carry_their_owner() -> None:
    owner = Owner(12, 3456)
    assert owner.directory == "hep-12-3456"
    assert owner_of(owner.directory) == owner_of(owner.namespace("dc-1")) == owner


@pytest.mark.parametrize("name", ["hep-", "hep-12", "hep-012-3", "hep-1-2-", "hep-1-2-a/b", "x-hep-1-2", "hep-1-2-a\n"])
def test_other_names_have_no_owner(name: str) -> None:
    assert owner_of(name) is None


def test_a_start_time_is_read_past_any_program_name() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert started_in(f"7 (a) b (c)) S {fields}") == 22


def test_addresses_stay_in_the_testing_network() -> None:
    assert [address_of(index) for index in (0, 254, 255)] == ["198.18.0.1", "198.18.0.255", "198.18.1.0"]
    assert address_of(65535) == "198.19.0.0"


def test_the_slowest_part_of_the_way_sets_the_rate() -> None:
    there, back = Shape(1000, 0.02, jitter_s=0.004), Shape(10, 0.03)
    expected = expect(("a", "b"), there, back, Access(800, inf), Access(inf, 900))
    assert expected.rate_bytes_per_s == 800
    assert expected.rtt_s == pytest.approx(0.052)


@pytest.mark.parametrize(
    ("goodput", "rtt_s", "rate_ok", "rtt_ok"),
    [
        (965.3, 0.040, True, True),
        (900.0, 0.040, False, True),
        (1030.0, 0.040, False, True),
        (965.3, 0.043, True, False),
    ],
)
def test_verdicts_count_headers(goodput: float, rtt_s: float, rate_ok: bool, rtt_ok: bool) -> None:
    expected = expect(("a", "b"), Shape(1000, 0.02), Shape(1000, 0.02), Access(), Access())
    verdict = judge(expected, Measured(goodput, rtt_s, 1448, 0.1))
    assert (verdict.rate_ok, verdict.rtt_ok, verdict.passed) == (rate_ok, rtt_ok, rate_ok and rtt_ok)


def test_reports_hold_every_link() -> None:
    expected = expect(("a", "b"), Shape(1000), Shape(1000), Access(), Access())
    verdicts = [judge(expected, Measured(965.0, 0.0001, 1448, 0.1))] * 3
    assert table_of(verdicts).row_count == 3
    assert json_of(verdicts).count('"passed": true') == 3
