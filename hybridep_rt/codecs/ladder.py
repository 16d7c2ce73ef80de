"""Rungs of compression, each a choice of codecs and how long to train without them first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridep_rt.codecs.codec import Codecs, options_of, parse_kinds
from hybridep_rt.errors import ConfigError

_LOSSLESS = Codecs()
_WARM_UP = "warm_up"
_WARM_UP_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Rung:
    """`warm_up_steps`: optimizer steps before the codecs set in, with those of `warm_up` meanwhile."""

    name: str
    codecs: Codecs
    warm_up_steps: int
    warm_up: Codecs = _LOSSLESS

    def codecs_at(self, step: int) -> Codecs:
        """Those in force once `step` optimizer steps are done. Tokens have theirs from the start."""
        if step >= self.warm_up_steps:
            return self.codecs
        first = self.warm_up
        return replace(self.codecs, weights=first.weights, gradients=first.gradients, dense=first.dense)

    @property
    def specs(self) -> tuple[str, ...]:
        """All codecs, of the warm-up too."""
        return tuple(dict.fromkeys(self.codecs_at(0).specs + self.codecs.specs))

    def without_moments(self) -> Rung:
        """For an optimizer that doesn't take second moments from outside: 2 bits where gradients would have 1.

        Unless strides adapt: then what is decoded has each value's own size, and its squares tell the moment.
        """
        name, *options = self.codecs.gradients.split(":")
        if name != "1bit" or options_of(self.codecs.gradients)["adapt"]:
            return self
        kept = [option for option in options if not option.startswith(("vs=", "beta="))]
        return replace(self, codecs=replace(self.codecs, gradients=":".join(["2bit", *kept])))


_SAFE = Codecs("bf16", "delta-2bit:predict=0.5:block=256", "2bit:adapt=1:block=256")
_DEFAULT = Codecs("int8", "delta-ternary:dead=1.1:predict=0.5:zstd=1", "ternary:sent=0.25")
_LEAN = Codecs("int8", "delta-ternary:dead=1.2:predict=0.5:zstd=1", "ternary:sent=0.1")
_EXTREME = Codecs("int8", "delta-ternary:t=2:dead=1.2:predict=0.25:zstd=1", "ternary:sent=0.07")

LADDER = (
    Rung("exact", _LOSSLESS, 0),
    Rung("safe", _SAFE, 0),
    Rung("default", _DEFAULT, 500, _SAFE),
    Rung("lean", _LEAN, 160, _SAFE),
    Rung("extreme", _EXTREME, 160, _SAFE),
)
"""From faithful to small. Coarse codecs cost most while weights move fast: the last three begin as `safe`, for as many
steps as leave the mean of 2,000 under .35 and .25 bytes with `default` and `lean`."""

EXACT = LADDER[0]


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


def parse_rung(text: str) -> Rung:
    """`"default"`, `"weights=bf16,tokens=bf16"` or `"default,gradients=2bit,warm_up=50"`: a rung, then what differs.

    Without the name of a rung what is not named stays exact. Raises ConfigError.
    """
    first, *others = text.split(",")
    base, items = (EXACT, [first, *others]) if "=" in first or not first else (rung(first), others)
    warm_ups = [item for item in items if item.startswith(f"{_WARM_UP}=")]
    chosen = parse_kinds(item for item in items if item and item not in warm_ups)
    steps = [_steps(item) for item in warm_ups] or [base.warm_up_steps]
    return replace(base, codecs=replace(base.codecs, **chosen), warm_up_steps=steps[-1])


def _steps(item: str) -> int:
    text = item.partition("=")[2]
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < _WARM_UP_MOST):
        raise ConfigError(f'codecs: "{item}" should be {_WARM_UP}=STEPS, a whole number from 0')
    return int(text)
