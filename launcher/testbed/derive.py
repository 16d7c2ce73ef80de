"""From a topology to its testbed: the relay's shapes, and the topology that the sites read inside. Pure functions."""

from __future__ import annotations

from math import inf

import yaml

from launcher.testbed.names import address_of
from launcher.testbed.shaping import Access, Shape
from topology import Topology, TopologyError
from topology.model import Link

# The namespaces are new: every port is free in them.
WAN_PORT = 7000
CERTIFICATES = "certs"
DATACENTERS_MAX = 64


def shape_of(link: Link) -> Shape:
    """A link's shape: half its RTT each way."""
    return Shape(link.bandwidth_bytes_per_s, link.rtt_s / 2, link.jitter_s, link.loss, link.queue_bytes)


def shapes_of(topology: Topology) -> dict[tuple[int, int], Shape]:
    """The shape of every ordered pair of DC numbers. Raises TopologyError for more DCs than one machine should play."""
    count = len(topology.datacenters)
    if not 2 <= count <= DATACENTERS_MAX:
        raise TopologyError(f"{topology.source}: a testbed has 2 to {DATACENTERS_MAX} DCs, not {count}")
    return {pair: shape_of(link) for pair, link in topology.links.items()}


def access_of(topology: Topology) -> list[Access]:
    """Uplink and downlink of every DC."""
    return [Access(dc.uplink_bytes_per_s or inf, dc.downlink_bytes_per_s or inf) for dc in topology.datacenters]


def text_inside(text: str, names: tuple[str, ...], *, insecure: bool, one_mpirun: bool = False) -> str:
    """The YAML text of a checked topology file -> the text for the sites inside the testbed.

    There the coordinators meet at the testbed's addresses, and nothing is emulated again. Every host is this machine;
    with `one_mpirun`, which has to reach all of them, it is its DC's address.
    The links are under TLS, with what is in `CERTIFICATES` beside the file, unless the topology says `insecure`.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    hosts = {name: address_of(index) for index, name in enumerate(names)}
    addresses = {name: f"{host}:{WAN_PORT}" for name, host in hosts.items()}
    sites = _value(root, "datacenters")
    for key in ("emulate", "hosts", "wan", "listen", "tls"):
        _remove(root, key)
    if sites is None:
        root.value.append((_scalar("wan"), _strings(addresses)))
        if one_mpirun:
            root.value.append((_scalar("hosts"), _strings(hosts)))
    else:
        for name, site in sites.value:
            _move_inside(site, addresses[name.value])
            if one_mpirun:
                _give_address(site, name.value, hosts[name.value])
    if not insecure:
        root.value.append((_scalar("tls"), _strings({"folder": CERTIFICATES})))
    return str(yaml.serialize(root, Dumper=yaml.SafeDumper))


def _move_inside(site: yaml.MappingNode, address: str) -> None:
    """One DC of the explicit form."""
    for key in ("wan", "listen"):
        _remove(site, key)
    site.value.append((_scalar("wan"), _quoted(address)))
    hosts = _value(site, "hosts")
    for host in [] if hosts is None else hosts.value:
        _remove(host, "address")


def _give_address(site: yaml.MappingNode, dc: str, address: str) -> None:
    """Name the DC's hosts, and have all of them reached at its address."""
    hosts = _value(site, "hosts")
    if hosts is None:
        hosts = yaml.SequenceNode("tag:yaml.org,2002:seq", [_taken(site, "workers")])
        site.value.append((_scalar("hosts"), hosts))
    for number, host in enumerate(hosts.value):
        if _value(host, "name") is None:
            host.value.append((_scalar("name"), _quoted(f"{dc}-{number}")))
        host.value.append((_scalar("address"), _quoted(address)))


def _taken(mapping: yaml.MappingNode, key: str) -> yaml.MappingNode:
    """The entry of that key, moved to a mapping of its own."""
    entries = [(name, value) for name, value in mapping.value if name.value == key]
    _remove(mapping, key)
    return yaml.MappingNode("tag:yaml.org,2002:map", entries)


def _value(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in mapping.value if name.value == key), None)


def _remove(mapping: yaml.MappingNode, key: str) -> None:
    mapping.value = [(name, value) for name, value in mapping.value if name.value != key]


def _scalar(text: str) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text)


def _quoted(text: str) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style='"')


def _strings(entries: dict[str, str]) -> yaml.MappingNode:
    return yaml.MappingNode("tag:yaml.org,2002:map", [(_quoted(key), _quoted(value)) for key, value in entries.items()])
