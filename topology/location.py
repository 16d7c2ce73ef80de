"""Locations f(m): where a global worker sits, level by level. Global worker numbers count DC by DC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from topology.errors import TopologyError
from topology.model import Topology

Location = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a topology: workers of each DC, and SF per level (`scaling`), which is None where it is uneven.

    A location is (x_0, .., x_{L-1}), mixed radix over SF, in a symmetric tree, and (dc, local index) in an uneven one.
    """

    workers_per_dc: tuple[int, ...]
    scaling: tuple[int, ...] | None

    @classmethod
    def of(cls, topology: Topology) -> Tree:
        """The shape of that topology."""
        return cls(topology.workers_per_dc, topology.scaling)

    @classmethod
    def symmetric(cls, scaling: tuple[int, ...]) -> Tree:
        """The tree with SF_l = scaling[l]."""
        return cls((prod(scaling[1:]),) * scaling[0], scaling)

    @property
    def depth(self) -> int:
        """Number of levels L: the length of a location."""
        return 2 if self.scaling is None else len(self.scaling)

    @property
    def workers(self) -> int:
        """Number of workers of all DCs."""
        return sum(self.workers_per_dc)

    def locate(self, worker: int) -> Location:
        """f(m): global worker -> location. Raises TopologyError where there is no such worker."""
        if not 0 <= worker < self.workers:
            raise TopologyError(f"no worker {worker}: there are {self.workers}, counted from 0")
        if self.scaling is None:
            return self._locate_uneven(worker)
        digits = []
        for size in reversed(self.scaling):
            worker, digit = divmod(worker, size)
            digits.append(digit)
        return tuple(reversed(digits))

    def number(self, location: Location) -> int:
        """The inverse of `locate`. Raises TopologyError where no worker is at that location."""
        sizes = self._sizes(location)
        if len(location) != len(sizes) or not all(0 <= x < size for x, size in zip(location, sizes, strict=True)):
            raise TopologyError(f"no worker at location {location}: the sizes of the levels are {sizes}")
        if self.scaling is None:
            return sum(self.workers_per_dc[: location[0]]) + location[1]
        worker = 0
        for digit, size in zip(location, sizes, strict=True):
            worker = worker * size + digit
        return worker

    def locations(self) -> Iterator[Location]:
        """The locations of all workers, in global order."""
        return (self.locate(worker) for worker in range(self.workers))

    def _locate_uneven(self, worker: int) -> Location:
        ends = accumulate(self.workers_per_dc)
        dc = next(dc for dc, end in enumerate(ends) if worker < end)
        return dc, worker - sum(self.workers_per_dc[:dc])

    def _sizes(self, location: Location) -> tuple[int, ...]:
        if self.scaling is not None:
            return self.scaling
        dcs = len(self.workers_per_dc)
        known = bool(location) and 0 <= location[0] < dcs
        return dcs, self.workers_per_dc[location[0]] if known else max(self.workers_per_dc)
