"""Rungs of compression, each a choice of codecs and how long to train without them first."""

from __future__ import annotations

from dataclasses import dataclass

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rung:
    """`warm_up_steps`: optimizer steps with exact weights and gradients before the codecs set in."""

    name: str
    codecs: Codecs
    warm_up_steps: int


LADDER = (
    Rung("exact", Codecs(), 0),
    Rung("safe", Codecs(tokens="bf16", weights="delta-2bit", gradients="4bit"), 0),
    Rung("default", Codecs(tokens="int8", weights="delta-1bit:predict=0.5", gradients="1bit:vs=16"), 100),
    Rung("lean", Codecs(tokens="int8", weights="delta-1bit:t=2:scale=1.3", gradients="1bit:vs=32"), 100),
    Rung("extreme", Codecs(tokens="int8", weights="delta-1bit:t=4:scale=1.3", gradients="1bit:t=2:vs=32"), 100),
)
"""From faithful to small."""


def rung(name: str) -> Rung:
    """The rung of that name. Raises ConfigError that lists them."""
    for candidate in LADDER:
        if candidate.name == name:
            return candidate
    raise ConfigError(f'no rung "{name}": choose one of {", ".join(candidate.name for candidate in LADDER)}')


def rung_below(name: str) -> Rung:
    """The next more faithful rung, to fall back to; the first is its own."""
    at = LADDER.index(rung(name))
    return LADDER[max(at - 1, 0)]
