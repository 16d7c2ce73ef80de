"""How much memory a plan's copies take at one worker, and others' copies of what is homed there."""

from __future__ import annotations

import torch

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.shared import SharedResidual
from hybridep_rt.codecs.sizes import HeldBytes
from hybridep_rt.moe.tables import LayerTables


def layer_memory(tables: LayerTables, parameters: int, codecs: Codecs, dtype: torch.dtype) -> dict[str, int]:
    """Bytes by what they are for, in experts of that many parameters."""
    held = HeldBytes.of(codecs, dtype)
    returning = [len(sources) for sources in tables.subscribers.values() if sources]
    published = sum(map(tables.is_published, tables.homes))
    mean = torch.float32.itemsize if codecs.weights.partition(":")[0] == SharedResidual.NAME else 0
    each = {
        "copies": (2 * dtype.itemsize + held.copy) * len(tables.copies),
        "replicas": held.replica * published + mean,
        "feedback": held.feedback * len(tables.gateway_of),
        "returns": held.returning * sum(returning) + held.own_moment * len(returning),
    }
    return {name: parameters * size for name, size in each.items()}
