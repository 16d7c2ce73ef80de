"""The WAN as matrices: what every pair of DCs, every uplink and every downlink carries per second. Pure.

Shapes: D datacenters; `...` any number of leading axes (plans that are weighed together).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from topology.model import LinkTable, Topology

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """[source, target] rates in bytes/s and one-way delays in seconds; [D] limits of uplinks and downlinks (or inf)."""

    bandwidth: Array
    delay_s: Array
    uplink: Array
    downlink: Array

    @classmethod
    def of(cls, topology: Topology) -> Network:
        """The matrices of a topology. A DC reaches itself at once."""
        count = len(topology.datacenters)
        bandwidth, delay_s = np.full((count, count), np.inf), np.zeros((count, count))
        links = topology.links
        if isinstance(links, LinkTable) and links.common is not None:
            bandwidth[:], delay_s[:] = links.common.bandwidth_bytes_per_s, links.common.rtt_s / 2
            listed = links.special
        else:
            listed = dict(links)
        for pair, link in listed.items():
            bandwidth[pair], delay_s[pair] = link.bandwidth_bytes_per_s, link.rtt_s / 2
        np.fill_diagonal(bandwidth, np.inf)
        np.fill_diagonal(delay_s, 0.0)
        limits = [[dc.uplink_bytes_per_s, dc.downlink_bytes_per_s] for dc in topology.datacenters]
        up, down = (np.array([limit or np.inf for limit in column]) for column in zip(*limits, strict=True))
        return cls(bandwidth, delay_s, up, down)

    @property
    def dcs(self) -> int:
        """Number of datacenters."""
        return len(self.uplink)

    def scaled(self, factor: float) -> Network:
        """All rates times a factor; delays stay."""
        return replace(
            self, bandwidth=self.bandwidth * factor, uplink=self.uplink * factor, downlink=self.downlink * factor
        )

    def wire_s(self, volumes: Array) -> Array:
        """Seconds that each flow takes when all `volumes` [..., D, D] (bytes) start at once.

        Flows share an uplink or downlink in proportion to their bytes, so that those of its busiest end together: the
        soonest at which the last can end, and never later for more bandwidth anywhere.
        """
        seconds = volumes / self.bandwidth
        if np.isfinite(self.uplink).any():
            seconds = np.maximum(seconds, (volumes.sum(-1) / self.uplink)[..., :, None])
        if np.isfinite(self.downlink).any():
            seconds = np.maximum(seconds, (volumes.sum(-2) / self.downlink)[..., None, :])
        return np.where(volumes > 0, seconds, 0.0)
