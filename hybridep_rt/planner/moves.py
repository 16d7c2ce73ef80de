"""Changes to a layer's subscriptions that the search tries: an expert, a pair, a whole DC's experts, or a column. Pure.

Gains are not additive: dropping one expert's tokens saves a crossing only for tokens that need nothing else from that
DC, so blocks and pairs are moves of their own. And as the slowest DC decides, some moves change all DCs at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from hybridep_rt.planner.routing import Routing
from hybridep_rt.planner.site_plan import Flags, Ints, SitePlan, Spread, site_plan

PAIRS_MOST = 48
"""Of a subscriber and a home: the pairs of experts that are most often chosen together."""

SINGLES_FEW = 24
"""Up to so many possible copies, any two of them are moved at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Subscribe to what `add` marks and give up what `drop` marks, [D,E]."""

    add: Flags
    drop: Flags


def apply(plan: SitePlan, move: Move) -> SitePlan | None:
    """The plan after the move; None where it changes nothing. Tokens of given-up copies go to the home's DC."""
    home, here = plan.spread.home, np.arange(len(plan.held))[:, None]
    new = move.add & ~plan.held
    gone = move.drop & plan.held & (home != here)
    if not (new.any() or gone.any()):
        return None
    held = (plan.held | new) & ~gone
    route = np.where(new, here, plan.route)
    served = held[route, np.arange(len(home))]
    return site_plan(plan.spread, held, np.where(served, route, home))


def moves(spread: Spread, routing: Routing) -> list[Move]:
    """All moves of a layer, in a fixed order: large ones first."""
    marks = [*_blocks(spread), *_columns(spread), *_singles(spread), *_pairs(spread, routing)]
    none = _empty(spread)
    return [Move(*both) for which in marks for both in ((which, none), (none, which))]


def double_moves(spread: Spread) -> list[Move]:
    """Any two copies added, dropped or swapped; none where there are too many."""
    singles, none = list(_singles(spread)), _empty(spread)
    if len(singles) > SINGLES_FEW:
        return []
    pairs = [a | b for a, b in combinations(singles, 2)]
    swaps = [Move(a, b) for a, b in permutations(singles, 2)]
    return [Move(*both) for pair in pairs for both in ((pair, none), (none, pair))] + swaps


def _empty(spread: Spread) -> Flags:
    return np.zeros(spread.share.shape[:2], bool)


def _blocks(spread: Spread) -> Iterator[Flags]:
    """One DC and all experts of another; all of a DC's copies; one DC's experts everywhere."""
    dcs = len(spread.stay)
    owned = spread.home == np.arange(dcs)[:, None]
    for home in range(dcs):
        which = _empty(spread)
        which[:] = owned[home]
        yield which
    for dc in range(dcs):
        which = _empty(spread)
        which[dc] = True
        yield which
        for home in range(dcs):
            if home != dc:
                which = _empty(spread)
                which[dc] = owned[home]
                yield which


def _columns(spread: Spread) -> Iterator[Flags]:
    """One expert at all DCs."""
    for expert in range(len(spread.home)):
        which = _empty(spread)
        which[:, expert] = True
        yield which


def _singles(spread: Spread) -> Iterator[Flags]:
    for dc in range(len(spread.stay)):
        for expert in np.flatnonzero(spread.home != dc):
            which = _empty(spread)
            which[dc, expert] = True
            yield which


def _pairs(spread: Spread, routing: Routing) -> Iterator[Flags]:
    """Two experts of one home, for one subscriber or for all others."""
    dcs = len(spread.stay)
    for dc in range(dcs):
        together = _together(routing.of(dc), len(spread.home))
        for home in range(dcs):
            if home == dc:
                continue
            owned = np.flatnonzero(spread.home == home).tolist()
            ordered = sorted(combinations(owned, 2), key=lambda pair: (-together[pair], pair))
            for pair in ordered[:PAIRS_MOST]:
                which = _empty(spread)
                which[dc, list(pair)] = True
                yield which


def _together(chosen: Ints, experts: int) -> Ints:
    """[E,E] how many sampled tokens choose both."""
    marked = np.zeros((len(chosen), experts), np.float32)
    np.put_along_axis(marked, chosen, 1.0, axis=1)
    return (marked.T @ marked).astype(np.int64)
