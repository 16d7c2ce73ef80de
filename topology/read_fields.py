"""The parts both forms of a topology file share: links, rates and hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from topology.document import Item
from topology.model import Datacenter, Host, Link
from topology.units import FLOPS, RATE, SHARE, SIZE, TIME

DATACENTERS_MAX = 4096
WORKERS_MAX = 1 << 20
COMMON_KEYS = ("emulate", "emulate_compute", "insecure", "tls", "congestion", "codec", "staleness", "replan")
CODEC_MAX = 200
REPLAN_MAX = 10**9
_CODEC = re.compile(r"[A-Za-z0-9_.:=,-]+")
LINK_KEYS = ("bandwidth", "rtt", "jitter", "loss", "queue")
HOST_KEYS = ("name", "address", "workers")


def rate(item: Item) -> float:
    """A rate in bytes per second."""
    return item.quantity(RATE, 1.0, 1e15)


def flops(item: Item) -> float:
    """A rate of arithmetic in floating-point operations per second."""
    return item.quantity(FLOPS, 1e6, 1e18)


def codec(item: Item) -> str:
    """What crosses the WAN in which form, kept as text: the runtime knows its words."""
    allowed = f"up to {CODEC_MAX} letters, digits and any of _.:=,- as in 'default' or 'default,gradients=2bit'"
    text = item.text(allowed)
    if len(text) > CODEC_MAX or not _CODEC.fullmatch(text):
        raise item.wrong(allowed)
    return text


def time(item: Item) -> float:
    """A time in seconds, up to a minute."""
    return item.quantity(TIME, 0.0, 60.0)


def link(fields: Mapping[str, Item], bandwidth_bytes_per_s: float, base: Link | None = None) -> Link:
    """A Link of that bandwidth; what `fields` doesn't say comes from `base`, or is 0."""
    base = base or Link(0.0, 0.0)
    return Link(
        bandwidth_bytes_per_s,
        time(fields["rtt"]) if "rtt" in fields else base.rtt_s,
        time(fields["jitter"]) if "jitter" in fields else base.jitter_s,
        fields["loss"].quantity(SHARE, 0.0, 0.99) if "loss" in fields else base.loss,
        int(fields["queue"].quantity(SIZE, 1.0, 1e15)) if "queue" in fields else base.queue_bytes,
    )


def hosts_here(dc: str, workers: int) -> tuple[Host, ...]:
    """One host, this machine, with all the DC's workers."""
    return (Host(f"{dc}-0", None, workers),)


def unique_hosts(item: Item, hosts: list[Host]) -> tuple[Host, ...]:
    """The hosts of one DC, checked: no name twice, not too many workers."""
    names = [host.name for host in hosts]
    twice = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise item.error(f"two hosts are named {twice[0]!r}")
    if sum(host.workers for host in hosts) > WORKERS_MAX:
        raise item.error(f"more than {WORKERS_MAX} workers in one DC")
    return tuple(hosts)


def check_wan(datacenters: tuple[Datacenter, ...], items: Mapping[str, Item]) -> None:
    """Raise TopologyError where two DCs are reached at one address; `items` are the nodes to blame, by DC name."""
    owner: dict[tuple[str, int], str] = {}
    for dc in datacenters:
        if dc.wan is None:
            continue
        if dc.wan in owner:
            raise items[dc.name].error(f"DC {owner[dc.wan]!r} has this WAN address too, each DC needs its own")
        owner[dc.wan] = dc.name
