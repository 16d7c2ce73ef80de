"""Calibrations: written and read back, refused where they are wrong, and put in the place of what was only said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.calibration import (
    Calibration,
    CodecFigures,
    Figure,
    LinkFigures,
    SiteFigures,
    measured_compute,
    slowest,
    usable,
)
from hybridep_rt.planner.calibration_file import dump_calibration, load_calibration, parse_calibration
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.routing import uniform
from topology.read import parse

TWO = parse(
    "cluster: t\nlevels:\n  - {name: dc, count: 2, bandwidth: 120 Mbit/s, latency: 40 ms}\n"
    "  - {name: gpu, count: 2, bandwidth: 1 GB/s}\n"
)
HEAD = 'cluster: t\ndate: "2026-11-29T23:00:00+00:00"\n'


def figures(least: float, most: float) -> st.SearchStrategy[Figure]:
    return st.lists(st.floats(least, most), min_size=1, max_size=5).map(Figure.of)


SITES = st.builds(
    SiteFigures,
    figures(1e6, 1e15),
    figures(0.1, 90.0),
    figures(1e-6, 1.0),
    figures(1e-6, 1.0),
    figures(1e-9, 1.0),
    figures(1e-7, 10.0),
    figures(1e-11, 1e-3),
    st.none() | figures(1e3, 1e12),
)
LINKS = st.builds(LinkFigures, figures(1e3, 1e11), figures(1e-5, 10.0))
CODECS = st.builds(CodecFigures, figures(1e-12, 1e-3), figures(1e-12, 1e-3))
CALIBRATIONS = st.builds(
    Calibration,
    st.just("t"),
    st.just("2026-11-29T23:00:00+00:00"),
    st.just("a model"),
    st.dictionaries(st.sampled_from(["a", "b"]), SITES),
    st.dictionaries(st.sampled_from([("a", "b"), ("b", "a")]), LINKS),
    st.dictionaries(st.sampled_from(["tokens=bf16", "weights=delta-1bit:predict=0.5"]), CODECS),
)


@given(CALIBRATIONS)
def test_a_calibration_reads_back_as_it_was_written(found: Calibration) -> None:
    again = parse_calibration(dump_calibration(found), "f")
    assert (again.cluster, again.date, again.workload) == (found.cluster, found.date, found.workload)
    for was, now in ((found.sites, again.sites), (found.links, again.links), (found.codecs, again.codecs)):
        assert now.keys() == was.keys()
        for name, entry in was.items():
            for figure, read_back in zip(entry, now[name], strict=True):
                assert (figure is None) == (read_back is None)
                assert figure is None or read_back == pytest.approx(figure, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: t\n", "f:1: the key 'date' is missing"),
        ("cluster: t\ndate: yesterday\n", r"f:2: date: found 'yesterday', allowed: a date and time such as"),
        (HEAD + "speed: 1\n", "f:3: unknown key 'speed', allowed: cluster, date"),
        (HEAD + "links:\n  a b: {}\n", r"f:4: links: found 'a b', allowed: two DCs, as in"),
        (HEAD + "links:\n  a -> a: {}\n", r"f:4: links: found 'a -> a', allowed: two DCs"),
        (HEAD + "links:\n  a -> b: {goodput: 1, rtt: 2}\n", "f:4: links.a -> b.goodput: found '1', allowed: a mapping"),
        (
            HEAD + "links:\n  a -> b:\n    goodput: {median: 1 MB/s, low: 2 MB/s, high: 3 MB/s}\n    rtt: 1\n",
            "f:5: links.a -> b.goodput: found a median outside its spread",
        ),
        (
            HEAD + "links:\n  a -> b:\n    goodput: {median: -1 MB/s, low: 2 MB/s, high: 3 MB/s}\n    rtt: 1\n",
            "f:5: links.a -> b.goodput.median: found '-1 MB/s', allowed: a number with a unit",
        ),
        (HEAD + "codecs:\n  shoes=bf16: {}\n", "f:4: codecs: found 'shoes=bf16', allowed: KIND=CODEC such as"),
        (HEAD + "sites:\n  a: {gemm: 1}\n", "f:4: sites.a: the key 'backward_factor' is missing"),
        ("", "f: the file is empty"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_calibration(text, "f")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(PlanError, match="/nowhere: can't be read"):
        load_calibration("/nowhere")


def exactly(value: float) -> Figure:
    return Figure(value, value, value)


SITE = SiteFigures(*map(exactly, (2e9, 3.0, 1e-4, 2e-4, 1e-6, 0.002, 1e-9, 5e8)))
LINK = LinkFigures(exactly(10e6), exactly(0.05))
FOUND = Calibration("t", "2026-11-29T23:00:00+00:00", "m", {"a": SITE, "b": SITE}, {("a", "b"): LINK})


def test_unmeasured_links_carry_what_tcp_leaves() -> None:
    plain = usable(TWO)
    assert plain.links[0, 1].bandwidth_bytes_per_s == pytest.approx(15e6 * 1448 / 1500)
    assert plain.links[0, 1].rtt_s == 0.04
    three = parse("cluster: t\nlevels:\n  - {name: dc, count: 3, bandwidth: 120 Mbit/s, latency: 40 ms}\n")
    assert usable(three).datacenters[0].uplink_bytes_per_s == pytest.approx(15e6 * 1448 / 1500)


def test_measured_links_replace_what_the_topology_says() -> None:
    found = usable(TWO, FOUND)
    assert (found.links[0, 1].bandwidth_bytes_per_s, found.links[0, 1].rtt_s) == (10e6, 0.05)
    assert found.links[1, 0].rtt_s == 0.04


def test_a_calibration_of_another_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="of cluster 'u', the topology is 't'"):
        usable(TWO, Calibration("u", "", ""))
    with pytest.raises(PlanError, match="names DC 'c', which the topology doesn't have"):
        usable(TWO, Calibration("t", "", "", links={("a", "c"): LINK}))


def test_measured_compute_replaces_what_the_workload_says() -> None:
    codecs = {"weights=bf16": CodecFigures(exactly(1e-9), exactly(3e-9))}
    found = Calibration("t", "", "", {"a": SITE, "b": SITE}, codecs=codecs)
    said = Compute(1e12, pre_expert_flops_per_token=7.0, gradient_codec_s=5e-9)
    compute = measured_compute(said, found, TWO, {"weights": "bf16", "gradients": "exact"})
    assert compute.flops_per_s == (2e9,) * 4
    assert (compute.backward_factor, compute.exchange_s) == (3.0, 0.002)
    assert (compute.weight_codec_s, compute.gradient_codec_s) == (2e-9, 5e-9)
    job = Job(TWO, Workload((LayerShape(8, 8, 4, 1, 128),), 1000.0, micro_batches=2), (uniform(4, 1),), compute)
    assert job.pre_expert_s == pytest.approx([0.0005, 0.0005])
    assert job.inside_rate == (5e8, 0.0)
    assert job.update_s == pytest.approx((0 + 4 * 128 / 4) * 1e-9)


def test_compute_of_some_dcs_only_is_not_used() -> None:
    found = Calibration("t", "", "", {"a": SITE})
    assert measured_compute(Compute(1e12), found, TWO).flops_per_s == 1e12


def test_a_dc_is_as_fast_as_its_slowest_worker() -> None:
    other = SiteFigures(Figure(1e9, 0.5e9, 4e9), *map(exactly, (2.0, 3e-4, 2e-4, 2e-6, 0.001, 3e-9)))
    both = slowest([SITE, other])
    assert both.gemm_flops_per_s == Figure(1e9, 0.5e9, 4e9)
    assert both.expert_s == Figure(3e-4, 1e-4, 3e-4)
    assert both.pre_expert_s == Figure(2e-6, 1e-6, 2e-6)
    assert both.exchange_s.median == 0.002
    assert both.update_s.median == 3e-9
    assert both.inside_bytes_per_s == exactly(5e8)
