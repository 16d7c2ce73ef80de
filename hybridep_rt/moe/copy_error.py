"""How far copies are from the weights that they stand for, as their home can tell."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.codecs.delta import Delta
from hybridep_rt.codecs.dense import Exact


def copy_error(streams: Iterable[tuple[Codec, torch.Tensor]]) -> float:
    """||weights - copies|| / ||weights|| over all tensors, each with the codec that it was last sent in.

    Delta codecs are asked for the copy they keep; the others remember nothing, so that coding once more shows it.
    """
    error = norm = 0.0
    for codec, weights in ((codec, weights.detach()) for codec, weights in streams):
        size = float(torch.linalg.vector_norm(weights))
        error, norm = math.hypot(error, _part(codec, weights) * size), math.hypot(norm, size)
    return error / norm if norm else 0.0


def _part(codec: Codec, weights: torch.Tensor) -> float:
    if isinstance(codec, Exact):
        return 0.0
    if isinstance(codec, Delta):
        return codec.distance(weights)
    copy = torch.empty_like(weights)
    codec.decode(codec.encode(weights), copy)
    size = torch.linalg.vector_norm(weights)
    return float(torch.linalg.vector_norm(weights - copy) / size) if size else 0.0
