"""The short, symmetric form of a topology file: levels, outermost first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice, product
from math import prod
from string import ascii_lowercase

from topology.document import Item
from topology.model import Datacenter, Host, Level, Link, LinkTable, Topology, some
from topology.read_fields import (
    COMMON_KEYS,
    DATACENTERS_MAX,
    WORKERS_MAX,
    check_wan,
    hosts_here,
    link,
    rate,
    time,
    unique_hosts,
)

KEYS = ("cluster", "levels", "hosts", "wan", "listen", *COMMON_KEYS)
LEVELS_MAX = 8
_LEVEL_KEYS = ("name", "count", "bandwidth", "latency")
_WAN_KEYS = (*_LEVEL_KEYS, "jitter", "loss", "queue")


def read_levels(fields: Mapping[str, Item], *, cluster: str, source: str) -> Topology:
    """A topology file's fields -> Topology. Raises TopologyError."""
    levels = _levels(fields["levels"])
    names = dc_names(levels[0].count)
    workers = prod(level.count for level in levels[1:])
    wan = _per_dc(fields.get("wan"), names)
    listen = _per_dc(fields.get("listen"), names)
    for name, item in listen.items():
        if name not in wan:
            raise item.error(f"'listen' needs a 'wan' address of DC {name!r} too")
    hosts = {name: _hosts(item, workers) for name, item in _per_dc(fields.get("hosts"), names).items()}
    # Of two DCs the link is the uplink; of more, each DC's links share it.
    shared = (levels[0].link.bandwidth_bytes_per_s,) * 2 if len(names) > 2 else ()
    datacenters = tuple(
        Datacenter(
            name,
            hosts.get(name) or hosts_here(name, workers),
            wan[name].address() if name in wan else None,
            listen[name].address() if name in listen else None,
            *shared,
        )
        for name in names
    )
    check_wan(datacenters, wan)
    links = LinkTable(len(names), {}, levels[0].link)
    return Topology(cluster, datacenters, links, levels, source=source)


def dc_names(number: int) -> tuple[str, ...]:
    """Names of unnamed DCs: a, b, ..., z, aa, ab, ..."""
    words = ("".join(letters) for length in count(1) for letters in product(ascii_lowercase, repeat=length))
    return tuple(islice(words, number))


def _levels(item: Item) -> tuple[Level, ...]:
    items = item.items("a list of levels, outermost first")
    if len(items) > LEVELS_MAX:
        raise item.error(f"found {len(items)} levels, allowed: 1 to {LEVELS_MAX}, the first of them the DCs")
    levels = [_level(entry, outermost=index == 0) for index, entry in enumerate(items)]
    names = [level.name for level in levels]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise items[index].error(f"two levels are named {name!r}")
    if prod(level.count for level in levels) > WORKERS_MAX:
        raise item.error(f"more than {WORKERS_MAX} workers")
    return tuple(levels)


def _level(item: Item, *, outermost: bool) -> Level:
    fields = item.fields(_WAN_KEYS if outermost else _LEVEL_KEYS, ("name", "count", "bandwidth"))
    if outermost and "latency" not in fields:
        raise item.error("the key 'latency' is missing: the round-trip time between DCs")
    base = Link(0.0, time(fields["latency"]) if "latency" in fields else 0.0)
    most = DATACENTERS_MAX if outermost else WORKERS_MAX
    bandwidth_bytes_per_s = rate(fields["bandwidth"])
    return Level(fields["name"].name(), fields["count"].whole(1, most), link(fields, bandwidth_bytes_per_s, base))


def _per_dc(item: Item | None, names: tuple[str, ...]) -> dict[str, Item]:
    """The values of a mapping whose keys are DC names."""
    if item is None:
        return {}
    values = {}
    for key, value in item.entries("a mapping with DC names as keys"):
        name = key.name()
        if name not in names:
            raise key.error(f"no DC {name!r}, allowed: {some(names)}")
        values[name] = value
    return values


def _hosts(item: Item, workers: int) -> tuple[Host, ...]:
    """One address, or a list of addresses over which the DC's workers are spread evenly."""
    items = item.items("an address or a list of addresses") if item.is_list else [item]
    share, rest = divmod(workers, len(items))
    if rest:
        raise item.error(f"{workers} workers can't be spread evenly over {len(items)} hosts")
    addresses = [entry.host() for entry in items]
    return unique_hosts(item, [Host(address, address, share) for address in addresses])
