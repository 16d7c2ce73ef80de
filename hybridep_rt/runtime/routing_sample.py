"""Which experts tokens chose lately: some of them, by layer, for the planner."""

from __future__ import annotations

import numpy as np
import torch

from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.routing import Routing
from hybridep_rt.protocol.address import Address

ROWS = 256
"""Tokens that each worker remembers of a layer."""
_PER_FORWARD = 32


class RoutingSample:
    """The last choices of one worker, evenly spaced over each forward's tokens. Later ones replace the first."""

    def __init__(self) -> None:
        self._rows: dict[int, torch.Tensor] = {}
        self._count: dict[int, int] = {}

    def observe(self, layer: int, index_TK: torch.Tensor) -> None:
        """The experts of each token of a forward pass."""
        taken = index_TK[:: max(1, len(index_TK) // _PER_FORWARD)][:_PER_FORWARD].cpu()
        kept = self._rows.setdefault(layer, torch.zeros(ROWS, index_TK.shape[1], dtype=torch.int64))
        count = self._count.get(layer, 0)
        kept[(count + torch.arange(len(taken))) % ROWS] = taken + 1
        self._count[layer] = count + len(taken)

    def take(self, layer: int, top_k: int, me: Address, layout: Layout) -> torch.Tensor:
        """[workers, ROWS, K]: this worker's rows in its place, as expert + 1, 0 elsewhere; then begin anew."""
        found = torch.zeros(layout.workers, ROWS, top_k, dtype=torch.float64)
        self._count.pop(layer, None)
        if layer in self._rows:
            found[layout.number(*me)] = self._rows.pop(layer).to(torch.float64)
        return found


def routing_of(found: torch.Tensor, layout: Layout) -> Routing | None:
    """From the sum of what all workers took: as many tokens of each DC. None where no token was seen.

    A DC that had no tokens is given everybody's.
    """
    chosen = found.to(torch.int64).numpy() - 1
    by_dc = [chosen[layout.first(dc) : layout.first(dc) + count] for dc, count in enumerate(layout.workers_per_dc)]
    seen = [rows[(rows >= 0).all(-1)] for rows in by_dc]
    everybody = np.concatenate(seen)
    if not len(everybody):
        return None
    most = max(map(len, seen))
    return Routing(np.stack([np.resize(rows if len(rows) else everybody, (most, chosen.shape[-1])) for rows in seen]))
