"""Locations f(m): where a global worker sits, level by level. Global worker numbers count DC by DC."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
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
    first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Global number of each DC's worker 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", tuple(accumulate(self.workers_per_dc[:-1], initial=0)))

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
        return self.first[-1] + self.workers_per_dc[-1]

    def locate(self, worker: int) -> Location:
        """f(m): global worker -> location. Raises TopologyError where there is no such worker."""
        if not 0 <= worker < self.workers:
            raise TopologyError(f"no worker {worker}: there are {self.workers}, counted from 0")
        if self.scaling is None:
            dc = bisect_right(self.first, worker) - 1
            return dc, worker - self.first[dc]
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
            return self.first[location[0]] + location[1]
        worker = 0
        for digit, size in zip(location, sizes, strict=True):
            worker = worker * size + digit
        return worker

    def _sizes(self, location: Location) -> tuple[int, ...]:
        if self.scaling is not None:
            return self.scaling
        dcs = len(self.workers_per_dc)
        known = bool(location) and 0 <= location[0] < dcs
        return dcs, self.workers_per_dc[location[0]] if known else max(self.workers_per_dc)
