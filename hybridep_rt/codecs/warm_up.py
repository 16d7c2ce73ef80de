"""The kernels are compiled when they are first called, and kept on disk after: this does it before the training."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.levels import CHUNK
from hybridep_rt.codecs.shared import SharedResidual
from hybridep_rt.codecs.update import numbers, update_and_encode, update_of


def warm_up(specs: Iterable[str]) -> None:
    """Send two small tensors through each codec. The first time on a machine takes seconds, then a fraction of one.

    Raises ConfigError for a spec that doesn't exist.
    """
    values = torch.linspace(-1, 1, CHUNK + 1)
    for spec in dict.fromkeys(specs):
        sender, receiver = make_codec(spec), make_codec(spec)
        into = torch.zeros_like(values)
        for codec in (sender, receiver):
            if isinstance(codec, SharedResidual):
                codec.set_shared(into, 0)
        for _ in range(2):
            receiver.decode(sender.encode(values), into)
            values = values * 0.5


def warm_up_adamw() -> None:
    """Make the runtime's AdamW step alone, and together with the coding of levels."""
    weights, gradient, mean, square = (torch.linspace(0.1, 1, CHUNK + 1) for _ in range(4))
    for codec in (None, make_codec("delta-1bit")):
        for step in (1, 2):
            update = update_of(weights, gradient, mean, square, None, numbers(0.01, (0.9, 0.95), 1e-8, 0.1, step))
            assert update is not None
            if codec is None:
                update.run()
            else:
                update_and_encode(codec, weights, update)
