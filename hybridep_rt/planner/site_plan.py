"""A layer's plan as its DCs see it, in arrays: who subscribes, where tokens go, and how a DC spreads the work.

Shapes: D datacenters, E experts, W workers of the largest DC.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridep_rt.planner.makers import block_homes
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.plan import LayerPlan, Layout

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """How each DC spreads an expert's work over its workers, wherever it holds the expert.

    `home` [E]: DC of the home. `slot` [E]: the home's local index. `share` [D,E,W]: the part of the DC's work for an
    expert that falls to each worker. `stay` [D]: the part of (token, expert) pairs that are computed where they are.
    """

    home: Ints
    slot: Ints
    share: Array
    stay: Array


@dataclass(frozen=True, slots=True, eq=False)
class SitePlan:
    """`held` [D,E]: home or copy in that DC. `route` [D,E]: which DC serves. `copies` [D,W]: copies of each worker."""

    held: Flags
    route: Ints
    copies: Array
    spread: Spread


def canonical_spread(layout: Layout, num_experts: int, homes: tuple[int, ...] | None = None) -> Spread:
    """One holder per DC, at the home's local index mod W_d: what `makers.subscribe` does inside a DC."""
    spots = [layout.locate(worker) for worker in homes or block_homes(num_experts, layout)]
    home, slot = (np.array(column) for column in zip(*spots, strict=True))
    workers = np.array(layout.workers_per_dc)
    share = np.zeros((layout.dcs, num_experts, int(workers.max())))
    at = slot[None, :] % workers[:, None]
    np.put_along_axis(share, at[:, :, None], 1.0, axis=2)
    return Spread(home, slot, share, 1.0 / workers)


def site_plan(spread: Spread, held: Flags, route: Ints) -> SitePlan:
    """A plan with one holder per DC and expert."""
    copied = held & (spread.home != np.arange(len(held))[:, None])
    return SitePlan(held, route, np.einsum("de,dew->dw", copied.astype(float), spread.share), spread)


def plain(spread: Spread) -> SitePlan:
    """No copies."""
    dcs = len(spread.stay)
    held = spread.home == np.arange(dcs)[:, None]
    return site_plan(spread, held, np.tile(spread.home, (dcs, 1)))


def domain(spread: Spread, members: Ints) -> SitePlan:
    """DCs with equal `members` [D] share all experts; tokens for others go to the DC at the sender's rank there."""
    groups = [np.flatnonzero(members == group) for group in range(int(members.max()) + 1)]
    held = members[:, None] == members[spread.home][None, :]
    route = np.empty_like(held, dtype=np.int64)
    for rank in range(max(map(len, groups))):
        servers = np.array([other[rank % len(other)] for other in groups])
        route[[group[rank] for group in groups if rank < len(group)]] = servers[members[spread.home]]
    route = np.where(held, np.arange(len(members))[:, None], route)
    return site_plan(spread, held, route)


def consecutive(dcs: int, size: int) -> Ints:
    """Members of the paper's domains: groups of `size` consecutive DCs."""
    return np.arange(dcs) // size


def from_layer(plan: LayerPlan, layout: Layout) -> SitePlan:
    """The DCs' view of any plan."""
    dc_of = np.repeat(np.arange(layout.dcs), layout.workers_per_dc)
    first = np.concatenate(([0], np.cumsum(layout.workers_per_dc)))
    width, experts = max(layout.workers_per_dc), plan.num_experts
    held = np.zeros((layout.dcs, experts), bool)
    copies = np.zeros((layout.dcs, width))
    for expert, holders in enumerate(plan.holders):
        for holder in holders:
            held[dc_of[holder], expert] = True
            if holder != plan.home[expert]:
                copies[dc_of[holder], holder - first[dc_of[holder]]] += 1
    serve = np.array(plan.serve)
    share = np.zeros((layout.dcs, experts, width))
    stay = np.zeros(layout.dcs)
    for dc, count in enumerate(layout.workers_per_dc):
        local = serve[first[dc] : first[dc + 1]] - first[dc]
        for worker in range(count):
            share[dc, :, worker] = (local == worker).sum(0) / count
        own = local == np.arange(count)[:, None]
        stay[dc] = own[:, held[dc]].mean() if held[dc].any() else 1.0
    home = np.array(plan.home)
    spread = Spread(dc_of[home], home - first[dc_of[home]], share, stay)
    return SitePlan(held, np.array(plan.route), copies, spread)


def to_layer(site: SitePlan, layout: Layout) -> LayerPlan:
    """The executor's tables of a plan with one holder per DC and expert (`canonical_spread`)."""
    first = np.concatenate(([0], np.cumsum(layout.workers_per_dc)))[:-1]
    slot = first[:, None] + site.spread.slot % np.array(layout.workers_per_dc)[:, None]
    home = first[site.spread.home] + site.spread.slot
    serve = np.where(site.held, slot, -1)
    return LayerPlan(
        home=tuple(home.tolist()),
        holders=tuple(tuple(sorted(slot[site.held[:, e], e].tolist())) for e in range(len(home))),
        route=tuple(map(tuple, site.route.tolist())),
        serve=tuple(map(tuple, np.repeat(serve, layout.workers_per_dc, axis=0).tolist())),
    )
