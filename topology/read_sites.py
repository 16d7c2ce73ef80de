"""The explicit form of a topology file: named datacenters, and a link for each ordered pair of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from topology.document import Item
from topology.errors import shown
from topology.model import Datacenter, Host, Level, Link, LinkTable, Topology, some
from topology.read_fields import (
    COMMON_KEYS,
    DATACENTERS_MAX,
    HOST_KEYS,
    LINK_KEYS,
    WORKERS_MAX,
    check_wan,
    hosts_here,
    link,
    rate,
    time,
    unique_hosts,
)

KEYS = ("cluster", "datacenters", "links", "defaults", *COMMON_KEYS)
# The inside of a DC where the file says nothing about it: a 100 Gbit/s network, less its headers.
ASSUMED_INSIDE = Link(10e9, 20e-6)
_DEFAULTS = ("uplink", "downlink", "node_bandwidth", "node_latency", "worker_bandwidth", "worker_latency")
_DC_KEYS = ("hosts", "workers", "wan", "listen", "reachable", *_DEFAULTS)
_PAIR = re.compile(r"\s*(\S+?)\s*(<->|->)\s*(\S+?)\s*")
_ARROWS = "'a -> b' or 'a <-> b'"


@dataclass(frozen=True, slots=True)
class _Site:
    """A DC and its inner links: `node` between its hosts, `worker` between the workers of a host."""

    datacenter: Datacenter
    node: Link | None
    worker: Link | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(host.workers for host in self.datacenter.hosts)


def read_sites(fields: Mapping[str, Item], *, cluster: str, source: str) -> Topology:
    """A topology file's fields -> Topology. Raises TopologyError."""
    defaults = fields["defaults"].fields(("link", "datacenter")) if "defaults" in fields else {}
    usual = defaults["datacenter"].fields(_DEFAULTS) if "datacenter" in defaults else {}
    sites = _sites(fields["datacenters"], usual)
    datacenters = tuple(site.datacenter for site in sites)
    common = defaults["link"].fields(LINK_KEYS) if "link" in defaults else {}
    links = _LinkReader(tuple(dc.name for dc in datacenters), common).table(fields.get("links"), fields["datacenters"])
    return Topology(cluster, datacenters, links, _levels(sites, links), source=source)


def _sites(item: Item, usual: Mapping[str, Item]) -> list[_Site]:
    entries = item.entries("a mapping of DC names")
    if len(entries) > DATACENTERS_MAX:
        raise item.error(f"found {len(entries)} DCs, allowed: up to {DATACENTERS_MAX}")
    wan: dict[str, Item] = {}
    sites = []
    for key, value in entries:
        name = key.name()
        fields = {**usual, **value.fields(_DC_KEYS)}
        if "wan" in fields:
            wan[name] = fields["wan"]
        sites.append(_site(name, value, fields))
    check_wan(tuple(site.datacenter for site in sites), wan)
    if sum(site.datacenter.workers for site in sites) > WORKERS_MAX:
        raise item.error(f"more than {WORKERS_MAX} workers")
    return sites


def _site(name: str, item: Item, fields: Mapping[str, Item]) -> _Site:
    if "listen" in fields and "wan" not in fields:
        raise fields["listen"].error("'listen' needs a 'wan' address too: where peers reach this DC")
    if ("hosts" in fields) == ("workers" in fields):
        raise item.error("needs either 'workers' (all on this machine) or 'hosts', and not both")
    datacenter = Datacenter(
        name,
        _hosts(name, fields["hosts"])
        if "hosts" in fields
        else hosts_here(name, fields["workers"].whole(1, WORKERS_MAX)),
        fields["wan"].address() if "wan" in fields else None,
        fields["listen"].address() if "listen" in fields else None,
        rate(fields["uplink"]) if "uplink" in fields else None,
        rate(fields["downlink"]) if "downlink" in fields else None,
        fields["reachable"].flag() if "reachable" in fields else True,
    )
    return _Site(datacenter, _inside(fields, "node"), _inside(fields, "worker"))


def _inside(fields: Mapping[str, Item], level: str) -> Link | None:
    latency_s = time(fields[f"{level}_latency"]) if f"{level}_latency" in fields else 0.0
    bandwidth = fields.get(f"{level}_bandwidth")
    return None if bandwidth is None else Link(rate(bandwidth), latency_s)


def _hosts(dc: str, item: Item) -> tuple[Host, ...]:
    return unique_hosts(item, [_host(f"{dc}-{i}", entry) for i, entry in enumerate(item.items("a list of hosts"))])


def _host(usual_name: str, item: Item) -> Host:
    fields = item.fields(HOST_KEYS, ("workers",))
    address = fields["address"].host() if "address" in fields else None
    name = fields["name"].host() if "name" in fields else address or usual_name
    return Host(name, address, fields["workers"].whole(1, WORKERS_MAX))


