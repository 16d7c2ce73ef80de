"""Expert domains and Algorithm 1 of arXiv 2510.19470: who shares experts by All-Gather, who exchanges tokens.

S_l consecutive workers of level l form an expert domain. Within one, experts travel (AG); between domains, tokens
do (A2A). With all S_l = 1 this is plain expert parallelism; with S_l = SF_l at every level no token leaves its worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from topology.errors import TopologyError
from topology.location import Location, Tree

Role = Literal["AG", "A2A"]


class Hop(NamedTuple):
    """One leg of a token's way: `source` and `target` are global workers that meet at `level`."""

    level: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Domains:
    """Domain sizes S_l (`sizes`) over a tree. Sizes left out at the end are 1.

    In an uneven tree only S_0 is free. What a worker has for another DC concerns, there, the worker of its own local
    index mod W_d ("landing"): so sits a copy (by its home's index), so lands a token (by its sender's).
    Raises TopologyError for a size that doesn't divide SF_l.
    """

    tree: Tree
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        depth = self.tree.depth
        if not 1 <= len(self.sizes) <= depth:
            raise TopologyError(f"found {len(self.sizes)} domain sizes, allowed: 1 to {depth}, one for each level")
        for level, size in enumerate(self.sizes):
            allowed = allowed_sizes(self.tree, level)
            if size not in allowed:
                why = " (the tree is uneven: only level 0 has domains)" if level and self.tree.scaling is None else ""
                text = ", ".join(map(str, allowed))
                raise TopologyError(f"domain size {size} is not possible at level {level}, allowed: {text}{why}")
        object.__setattr__(self, "sizes", self.sizes + (1,) * (depth - len(self.sizes)))

    def role(self, worker: int, other: int, level: int) -> Role | None:
        """Algorithm 1: what two workers do at that level.

        They meet at level l only if their locations differ there and at no other level. Then: same domain, different
        offset -> AG; different domain, same offset -> A2A. Else None.
        """
        if not 0 <= level < self.tree.depth:
            raise TopologyError(f"no level {level}: there are {self.tree.depth}, counted from 0")
        here, there = self.tree.locate(worker), self.tree.locate(other)
        if not self._meet(here, there, level):
            return None
        size = self.sizes[level]
        if here[level] // size == there[level] // size:
            return "AG"
        return "A2A" if here[level] % size == there[level] % size else None

    def holds(self, worker: int, home: int) -> bool:
        """The holder rule: t holds the experts of `home` iff floor(t_l/S_l) == floor(home_l/S_l) at every level l."""
        at, home_at = self.tree.locate(worker), self.tree.locate(home)
        if self.tree.scaling is None:
            return at[0] // self.sizes[0] == home_at[0] // self.sizes[0] and at == self._land(home_at, at[0])
        return all(x // size == y // size for x, y, size in zip(at, home_at, self.sizes, strict=True))

    def holders(self, home: int) -> tuple[int, ...]:
        """All workers that hold the experts of `home`, itself included, in order."""
        return tuple(sorted(map(self.tree.number, self._held_at(self.tree.locate(home)))))

    def route(self, worker: int, home: int) -> int:
        """The route rule: m's token for experts of `home` goes to t with t_l = floor(home_l/S_l)*S_l + m_l mod S_l."""
        hops = self.hops(worker, home)
        return hops[-1].target if hops else worker

    def hops(self, worker: int, home: int) -> tuple[Hop, ...]:
        """The way of a token from `worker` to the holder that serves it: at most one hop per level, level 0 first."""
        at, home_at = self.tree.locate(worker), self.tree.locate(home)
        hops = []
        for level in range(self.tree.depth):
            to = self._step(at, home_at, level)
            if to != at:
                hops.append(Hop(level, self.tree.number(at), self.tree.number(to)))
            at = to
        return tuple(hops)

    def partners(self, worker: int, level: int) -> dict[Role, tuple[int, ...]]:
        """The workers with which `worker` does AG and A2A at that level, in order."""
        near = [self.tree.number(at) for at in self._neighbours(self.tree.locate(worker), level)]
        roles = {other: self.role(worker, other, level) for other in sorted(near)}
        kinds: tuple[Role, Role] = ("AG", "A2A")
        return {kind: tuple(other for other, role in roles.items() if role == kind) for kind in kinds}

    def pairs(self, level: int) -> dict[Role, int]:
        """How many pairs of workers do AG and A2A at that level."""
        size, workers = self.sizes[level], self.tree.workers_per_dc
        if self.tree.scaling is not None:
            domains = self.tree.scaling[level] // size
            return {"AG": self.tree.workers * (size - 1) // 2, "A2A": self.tree.workers * (domains - 1) // 2}
        if level == 1:
            return {"AG": 0, "A2A": sum(count * (count - 1) // 2 for count in workers)}
        return {
            "AG": sum(_landing_pairs(workers[first : first + size]) for first in range(0, len(workers), size)),
            "A2A": sum(_landing_pairs(workers[offset::size]) for offset in range(size)),
        }

    def _meet(self, here: Location, there: Location, level: int) -> bool:
        if self.tree.scaling is None and level == 0:
            return here[0] != there[0] and (there == self._land(here, there[0]) or here == self._land(there, here[0]))
        return [x != y for x, y in zip(here, there, strict=True)] == [i == level for i in range(self.tree.depth)]

    def _land(self, location: Location, dc: int) -> Location:
        """Where a copy or token from that location sits in a DC; in its own, that is the location itself."""
        return dc, location[1] % self.tree.workers_per_dc[dc]

    def _step(self, at: Location, home: Location, level: int) -> Location:
        """Where a token at `at` goes at that level."""
        size = self.sizes[level]
        digit = home[level] // size * size + at[level] % size
        if self.tree.scaling is None:
            if level == 0:
                return at if digit == at[0] else self._land(at, digit)
            return self._land(home, at[0])
        return (*at[:level], digit, *at[level + 1 :])

    def _held_at(self, home: Location) -> set[Location]:
        ranges = [range(x // size * size, x // size * size + size) for x, size in zip(home, self.sizes, strict=True)]
        if self.tree.scaling is None:
            return {self._land(home, dc) for dc in ranges[0]}
        return set(product(*ranges))

    def _neighbours(self, at: Location, level: int) -> set[Location]:
        """Locations that may meet `at` at that level."""
        if self.tree.scaling is not None:
            return {(*at[:level], digit, *at[level + 1 :]) for digit in range(self.tree.scaling[level])} - {at}
        dcs = range(len(self.tree.workers_per_dc))
        near: set[Location] = {(at[0], local) for local in range(self.tree.workers_per_dc[at[0]])}
        if level == 0:
            near = {there for dc in dcs for there in self._matches(at, dc)}
        return near - {at}

    def _matches(self, at: Location, dc: int) -> set[Location]:
        """Locations of a DC where `at` lands, or that land at `at`."""
        workers = self.tree.workers_per_dc
        return {self._land(at, dc), *((dc, local) for local in range(at[1], workers[dc], workers[at[0]]))}


def allowed_sizes(tree: Tree, level: int) -> tuple[int, ...]:
    """The domain sizes possible at that level: the divisors of SF_l; inside the DCs of an uneven tree only 1."""
    if tree.scaling is None and level > 0:
        return (1,)
    count = len(tree.workers_per_dc) if tree.scaling is None else tree.scaling[level]
    return tuple(size for size in range(1, count + 1) if count % size == 0)


def _landing_pairs(workers: tuple[int, ...]) -> int:
    """Pairs of workers that meet across DCs of these sizes: as many for two DCs as the larger has workers."""
    return sum(smaller * count for smaller, count in enumerate(sorted(workers)))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Text such as "2,1" -> domain sizes, outermost level first. Raises TopologyError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 9 for word in words):
        raise TopologyError(f"domain sizes: found {text!r}, allowed: whole numbers with commas between, as in '2,1'")
    return tuple(int(word) for word in words)
