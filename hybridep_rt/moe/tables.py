"""A LayerPlan as one worker sees it: where its tokens go, what it holds, whom it feeds. Pure functions of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from hybridep_rt.planner.plan import LayerPlan, Layout
from hybridep_rt.protocol.address import Address


@dataclass(frozen=True, slots=True)
class LayerTables:
    """One worker's part in one layer. `me` is its address; E experts.

    Tokens: `route[e]` is the DC that serves this DC's tokens for e, `serve[e]` the local worker that computes what is
    here (-1: none). `outgoing`: the DCs that get tokens from here, in staged order: stage k of an uplink serves DC
    (own + k) mod D. `incoming`: those that send tokens here, stage by stage, with the workers that land on this one.

    Experts: `held` are all experts this worker computes, `homes` those it owns. `subscribers[e]`, for e homed here: the
    gateway in each other DC with holders. `gateway_of`: the foreign experts whose weights reach the DC through this
    worker. `weight_spread[i]`: experts whose weights this worker hands to local worker i; `weight_gather[i]`: those it
    gets from local worker i. Gradients go the same ways back.
    """

    me: Address
    route: tuple[int, ...]
    serve: tuple[int, ...]
    outgoing: tuple[int, ...]
    incoming: tuple[tuple[int, tuple[int, ...]], ...]
    held: tuple[int, ...]
    homes: tuple[int, ...]
    home_of: tuple[Address, ...]
    subscribers: dict[int, tuple[Address, ...]]
    gateway_of: tuple[int, ...]
    weight_spread: tuple[tuple[int, ...], ...]
    weight_gather: tuple[tuple[int, ...], ...]
    site_spreads: bool
    """Whether any weights move inside this DC, so that its workers have to meet."""

    @property
    def copies(self) -> tuple[int, ...]:
        """The experts held here whose homes are elsewhere."""
        return tuple(e for e in self.held if self.home_of[e] != self.me)

    @property
    def entering(self) -> dict[int, Address]:
        """The foreign experts whose weights reach the DC through this worker, and their homes."""
        return {expert: self.home_of[expert] for expert in self.gateway_of}

    @property
    def passing(self) -> set[int]:
        """The experts whose weights this worker encodes, decodes or hands on."""
        return {*self.held, *self.gateway_of, *chain.from_iterable(self.weight_gather)}

    def is_published(self, expert: int) -> bool:
        """Whether anybody else holds an expert that is homed here."""
        return bool(self.subscribers[expert]) or any(expert in experts for experts in self.weight_spread)


def gateway(plan: LayerPlan, layout: Layout, expert: int, dc: int) -> int | None:
    """Local index of the worker through which `expert` enters `dc`; None where nobody there holds a copy.

    It is the worker at the home's local index (mod the DC's size) if that one holds it, else the first holder.
    """
    holders = [layout.locate(worker) for worker in plan.holders[expert]]
    local = [index for place, index in holders if place == dc]
    if not local:
        return None
    landing = layout.landing(layout.locate(plan.home[expert])[1], dc)
    return landing if landing in local else local[0]


def layer_tables(plan: LayerPlan, layout: Layout, me: Address) -> LayerTables:
    """The tables of worker `me`."""
    number = layout.number(*me)
    homes_of = tuple(Address(*layout.locate(worker)) for worker in plan.home)
    stages = [(me.dc + stage) % layout.dcs for stage in range(1, layout.dcs)]
    spread = [_source_spread(plan, layout, Address(me.dc, local)) for local in range(layout.workers_per_dc[me.dc])]
    serve = tuple(-1 if server < 0 else layout.locate(server)[1] for server in plan.serve[number])
    return LayerTables(
        me=me,
        route=plan.route[me.dc],
        serve=serve,
        outgoing=tuple(dc for dc in stages if dc in plan.route[me.dc]),
        incoming=tuple(
            (dc, tuple(w for w in range(layout.workers_per_dc[dc]) if layout.landing(w, me.dc) == me.worker))
            for dc in ((me.dc - stage) % layout.dcs for stage in range(1, layout.dcs))
            if me.dc in plan.route[dc]
        ),
        held=tuple(e for e in range(plan.num_experts) if number in plan.holders[e]),
        homes=tuple(e for e in range(plan.num_experts) if plan.home[e] == number),
        home_of=homes_of,
        subscribers={
            e: tuple(Address(dc, entry) for dc in stages if (entry := gateway(plan, layout, e, dc)) is not None)
            for e in range(plan.num_experts)
            if plan.home[e] == number
        },
        gateway_of=tuple(
            e
            for e in range(plan.num_experts)
            if homes_of[e].dc != me.dc and gateway(plan, layout, e, me.dc) == me.worker
        ),
        weight_spread=spread[me.worker],
        weight_gather=tuple(spread[source][me.worker] for source in range(len(spread))),
        site_spreads=any(any(row) for row in spread),
    )


def _source_spread(plan: LayerPlan, layout: Layout, source: Address) -> tuple[tuple[int, ...], ...]:
    """For each local worker of the source's DC, the experts whose weights it gets from `source`."""
    destinations: list[list[int]] = [[] for _ in range(layout.workers_per_dc[source.dc])]
    for expert in range(plan.num_experts):
        home_dc, home_local = layout.locate(plan.home[expert])
        entry = home_local if home_dc == source.dc else gateway(plan, layout, expert, source.dc)
        if entry != source.worker:
            continue
        for dc, local in map(layout.locate, plan.holders[expert]):
            if dc == source.dc and local != source.worker:
                destinations[local].append(expert)
    return tuple(map(tuple, destinations))
