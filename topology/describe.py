"""A topology and its expert domains as plain JSON values, for programs that read instead of people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from topology.domains import Domains
from topology.model import LinkTable, Topology

WORKERS_LISTED_MAX = 1024


def describe(topology: Topology, domains: Domains) -> dict[str, Any]:
    """All of a topology in SI units, and who does AG and A2A with whom.

    `links.common` holds for every ordered pair of DCs that `links.special` doesn't name. `workers` is null in trees
    of more than WORKERS_LISTED_MAX workers, where only the numbers of pairs are given.
    """
    listed = domains.tree.workers <= WORKERS_LISTED_MAX
    return {
        "cluster": topology.cluster,
        "source": topology.source,
        "digest": topology.digest(),
        "emulate": topology.emulate,
        "insecure": topology.insecure,
        "emulate_compute_flops_per_s": topology.emulate_compute_flops_per_s,
        "datacenters": [asdict(dc) | {"workers": dc.workers} for dc in topology.datacenters],
        "levels": None if topology.levels is None else [asdict(level) for level in topology.levels],
        "links": _links(topology),
        "domains": {
            "sizes": list(domains.sizes),
            "pairs": [domains.pairs(level) for level in range(domains.tree.depth)],
            "workers": [_worker(domains, worker) for worker in range(domains.tree.workers)] if listed else None,
        },
    }


def _links(topology: Topology) -> dict[str, Any]:
    assert isinstance(topology.links, LinkTable)
    names, common = topology.dc_names, topology.links.common
    return {
        "common": None if common is None else asdict(common),
        "special": [
            {"from": names[source], "to": names[target]} | asdict(link)
            for (source, target), link in topology.links.special.items()
        ],
    }


def _worker(domains: Domains, worker: int) -> dict[str, Any]:
    return {
        "worker": worker,
        "location": list(domains.tree.locate(worker)),
        "levels": [domains.partners(worker, level) for level in range(domains.tree.depth)],
    }
