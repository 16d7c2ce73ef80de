"""Topology files: both forms, and an error of one clear line for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import Host, Level, Link, TopologyError, load, parse
from topology.read_sites import ASSUMED_INSIDE

EXAMPLES = Path(__file__).parent.parent / "examples" / "topologies"

SHORT = """\
cluster: demo
levels:
  - {name: dc, count: 2, bandwidth: 100 Mbit/s, latency: 40 ms}
  - {name: node, count: 2, bandwidth: 10 GB/s, latency: 20 us}
  - {name: gpu, count: 4, bandwidth: 300 GB/s}
"""

LONG = """\
cluster: demo
datacenters:
  lyon: {workers: 3, wan: "lyon.example.org:7000", listen: "10.0.0.5:7001", uplink: 1 Gbit/s, downlink: 2 Gbit/s}
  bonn:
    hosts:
      - {address: 10.1.0.1, workers: 4}
      - {name: second, address: 10.1.0.2, workers: 2}
      - {workers: 1}
  oslo: {workers: 1, wan: "[2001:db8::1]:7000"}
links:
  lyon -> bonn: {bandwidth: 200 Mbit/s, rtt: 40 ms, jitter: 2 ms, loss: 0.1 %, queue: 64 KiB}
  bonn->lyon: {bandwidth: 100 Mbit/s}
  lyon <-> oslo: {bandwidth: {up: 80 Mbit/s, down: 8 Mbit/s}, rtt: 30 ms}
defaults:
  link: {bandwidth: 50 Mbit/s, rtt: 10 ms, jitter: 1 ms}
emulate: true
insecure: yes
"""


def test_short_form() -> None:
    topology = parse(SHORT)
    wan = Link(12.5e6, 0.04)
    assert topology.cluster == "demo"
    assert topology.dc_names == ("a", "b")
    assert topology.workers_per_dc == (8, 8)
    assert topology.scaling == (2, 2, 4)
    assert topology.levels == (
        Level("dc", 2, wan),
        Level("node", 2, Link(10e9, 20e-6)),
        Level("gpu", 4, Link(300e9, 0.0)),
    )
    assert topology.links == {(0, 1): wan, (1, 0): wan}
    assert topology.datacenters[1].hosts == (Host("b-0", None, 8),)
    assert not topology.emulate
    assert not topology.insecure
    assert topology.source == "<text>"


def test_short_form_with_places() -> None:
    topology = parse(SHORT + 'hosts: {a: 10.0.0.1, b: [n1, n2]}\nwan: {a: "x:1", b: "y:2"}\nlisten: {b: "0.0.0.0:3"}\n')
    a, b = topology.datacenters
    assert a.hosts == (Host("10.0.0.1", "10.0.0.1", 8),)
    assert b.hosts == (Host("n1", "n1", 4), Host("n2", "n2", 4))
    assert (a.wan, b.wan) == (("x", 1), ("y", 2))
    assert (a.listen, b.listen) == (None, ("0.0.0.0", 3))


def test_short_form_with_a_bad_wan() -> None:
    level = "{name: dc, count: 3, bandwidth: 1 Gbit/s, latency: 9 ms, jitter: 1 ms, loss: 1 %, queue: 1 MB}"
    topology = parse(f"cluster: c\nlevels: [{level}]")
    assert topology.links[2, 0] == Link(125e6, 0.009, 0.001, 0.01, 1_000_000)
    assert topology.workers_per_dc == (1, 1, 1)


def test_names_after_z() -> None:
    topology = parse("cluster: c\nlevels: [{name: dc, count: 704, bandwidth: 1 Gbit/s, latency: 9 ms}]")
    names = topology.dc_names
    assert (names[25], names[26], names[27], names[701], names[702]) == ("z", "aa", "ab", "zz", "aaa")
    assert topology.dc_index("ab") == 27


def test_explicit_form() -> None:
    topology = parse(LONG)
    lyon, bonn, oslo = topology.datacenters
    assert (lyon.wan, lyon.listen) == (("lyon.example.org", 7000), ("10.0.0.5", 7001))
    assert (lyon.uplink_bytes_per_s, lyon.downlink_bytes_per_s) == (125e6, 250e6)
    assert lyon.hosts == (Host("lyon-0", None, 3),)
    assert bonn.hosts == (Host("10.1.0.1", "10.1.0.1", 4), Host("second", "10.1.0.2", 2), Host("bonn-2", None, 1))
    assert oslo.wan == ("2001:db8::1", 7000)
    assert topology.workers_per_dc == (3, 7, 1)
    assert topology.levels is None
    assert topology.scaling is None
    assert topology.links == {
        (0, 1): Link(25e6, 0.04, 0.002, 0.001, 65536),
        (1, 0): Link(12.5e6, 0.01, 0.001),
        (0, 2): Link(10e6, 0.03, 0.001),
        (2, 0): Link(1e6, 0.03, 0.001),
        (1, 2): Link(6.25e6, 0.01, 0.001),
        (2, 1): Link(6.25e6, 0.01, 0.001),
    }
    assert topology.emulate
    assert topology.insecure


def test_links_as_a_list() -> None:
    links = """
  - {from: lyon, to: bonn, bandwidth: 200 Mbit/s, rtt: 40 ms, jitter: 2 ms, loss: 0.1 %, queue: 64 KiB}
  - {from: bonn, to: lyon, bandwidth: 100 Mbit/s}
  - {from: lyon, to: oslo, bandwidth: 80 Mbit/s, rtt: 30 ms}
  - {from: oslo, to: lyon, bandwidth: 8 Mbit/s, rtt: 30 ms}
