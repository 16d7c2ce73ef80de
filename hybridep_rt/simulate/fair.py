"""Max-min fair sharing of links, uplinks and downlinks, on DC x DC matrices. Pure.

All flows of an exchange start at once and share what they meet equally, as TCP flows do on average; when one ends the
others speed up. `FairNetwork` gives the schedule these times instead of `Network`'s, where flows of a shared uplink
end together; the last flow of an uplink ends at the same time under both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridep_rt.planner.network import Array, Network

FLUID_DCS_MOST = 24
"""Up to so many DCs flows are followed until each ends; beyond, each uplink and downlink is shared by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class FairNetwork(Network):
    """A network whose flows share max-min fairly."""

    def wire_s(self, volumes: Array) -> Array:
        """Seconds until each flow of [..., D, D] bytes ends when all start at once."""
        each = fluid_s if self.dcs <= FLUID_DCS_MOST else queued_s
        flat = volumes.reshape(-1, self.dcs, self.dcs)
        return np.stack([each(self, matrix) for matrix in flat]).reshape(volumes.shape)


def max_min_rates(network: Network, active: NDArray[np.bool_]) -> Array:
    """[D,D] bytes/s of the active flows by progressive filling: no rate can grow but at the cost of a smaller one."""
    rates = np.zeros(active.shape)
    open_flows = active.copy()
    up, down = network.uplink.copy(), network.downlink.copy()
    while open_flows.any():
        shares_up, shares_down = (limit / np.maximum(open_flows.sum(axis), 1) for limit, axis in ((up, 1), (down, 0)))
        limits = np.minimum(network.bandwidth, np.minimum(shares_up[:, None], shares_down[None, :]))
        level = limits[open_flows].min()
        full = open_flows & (limits <= level * (1 + 1e-12))
        rates[full] = level
        open_flows &= ~full
        if np.isinf(level):
            break
        up, down = (np.maximum(0.0, left - level * full.sum(axis)) for left, axis in ((up, 1), (down, 0)))
    return rates


def fluid_s(network: Network, volumes: Array) -> Array:
    """[D,D] seconds until each flow ends: rates are shared anew whenever one does."""
    left, done, now = volumes.astype(float), np.zeros_like(volumes, float), 0.0
    active = left > 0
    while active.any():
        rates = max_min_rates(network, active)
        needed = np.where(active, left / np.maximum(rates, 1e-300), np.inf)
        step = needed.min()
        now += step
        ended = active & (needed <= step * (1 + 1e-12))
        done[ended] = now
        left = np.where(active, left - rates * step if np.isfinite(step * rates[active]).all() else 0.0, 0.0)
        active &= ~ended
    return done


def queued_s(network: Network, volumes: Array) -> Array:
    """As `fluid_s` where each flow meets one bottleneck: on a limit shared by flows v_j, flow i ends when each has
    sent min(v_i, v_j)."""
    seconds = np.maximum(volumes / network.bandwidth, _shared(volumes) / network.uplink[:, None])
    seconds = np.maximum(seconds, _shared(volumes.T).T / network.downlink[None, :])
    return np.where(volumes > 0, seconds, 0.0)


def _shared(volumes: Array) -> Array:
    """Per row: sum over j of min(v_i, v_j)."""
    order = np.argsort(volumes, axis=1)
    ordered = np.take_along_axis(volumes, order, axis=1)
    larger = np.arange(volumes.shape[1])[::-1]
    ends = ordered.cumsum(axis=1) + ordered * larger
    shared = np.empty_like(ends)
    np.put_along_axis(shared, order, ends, axis=1)
    return shared
