"""HybridEP runtime: train Mixture-of-Experts models across datacenters joined by slow links.

    runtime = hybridep_rt.init()
    model = ... hybridep_rt.MoELayer(hidden, ffn, num_experts, top_k) ...
    runtime.attach(model, optimizer)

Importing this package loads neither torch nor MPI; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridep_rt.moe.layer import MoELayer as MoELayer
    from hybridep_rt.moe.layer import aux_loss as aux_loss
    from hybridep_rt.runtime.adamw import AdamW as AdamW
    from hybridep_rt.runtime.session import Runtime as Runtime
    from hybridep_rt.runtime.start import current as current
    from hybridep_rt.runtime.start import init as init

_HOME = {
    "AdamW": "hybridep_rt.runtime.adamw",
    "MoELayer": "hybridep_rt.moe.layer",
    "Runtime": "hybridep_rt.runtime.session",
    "aux_loss": "hybridep_rt.moe.layer",
    "current": "hybridep_rt.runtime.start",
    "init": "hybridep_rt.runtime.start",
}
__all__ = ["AdamW", "MoELayer", "Runtime", "aux_loss", "current", "init"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
