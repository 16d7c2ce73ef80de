"""The data model: datacenters, their hosts, and the directed links between them. SI units throughout."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

from topology.errors import TopologyError

TCP_SHARE = 1448 / 1500
"""Of the bytes of a link, those that TCP carries: a link's rate counts whole packets, of 1500 bytes each."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a path. `rtt_s` is the round trip; `queue_bytes` None: the bottleneck's queue is unbounded."""

    bandwidth_bytes_per_s: float
    rtt_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of a DC. `address` None means this machine."""

    name: str
    address: str | None
    workers: int


@dataclass(frozen=True, slots=True)
class Datacenter:
    """One site. `wan` is where peers reach its coordinator, `listen` where the coordinator binds if that differs.

    `reachable`: may peers open connections to it? If not, it dials them.
    `uplink_bytes_per_s` and `downlink_bytes_per_s` bound the sum over all peers; None where only the links bound it.
    """

    name: str
    hosts: tuple[Host, ...]
    wan: tuple[str, int] | None = None
    listen: tuple[str, int] | None = None
    uplink_bytes_per_s: float | None = None
    downlink_bytes_per_s: float | None = None
    reachable: bool = True

    @property
    def workers(self) -> int:
        """Number of workers of all its hosts."""
        return sum(host.workers for host in self.hosts)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a symmetric tree: `count` sub-workers, joined by `link`, in each worker of the level above."""

    name: str
    count: int
    link: Link


class LinkTable(Mapping[tuple[int, int], Link]):
    """A link for every ordered pair of `count` DCs. Stores one common link and the pairs that differ from it.

    A thousand DCs have a million pairs, nearly all alike. Two tables are equal if every pair's link is.
    """

    __slots__ = ("common", "count", "special")

    def __init__(self, count: int, links: Mapping[tuple[int, int], Link], common: Link | None = None) -> None:
        """All pairs that `links` lacks get `common`. Raises TopologyError for a pair without link or out of range."""
        for pair in links:
            if not _is_pair(pair, count):
                raise TopologyError(f"no link can join DCs {pair}: there are {count} DCs")
        missing = count * (count - 1) - len(links)
        if missing and common is None:
            pair = next(pair for pair in _pairs(count) if pair not in links)
            raise TopologyError(f"no link from DC {pair[0]} to DC {pair[1]}")
        tally = Counter(links.values())
        if common is not None and missing:
            tally[common] += missing
        self.count = count
        # The most frequent link is the common one however the table was written: equal tables have one form.
        self.common = min(tally, key=lambda link: (-tally[link], _sortable(link))) if tally else None
        self.special = {pair: link for pair, link in sorted(links.items()) if link != self.common}
        if common is not None and common != self.common:
            self.special |= {pair: common for pair in _pairs(count) if pair not in links}
            self.special = dict(sorted(self.special.items()))

    def __getitem__(self, pair: tuple[int, int]) -> Link:
        if self.common is None or not _is_pair(pair, self.count):
            raise KeyError(pair)
        return self.special.get(pair, self.common)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return _pairs(self.count)

    def __len__(self) -> int:
        return self.count * (self.count - 1)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LinkTable):
            return (self.count, self.common, self.special) == (other.count, other.common, other.special)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LinkTable(count={self.count}, links={self.special}, common={self.common})"

    def distinct(self) -> set[Link]:
        """The different links that occur."""
        return {*self.special.values(), *([] if self.common is None else [self.common])}


@dataclass(frozen=True, slots=True)
class Topology:
    """Where everything is. `links` holds every ordered pair of DC numbers; `levels` is None where the tree is uneven.

    `emulate`: coordinators emulate each link's rate and delay. `insecure`: no TLS between coordinators.
    `tls_folder`: where certificates and keys are. `congestion`: TCP congestion control between DCs, "" for the default.
    `codec`: how compressed things cross the WAN, in the runtime's words, "" for the default. `staleness`: how many
    optimizer steps copies of experts are behind, None where the file doesn't say; `replan` likewise: after how many
    steps a better plan is looked for, 0: never.
    `emulate_compute_flops_per_s`: kernels are replaced by waits, at this rate. `source`: the file it came from.
    Raises TopologyError when the parts contradict each other.
    """

    cluster: str
    datacenters: tuple[Datacenter, ...]
    links: Mapping[tuple[int, int], Link]
    levels: tuple[Level, ...] | None
    emulate: bool = False
    insecure: bool = False
    emulate_compute_flops_per_s: float | None = None
    tls_folder: str | None = None
    congestion: str = ""
    codec: str = ""
    staleness: int | None = None
    replan: int | None = None
    source: str = "<memory>"

    def __post_init__(self) -> None:
        names = Counter(self.dc_names)
        if not names:
            raise TopologyError(f"{self.source}: there must be at least one DC")
        twice = [name for name, times in names.items() if times > 1]
        if twice:
            raise TopologyError(f"{self.source}: two DCs are named {twice[0]!r}")
        for dc in self.datacenters:
            if not dc.hosts or min(host.workers for host in dc.hosts) < 1:
                raise TopologyError(f"{self.source}: DC {dc.name!r}: every host needs at least one worker")
        hidden = [dc.name for dc in self.datacenters if not dc.reachable]
        if len(hidden) > 1:
            raise TopologyError(f"{self.source}: neither {hidden[0]!r} nor {hidden[1]!r} is reachable by the other")
        if not isinstance(self.links, LinkTable):
            object.__setattr__(self, "links", LinkTable(len(self.datacenters), self.links))
        if self.scaling is not None:
            self._check_levels(self.scaling)

    def _check_levels(self, scaling: tuple[int, ...]) -> None:
        shape = (len(self.datacenters), *self.workers_per_dc)
        if shape != (scaling[0], *[prod(scaling[1:])] * scaling[0]):
            raise TopologyError(f"{self.source}: levels {scaling} don't fit DCs with {self.workers_per_dc} workers")

    @property
    def dc_names(self) -> tuple[str, ...]:
        """Names of the DCs by number."""
        return tuple(dc.name for dc in self.datacenters)

    @property
    def workers_per_dc(self) -> tuple[int, ...]:
        """Number of workers of each DC."""
        return tuple(dc.workers for dc in self.datacenters)

    @property
    def scaling(self) -> tuple[int, ...] | None:
        """SF_l: sub-workers per worker of the level above; None where the tree is uneven."""
        return None if self.levels is None else tuple(level.count for level in self.levels)

    def dc_index(self, name: str) -> int:
        """Number of the DC of that name. Raises TopologyError, which lists the names."""
        for index, dc in enumerate(self.datacenters):
            if dc.name == name:
                return index
        raise TopologyError(f"{self.source}: no DC {name!r}, there are: {some(self.dc_names)}")

    def digest(self) -> str:
        """SHA-256 (hex) of what all sites must agree on.

        Left out, because a site may rightly see them differently: the file's path, addresses, and how a DC's workers
        are spread over hosts.
        """
        text = json.dumps(self._agreed(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _agreed(self) -> dict[str, Any]:
        assert isinstance(self.links, LinkTable)
        common = self.links.common
        hidden = [dc.name for dc in self.datacenters if not dc.reachable]
        return ({"unreachable": hidden} if hidden else {}) | {
            "cluster": self.cluster,
            "datacenters": [
                [dc.name, dc.workers, dc.uplink_bytes_per_s, dc.downlink_bytes_per_s] for dc in self.datacenters
            ],
            "common": None if common is None else astuple(common),
            "special": [[*pair, *astuple(link)] for pair, link in self.links.special.items()],
            "levels": None if self.levels is None else [astuple(level) for level in self.levels],
            "emulate": self.emulate,
            "insecure": self.insecure,
            "emulate_compute_flops_per_s": self.emulate_compute_flops_per_s,
        }


def some(names: tuple[str, ...], most: int = 8) -> str:
    """A list of names for one line: the first `most`, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _is_pair(pair: object, count: int) -> bool:
    match pair:
        case (int(source), int(target)):
            return source != target and 0 <= source < count and 0 <= target < count
    return False


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((source, target) for source in range(count) for target in range(count) if source != target)


def _sortable(link: Link) -> tuple[float, ...]:
    queue = -1 if link.queue_bytes is None else link.queue_bytes
    return (link.bandwidth_bytes_per_s, link.rtt_s, link.jitter_s, link.loss, queue)
