"""Which experts tokens choose, as samples of whole tokens: what is chosen together decides how often a token crosses.

Shapes: S sources (1: the same for every DC, else one per DC), T sampled tokens, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridep_rt.errors import PlanError

FILE_BYTES_MAX = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """`choices` [S,T,K]: distinct expert numbers of sampled tokens. Raises PlanError for anything else."""

    choices: NDArray[np.int64]
    source: str = "measured"

    def __post_init__(self) -> None:
        if self.choices.ndim != 3 or 0 in self.choices.shape or self.choices.dtype.kind not in "iu":
            raise PlanError(f"routing samples must be whole numbers [S,T,K], not {self.choices.shape}")
        ordered = np.sort(self.choices, -1)
        if ordered.min() < 0 or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise PlanError("each routing sample must be distinct expert numbers from 0")

    def check(self, num_experts: int, top_k: int, dcs: int) -> None:
        """Raise PlanError where the samples are of another model, or for another number of DCs."""
        sources, _, chosen = self.choices.shape
        if chosen != top_k or self.choices.max() >= num_experts:
            raise PlanError(
                f"routing samples choose {chosen} of at least {self.choices.max() + 1} experts; the layer has "
                f"{num_experts} and chooses {top_k}"
            )
        if sources not in (1, dcs):
            raise PlanError(f"routing samples are of {sources} DCs; allowed: 1 (alike) or {dcs}")

    def of(self, dc: int) -> NDArray[np.int64]:
        """The samples [T,K] of a DC's tokens."""
        chosen: NDArray[np.int64] = self.choices[dc if len(self.choices) > 1 else 0]
        return chosen


def uniform(num_experts: int, top_k: int, *, samples: int = 2048, seed: int = 0) -> Routing:
    """Every set of k experts is equally likely. Cut from shuffles of all experts, so that loads are even."""
    rng = np.random.default_rng(seed)
    each = num_experts // top_k
    rounds = -(-samples // each)
    shuffled = rng.permuted(np.tile(np.arange(num_experts), (rounds, 1)), axis=1)
    return Routing(shuffled[:, : each * top_k].reshape(1, -1, top_k), "uniform")


def zipf(num_experts: int, top_k: int, exponent: float, *, samples: int = 2048, seed: int = 0) -> Routing:
    """Popularity rank^-exponent, ranks given to experts at random (by the seed); k distinct experts per token."""
    if not 0 <= exponent <= 16:
        raise PlanError(f"a Zipf exponent must be from 0 to 16, not {exponent}")
    rng = np.random.default_rng(seed)
    weight = -exponent * np.log(rng.permutation(np.arange(1, num_experts + 1)))
    score = weight + rng.gumbel(size=(samples, num_experts))
    chosen = np.argpartition(score, -top_k, axis=1)[:, -top_k:] if top_k < num_experts else np.argsort(score, 1)
    return Routing(np.ascontiguousarray(chosen)[None], f"zipf:{exponent:g}")


def read(path: str | Path) -> Routing:
    """Samples from a file: `.npy` of shape [T,K] or [S,T,K], or text with one token's experts per line.

    Raises PlanError naming the file.
    """
    path = Path(path)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise PlanError(f"{path}: larger than {FILE_BYTES_MAX >> 20} MiB")
        values: Any = (
            np.load(path, allow_pickle=False)
            if path.suffix == ".npy"
            else np.loadtxt(path, dtype=np.int64, ndmin=2, delimiter="," if path.suffix == ".csv" else None)
        )
        return Routing(values[None] if values.ndim == 2 else values, str(path))
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, AttributeError) as error:
        raise PlanError(f"{path}: no routing samples: {' '.join(str(error).split())}") from None


def parse(text: str, num_experts: int, top_k: int, *, samples: int = 2048, seed: int = 0) -> Routing:
    """`uniform`, `zipf`, `zipf:EXPONENT` or a file's path. Raises PlanError."""
    if text == "uniform":
        return uniform(num_experts, top_k, samples=samples, seed=seed)
    name, colon, rest = text.partition(":")
    if name == "zipf":
        try:
            return zipf(num_experts, top_k, float(rest) if colon else 1.0, samples=samples, seed=seed)
        except ValueError as error:
            raise PlanError(f"routing {text!r}: {error}; allowed: zipf:EXPONENT") from None
    return read(text)
