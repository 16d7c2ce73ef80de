"""Who: a worker or a coordinator of one datacenter."""

from __future__ import annotations

from typing import NamedTuple

COORDINATOR = -1


class Address(NamedTuple):
    """`dc` is the index of the datacenter, `worker` the local index inside it (`COORDINATOR` for its coordinator)."""

    dc: int
    worker: int

    def describe(self, dc_names: tuple[str, ...] = ()) -> str:
        """`worker 1 of DC "b"`, with the index where the names are not known."""
        name = f'"{dc_names[self.dc]}"' if 0 <= self.dc < len(dc_names) else str(self.dc)
        return f"coordinator of DC {name}" if self.worker == COORDINATOR else f"worker {self.worker} of DC {name}"