class _LinkReader:
    """Turns the `links` of a file into a table; `common` are the fields of `defaults.link`."""

    def __init__(self, names: tuple[str, ...], common: Mapping[str, Item]) -> None:
        self._names = names
        self._number = {name: number for number, name in enumerate(names)}
        self._common = common
        self._links: dict[tuple[int, int], Link] = {}
        self._lines: dict[tuple[int, int], int] = {}

    def table(self, item: Item | None, datacenters: Item) -> LinkTable:
        """All links; `datacenters` is to blame where `links` leave a pair out."""
        if item is not None and item.is_list:
            for entry in item.items("a list of links"):
                self._read_from_to(entry)
        elif item is not None:
            for key, value in item.entries(f"a mapping of pairs such as {_ARROWS}, or a list"):
                self._read_arrow(key, value)
        usual = link(self._common, rate(self._common["bandwidth"]) if "bandwidth" in self._common else 0.0)
        if not {"bandwidth", "rtt"} <= self._common.keys():
            self._check_complete(item or datacenters)
        return LinkTable(len(self._names), self._links, usual)

    def _read_arrow(self, key: Item, value: Item) -> None:
        match = _PAIR.fullmatch(key.text(_ARROWS))
        if match is None:
            raise key.wrong(f"a pair of DCs such as {_ARROWS}")
        source, arrow, target = match.groups()
        both = arrow == "<->"
        pair = self._pair(key, source, target)
        fields = value.fields(LINK_KEYS)
        up, down = self._bandwidths(value, fields, both=both)
        self._add(key, pair, fields, up)
        if both:
            self._add(key, pair[::-1], fields, down)

    def _read_from_to(self, item: Item) -> None:
        fields = item.fields(("from", "to", *LINK_KEYS), ("from", "to"))
        pair = self._pair(item, fields["from"].text("a DC"), fields["to"].text("a DC"))
        up, _ = self._bandwidths(item, fields, both=False)
        self._add(item, pair, fields, up)

    def _pair(self, item: Item, *names: str) -> tuple[int, int]:
        for name in names:
            if name not in self._number:
                raise item.error(f"no DC {shown(name)}, allowed: {some(self._names)}")
        source, target = (self._number[name] for name in names)
        if source == target:
            raise item.error(f"a link needs two different DCs, found {shown(names[0])} twice")
        return source, target

    def _bandwidths(self, item: Item, fields: Mapping[str, Item], *, both: bool) -> tuple[float, float]:
        """Bytes per second there and back. An "a <-> b" link may have {up, down}: from a to b, and from b to a."""
        bandwidth = fields.get("bandwidth") or self._common.get("bandwidth")
        if bandwidth is None:
            raise item.error("the key 'bandwidth' is missing, here and in defaults.link")
        if not bandwidth.is_mapping:
            return rate(bandwidth), rate(bandwidth)
        if not both:
            raise bandwidth.wrong("one rate; {up: RATE, down: RATE} is for 'a <-> b' links")
        ways = bandwidth.fields(("up", "down"), ("up", "down"))
        return rate(ways["up"]), rate(ways["down"])

    def _add(self, item: Item, pair: tuple[int, int], fields: Mapping[str, Item], bandwidth_bytes_per_s: float) -> None:
        if pair in self._links:
            source, target = (self._names[number] for number in pair)
            raise item.error(f"the link {source} -> {target} is given twice (first in line {self._lines[pair]})")
        fields = {**self._common, **fields}
        if "rtt" not in fields:
            raise item.error("the key 'rtt' is missing, here and in defaults.link")
        self._links[pair] = link(fields, bandwidth_bytes_per_s)
        self._lines[pair] = item.line

    def _check_complete(self, item: Item) -> None:
        count = len(self._names)
        if len(self._links) == count * (count - 1):
            return
        pairs = ((s, t) for s in range(count) for t in range(count) if s != t)
        source, target = next(pair for pair in pairs if pair not in self._links)
        raise item.error(
            f"no link {self._names[source]} -> {self._names[target]}: "
            "add it to 'links', or give 'bandwidth' and 'rtt' in defaults.link"
        )


def _levels(sites: list[_Site], links: LinkTable) -> tuple[Level, ...] | None:
    """The levels of a tree whose DCs are all alike, else None. Its level-0 link is the worst of all."""
    if len({site.shape for site in sites}) > 1:
        return None
    shape = sites[0].shape
    dc = Level("dc", len(sites), _worst(links.distinct()) or ASSUMED_INSIDE)
    node, worker = _worst({site.node for site in sites}), _worst({site.worker for site in sites})
    if node and worker and len(shape) > 1 and len(set(shape)) == 1:
        return dc, Level("node", len(shape), node), Level("worker", shape[0], worker)
    if len(set(shape)) > 1:
        return None
    inside = _worst({node, worker} if len(shape) > 1 else {worker})
    return dc, Level("worker", sum(shape), inside or ASSUMED_INSIDE)


def _worst(links: set[Link | None] | set[Link]) -> Link | None:
    """The lowest bandwidth with the longest round trip; None where there is no link, or one is unknown."""
    known = [link for link in links if link is not None]
    if not known or len(known) < len(links):
        return None
    return Link(
        min(link.bandwidth_bytes_per_s for link in known),
        max(link.rtt_s for link in known),
        max(link.jitter_s for link in known),
        max(link.loss for link in known),
        min((link.queue_bytes for link in known if link.queue_bytes is not None), default=None),
    )