"""
    start, end = LONG.index("links:") + len("links:"), LONG.index("defaults:")
    assert parse(LONG[:start] + links + LONG[end:]).links == parse(LONG).links


EQUAL = """\
cluster: c
datacenters: {{x: {{hosts: {hosts}}}, y: {{hosts: {hosts}}}}}
defaults:
  link: {{bandwidth: 50 Mbit/s, rtt: 10 ms}}
  datacenter: {inside}
"""
TWO_HOSTS = "[{address: h1, workers: 2}, {address: h2, workers: 2}]"


def test_equal_datacenters_are_symmetric() -> None:
    inside = "{node_bandwidth: 10 GB/s, node_latency: 9 us, worker_bandwidth: 90 GB/s}"
    topology = parse(EQUAL.format(hosts=TWO_HOSTS, inside=inside))
    assert topology.scaling == (2, 2, 2)
    assert topology.levels is not None
    assert [level.name for level in topology.levels] == ["dc", "node", "worker"]
    assert [level.link for level in topology.levels] == [Link(6.25e6, 0.01), Link(10e9, 9e-6), Link(90e9, 0.0)]


@pytest.mark.parametrize(
    ("hosts", "inside", "link"),
    [
        (TWO_HOSTS, "{uplink: 1 Gbit/s}", ASSUMED_INSIDE),
        (TWO_HOSTS, "{worker_bandwidth: 90 GB/s}", ASSUMED_INSIDE),
        ("[{workers: 4}]", "{uplink: 1 Gbit/s}", ASSUMED_INSIDE),
        ("[{workers: 4}]", "{worker_bandwidth: 90 GB/s}", Link(90e9, 0.0)),
    ],
)
def test_equal_datacenters_without_node_level(hosts: str, inside: str, link: Link) -> None:
    topology = parse(EQUAL.format(hosts=hosts, inside=inside))
    assert topology.scaling == (2, 4)
    assert topology.levels is not None
    assert topology.levels[1].link == link


def test_the_level_0_link_of_unlike_links_is_the_worst() -> None:
    links = "{x -> y: {bandwidth: 8 Mbit/s, rtt: 1 ms}, y -> x: {bandwidth: 80 Mbit/s, rtt: 2 ms}}"
    topology = parse(f"cluster: c\ndatacenters: {{x: {{workers: 1}}, y: {{workers: 1}}}}\nlinks: {links}")
    assert topology.levels is not None
    assert topology.levels[0].link == Link(1e6, 0.002)


def test_equal_datacenters_of_unequal_hosts_are_uneven() -> None:
    topology = parse(EQUAL.format(hosts="[{workers: 1}, {workers: 2}]", inside="{uplink: 1 Gbit/s}"))
    assert topology.levels is None
    assert topology.workers_per_dc == (3, 3)


def test_one_datacenter_needs_no_links() -> None:
    topology = parse("cluster: c\ndatacenters: {x: {workers: 4}}")
    assert topology.scaling == (1, 4)
    assert dict(topology.links) == {}


@pytest.mark.parametrize("name", ["two-dc", "uneven", "two-sites"])
def test_examples(name: str) -> None:
    topology = load(EXAMPLES / f"{name}.yaml")
    assert topology.emulate
    assert topology.cluster == name


DC = "{name: dc, count: 2, bandwidth: 1 Gbit/s, latency: 1 ms}"
TWO = "datacenters: {x: {workers: 1}, y: {workers: 1}}"
USUAL = "defaults: {link: {bandwidth: 1 Gbit/s, rtt: 1 ms}}"

ERRORS = [
    ("", ": the file is empty"),
    ("- a", ":1: found a list, allowed: a mapping"),
    ("just text", ":1: found 'just text', allowed: a mapping"),
    ("cluster: c", ":1: needs either 'levels' (symmetric) or 'datacenters' (explicit)"),
    ("cluster: c\nlevels: []\ndatacenters: {}", ":1: needs either 'levels'"),
    (f"levels: [{DC}]", ":1: the key 'cluster' is missing"),
    ("cluster: c\nlevels: {", ":2: not valid YAML"),
    ("cluster: c\nlevels: [a\nb: c", "not valid YAML"),
    ("cluster: c\x00", "not valid YAML"),
    ("cluster: c\n---\ncluster: d", "not valid YAML"),
    ("cluster: &a c", ":1: not valid YAML: anchors and aliases are not allowed"),
    ("cluster: c\nlevels: *a", ":2: not valid YAML: anchors and aliases are not allowed"),
    ("cluster: !!python/object:os.system c", ":1: not valid YAML: tags are not allowed"),
    ("a: " + "[" * 20 + "]" * 20, ":1: not valid YAML: nested deeper than 16 levels"),
    (
        f"cluster: c\nlevel: [{DC}]\nlevels: [{DC}]",
        ":2: unknown key 'level' (did you mean 'levels'?), allowed: cluster",
    ),
    (f"cluster: c\nzzz: 1\nlevels: [{DC}]", ":2: unknown key 'zzz', allowed: cluster, levels, hosts"),
    (f"cluster: c\nlevels: [{DC}]\ncluster: d", ":3: key 'cluster' occurs twice (first in line 1)"),
    (f"cluster: [c]\nlevels: [{DC}]", ":1: cluster: found a list, allowed: a name"),
    (f"cluster: 'a b'\nlevels: [{DC}]", ":1: cluster: found 'a b', allowed: a name"),
    (f"cluster:\nlevels: [{DC}]", ":1: cluster: found nothing, allowed: a name"),
    (f"[x]: 1\nlevels: [{DC}]", ":1: found a list, allowed: a word as key"),
    ("cluster: c\nlevels: 3", ":2: levels: found '3', allowed: a list of levels"),
    ("cluster: c\nlevels: []", ":2: levels: found an empty list, allowed: a list of levels"),
    ("cluster: c\nlevels:\n  - 3", ":3: levels[0]: found '3', allowed: a mapping with the keys name"),
    (f"cluster: c\nlevels: [{', '.join([DC] * 9)}]", ":2: levels: found 9 levels, allowed: 1 to 8"),
    (f"cluster: c\nlevels: [{DC}, {DC}]", ":2: levels[1]: two levels are named 'dc'"),
    (f"cluster: c\nlevels: [{DC.replace('2', '0')}]", ":2: levels[0].count: found '0', allowed: a whole number from 1"),
    (f"cluster: c\nlevels: [{DC.replace('2', '5000')}]", "allowed: a whole number from 1 to 4096"),
    (f"cluster: c\nlevels: [{DC.replace('2', '-1')}]", "levels[0].count: found '-1'"),
    (f"cluster: c\nlevels: [{DC.replace('2', '1.5')}]", "levels[0].count: found '1.5'"),
    (f"cluster: c\nlevels: [{DC.replace('2', 'yes')}]", "levels[0].count: found 'yes'"),
    ("cluster: c\nlevels: [" + DC.replace("2", "'2'") + "]", "levels[0].count: found '2'"),
    (
        f"cluster: c\nlevels: [{DC.replace('1 ms', '40')}]",
        "levels[0].latency: found '40' without a unit, allowed: s, ms",
    ),
    (f"cluster: c\nlevels: [{DC.replace('1 ms', '2000 s')}]", "levels[0].latency: found '2000 s', allowed: 0 to 60"),
    (f"cluster: c\nlevels: [{DC.replace('1 Gbit', '0 Gbit')}]", "levels[0].bandwidth: found '0 Gbit/s', allowed: 1 to"),
    (f"cluster: c\nlevels: [{DC.replace('latency', 'rtt')}]", ":2: levels[0]: unknown key 'rtt'"),
    (f"cluster: c\nlevels: [{DC.replace(', latency: 1 ms', '')}]", ":2: levels[0]: the key 'latency' is missing"),
    (
        f"cluster: c\nlevels: [{DC}, {{name: w, count: 1048576, bandwidth: 1 GB/s}}]",
        "levels: more than 1048576 workers",
    ),
    (f"cluster: c\nlevels: [{DC}]\nwan: {{c: 'x:1'}}", ":3: wan: no DC 'c', allowed: a, b"),
    (f"cluster: c\nlevels: [{DC}]\nwan: {{a: x}}", ":3: wan.a: found 'x', allowed: host:port"),
    (f"cluster: c\nlevels: [{DC}]\nwan: {{a: 'x:1', b: 'x:1'}}", ":3: wan.b: DC 'a' has this WAN address too"),
    (f"cluster: c\nlevels: [{DC}]\nlisten: {{a: 'x:1'}}", ":3: listen.a: 'listen' needs a 'wan' address"),
    (f"cluster: c\nlevels: [{DC}]\nhosts: {{a: [h, i]}}", ":3: hosts.a: 1 workers can't be spread evenly over 2 hosts"),
    (f"cluster: c\nlevels: [{DC}]\nemulate: 1", ":3: emulate: found '1', allowed: true or false"),
    (f"cluster: c\n{TWO}\n{USUAL}\ninsecure: [a]", ":4: insecure: found a list, allowed: true or false"),
    (f"cluster: c\n{TWO}", ":2: datacenters: no link x -> y: add it to 'links', or give 'bandwidth' and 'rtt'"),
    (f"cluster: c\n{TWO}\nlinks:\n  x -> y: {{bandwidth: 1 Gbit/s, rtt: 1 ms}}", ":4: links: no link y -> x"),
    (f"cluster: c\n{TWO}\nlinks: {{x -> z: {{rtt: 1 ms}}}}", ":3: links: no DC 'z', allowed: x, y"),
    (f"cluster: c\n{TWO}\nlinks: {{x -> x: {{rtt: 1 ms}}}}", ":3: links: a link needs two different DCs"),
    (f"cluster: c\n{TWO}\nlinks: {{x to y: {{rtt: 1 ms}}}}", ":3: links: found 'x to y', allowed: a pair of DCs"),
    (f"cluster: c\n{TWO}\nlinks: {{x -> y: {{rtt: 1 ms}}}}", ":3: links.x -> y: the key 'bandwidth' is missing"),
    (f"cluster: c\n{TWO}\nlinks: {{x -> y: {{bandwidth: 1 MB/s}}}}", ":3: links: the key 'rtt' is missing"),
    (
        f"cluster: c\n{TWO}\nlinks: {{x -> y: {{bandwidth: {{up: 1 MB/s, down: 1 MB/s}}, rtt: 1 ms}}}}",
        ":3: links.x -> y.bandwidth: found a mapping, allowed: one rate",
    ),
    (
        f"cluster: c\n{TWO}\n{USUAL}\nlinks:\n  x <-> y: {{rtt: 2 ms}}\n  y -> x: {{rtt: 3 ms}}",
        ":6: links: the link y -> x is given twice (first in line 5)",
    ),
    (f"cluster: c\n{TWO}\n{USUAL}\nlinks: [{{from: x, rtt: 1 ms}}]", ":4: links[0]: the key 'to' is missing"),
    (f"cluster: c\n{TWO}\n{USUAL}\nlinks: 3", ":4: links: found '3', allowed: a mapping of pairs"),
    ("cluster: c\ndatacenters:\n  x: {workers: 1}\n  x: {workers: 1}", ":4: datacenters: key 'x' occurs twice"),
    ("cluster: c\ndatacenters: {x: {workers: 0}}", ":2: datacenters.x.workers: found '0', allowed: a whole number"),
    ("cluster: c\ndatacenters: {x: {}}", ":2: datacenters.x: found an empty mapping"),
    ("cluster: c\ndatacenters: {x: {wan: 'h:1'}}", ":2: datacenters.x: needs either 'workers'"),
    ("cluster: c\ndatacenters: {x: {workers: 1, hosts: [{workers: 1}]}}", ":2: datacenters.x: needs either 'workers'"),
    ("cluster: c\ndatacenters: {x: {hosts: [{address: h}]}}", "datacenters.x.hosts[0]: the key 'workers' is missing"),
    ("cluster: c\ndatacenters: {x: {hosts: [{address: 'a b', workers: 1}]}}", "allowed: a host name or IP address"),
    (
        "cluster: c\ndatacenters: {x: {hosts: [{address: h, workers: 1}, {address: h, workers: 1}]}}",
        "datacenters.x.hosts: two hosts are named 'h'",
    ),
    ("cluster: c\ndatacenters: {x: {workers: 1, wan: 'h:0'}}", "datacenters.x.wan: found 'h:0', allowed: host:port"),
    ("cluster: c\ndatacenters: {x: {workers: 1, wan: 'h:65536'}}", "allowed: host:port with a port from 1 to 65535"),
    ("cluster: c\ndatacenters: {x: {workers: 1, wan: '2001:db8::1:7000'}}", "allowed: host:port"),
    (
        "cluster: c\ndatacenters: {x: {workers: 1, listen: 'h:1'}}",
        "datacenters.x.listen: 'listen' needs a 'wan' address",
    ),
    ("cluster: c\ndatacenters: {'x/y': {workers: 1}}", ":2: datacenters: found 'x/y', allowed: a name"),
    (
        f"cluster: c\n{TWO}\ndefaults: {{link: {{loss: 100 %}}}}",
        ":3: defaults.link.loss: found '100 %', allowed: 0 to 0.99",
    ),
    (f"cluster: c\n{TWO}\ndefaults: {{datacenter: {{workers: 1}}}}", ":3: defaults.datacenter: unknown key 'workers'"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_errors_are_one_line_with_file_line_and_path(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse(text, "file.yaml")
    assert str(caught.value).startswith("file.yaml:")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="can't read the file: No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(TopologyError, match="can't read the file: Is a directory"):
        load(tmp_path)
    with pytest.raises(TopologyError, match="can't read the file"):
        load("a\0b")


def test_a_file_that_is_too_large_or_not_text(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    file.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(TopologyError, match=r"big.yaml: the file is larger than 1 MiB"):
        load(file)
    file.write_bytes(b"cluster: \xff")
    with pytest.raises(TopologyError, match=r"big.yaml: not UTF-8 text at byte 9"):
        load(file)


def test_too_many_datacenters() -> None:
    text = "cluster: c\ndatacenters: {" + ", ".join(f"d{i}: {{workers: 1}}" for i in range(4097)) + "}"
    with pytest.raises(TopologyError, match="datacenters: found 4097 DCs, allowed: up to 4096"):
        parse(text)


@given(st.text(max_size=60))
def test_any_text_is_a_topology_or_a_topology_error(text: str) -> None:
    _parse_or_error(text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([SHORT, LONG]), st.data())
def test_nearly_valid_files(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 12, len(text))))
    put = data.draw(
        st.one_of(
            st.sampled_from(["", " ", "\n", "{", "}", "[", "]", ":", "-", "0", "&a ", "*a", "!!x "]),
            st.text(max_size=3),
        )
    )
    _parse_or_error(text[:start] + put + text[end:])


def _parse_or_error(text: str) -> None:
    message = "<text>:"
    try:
        parse(text)
    except TopologyError as error:
        message = str(error)
    assert message.startswith("<text>:")
    assert "\n" not in message


def test_links_between_dcs() -> None:
    text = """
