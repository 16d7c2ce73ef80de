"""What it takes for one layer to go from one plan to another. Pure functions of the two plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridep_rt.moe.tables import gateway
from hybridep_rt.planner.makers import subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout
from hybridep_rt.protocol.address import Address


@dataclass(frozen=True, slots=True)
class Move:
    """An expert whose home changes."""

    expert: int
    source: Address
    to: Address


@dataclass(frozen=True, slots=True)
class LayerChange:
    """`moves`: experts that change homes. `joining`: a plan whose holders are the homes and the new copies only.

    `ended`: (expert, gateway) whose stream of gradients ends, with the expert's home from now on. A copy goes on where
    a worker has one under both plans, a stream of gradients where the same worker sends it; all others begin anew.
    """

    moves: tuple[Move, ...]
    joining: LayerPlan
    ended: tuple[Move, ...]


def layer_change(old: LayerPlan, new: LayerPlan, layout: Layout) -> LayerChange:
    """From `old` to `new`, which have the same experts."""
    address = [Address(*layout.locate(worker)) for worker in range(layout.workers)]
    joining = []
    for expert, holders in enumerate(new.holders):
        copies = {holder for holder in old.holders[expert] if holder != old.home[expert]}
        home = new.home[expert]
        joining.append([holder for holder in holders if holder == home or holder not in copies])
    moves = tuple(
        Move(expert, address[source], address[to])
        for expert, (source, to) in enumerate(zip(old.home, new.home, strict=True))
        if source != to
    )
    staying = set(_returns(new, layout))
    ended = tuple(
        Move(expert, sender, address[new.home[expert]])
        for expert, sender in _returns(old, layout)
        if (expert, sender) not in staying
    )
    return LayerChange(moves, subscribe(layout, new.home, joining), ended)


def full_change(plan: LayerPlan, layout: Layout) -> LayerChange:
    """Every copy begins anew, and nothing else changes."""
    return LayerChange((), subscribe(layout, plan.home, plan.holders), ())


def _returns(plan: LayerPlan, layout: Layout) -> Iterator[tuple[int, Address]]:
    """The streams of gradients to other DCs' homes: an expert and who sends them."""
    for expert, home in enumerate(plan.home):
        for dc in range(layout.dcs):
            entry = gateway(plan, layout, expert, dc)
            if entry is not None and dc != layout.locate(home)[0]:
                yield expert, Address(dc, entry)