cluster: c
datacenters:
  a: {workers: 1}
  b: {workers: 1, reachable: false}
links:
  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}
tls: {folder: certs}
congestion: cubic
"""
    topology = parse(text)
    assert [dc.reachable for dc in topology.datacenters] == [True, False]
    assert (topology.tls_folder, topology.congestion) == ("certs", "cubic")
    assert topology.digest() != parse(text.replace(", reachable: false", "")).digest()
    assert topology.digest() == parse(text.replace("cubic", "bbr").replace("certs", "keys")).digest()
    with pytest.raises(TopologyError, match="neither 'a' nor 'b' is reachable by the other"):
        parse(text.replace("a: {workers: 1}", "a: {workers: 1, reachable: no}"))


def test_a_codec_is_kept_as_text() -> None:
    text = "cluster: c\ndatacenters:\n  a: {workers: 1}\ncodec: default,gradients=2bit:t=2\n"
    assert parse(text).codec == "default,gradients=2bit:t=2"
    assert parse(text).staleness is None
    assert parse(text + "staleness: 1\n").staleness == 1
    assert parse(text).replan is None
    assert parse(text + "replan: 500\n").replan == 500
    for wrong in ("[a]", "''", "a b", "a" * 201):
        with pytest.raises(TopologyError, match=r"<text>:4: codec.* up to 200 letters"):
            parse(text.replace("default,gradients=2bit:t=2", wrong))
