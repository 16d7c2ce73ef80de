"""Tensor <-> bytes. One interface for tokens, weights and gradients, lossless or not.

A codec is named by a spec, `NAME[:OPTION=VALUE]...`, such as `bf16` or `delta-1bit:t=2:scale=1.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from hybridep_rt.codecs.levels import BLOCKS, DEAD, LevelCode
from hybridep_rt.errors import CodecError, ConfigError
from hybridep_rt.protocol.messages import Bytes

if TYPE_CHECKING:
    import torch

    from hybridep_rt.codecs.coders import Coder

TOKENS, WEIGHTS, GRADIENTS, DENSE, TOKEN_GRADIENTS = "tokens", "weights", "gradients", "dense", "token_gradients"
_ANY = (TOKENS, WEIGHTS, GRADIENTS, DENSE, TOKEN_GRADIENTS)
_SUMMED = (GRADIENTS, DENSE)


class Codec(Protocol):
    """One stream of tensors from one sender to its receivers.

    A codec instance belongs to one stream, so that codecs which remember what the receiver holds (deltas) or what was
    not sent yet (error feedback) keep that memory themselves. Payloads that `encode` made belong to the caller.
    """

    name: str

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Size in bytes of `elements` values of `dtype` on the wire: exact, or the most where entries are chosen."""

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """Exact size of the payload that begins here, from its first bytes. Raises CodecError for another codec's."""

    def encode(self, values: torch.Tensor) -> Bytes:
        """Bytes of a tensor of any shape on any device, in row-major order."""

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Overwrite `into` (contiguous) with what `payload` encodes; a delta codec adds to what `into` holds.

        Raises CodecError where the payload is not one for such a tensor, and then leaves it as it was.
        """


@runtime_checkable
class Following(Protocol):
    """A codec that can go on with what both ends of a stream know from the codec before it."""

    def follow(self, before: Codec) -> None:
        """Begin with that, where it is of use. Both ends do so between the same two payloads."""


def follow(codec: Codec, before: Codec) -> None:
    """Let a stream's next codec take over what it can from the one before."""
    if isinstance(codec, Following):
        codec.follow(before)


class Option(NamedTuple):
    """A number that a spec may set."""

    default: float
    low: float
    high: float
    whole: bool = True

    def read(self, text: str) -> float:
        """Raises ValueError outside the range."""
        value = float(int(text)) if self.whole else float(text)
        if not self.low <= value <= self.high:
            raise ValueError(f"{text} is not in {self.low:g} .. {self.high:g}")
        return value


@dataclass(frozen=True)
class _Entry:
    """`coder`: of codecs whose payloads vary in size, what knows their mean."""

    make: Callable[[dict[str, float], int], Codec]
    kinds: tuple[str, ...]
    options: dict[str, Option]
    coder: Callable[[dict[str, float]], Coder] | None = None


def _exact(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.dense import Exact

    return _packed(Exact(), chosen)


def _cast(name: str, dtype: str) -> Callable[[dict[str, float], int], Codec]:
    def make(chosen: dict[str, float], width: int) -> Codec:
        import torch

        from hybridep_rt.codecs.dense import Cast

        return _packed(Cast(name, getattr(torch, dtype)), chosen)

    return make


def _packed(codec: Codec, chosen: dict[str, float]) -> Codec:
    if not chosen["zstd"]:
        return codec
    from hybridep_rt.codecs.packed import Packed

    return Packed(codec, int(chosen["zstd"]))


def _levels(bits: int) -> Callable[[dict[str, float], int], Codec]:
    def make(chosen: dict[str, float], width: int) -> Codec:
        from hybridep_rt.codecs.coders import LevelCoder
        from hybridep_rt.codecs.delta import Delta

        code = LevelCode(bits, int(chosen["block"]), chosen["scale"], chosen["rho"], chosen["predict"])
        return Delta(f"delta-{bits}bit", LevelCoder(code, int(chosen["t"])), predict=code.gain > 0)

    return make


def _coarse(bits: int) -> Callable[[dict[str, float], int], Codec]:
    def make(chosen: dict[str, float], width: int) -> Codec:
        from hybridep_rt.codecs.coders import LevelCoder
        from hybridep_rt.codecs.feedback import Feedback
        from hybridep_rt.codecs.moment import SecondMoment

        block, period = int(chosen["block"]), int(chosen["vs"])
        moment = SecondMoment(period, block, chosen["beta"]) if period else None
        code = LevelCode(bits, block, adapts=bool(chosen.get("adapt")))
        return Feedback(f"{bits}bit", LevelCoder(code, int(chosen["t"])), moment, adapts=code.adapts)

    return make


def _three_levels(chosen: dict[str, float]) -> Coder:
    from hybridep_rt.codecs.coders import LevelCoder
    from hybridep_rt.codecs.packed_levels import PackedLevels

    code = LevelCode(2, int(chosen["block"]), rho=chosen["rho"], gain=chosen["predict"], dead=chosen["dead"])
    inner = LevelCoder(code, int(chosen["t"]))
    return PackedLevels(inner) if chosen["zstd"] else inner


def _delta_ternary(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.delta import Delta

    return Delta("delta-ternary", _three_levels(chosen), predict=chosen["predict"] > 0)


def _paced(chosen: dict[str, float]) -> Coder:
    from hybridep_rt.codecs.paced import PacedCoder

    return PacedCoder(chosen["sent"])


def _ternary(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.feedback import Feedback

    return Feedback("ternary", _paced(chosen), adapts=True)


def _entries(chosen: dict[str, float]) -> Coder:
    from hybridep_rt.codecs.coders import SparseCoder

    return SparseCoder(chosen["keep"])


def _delta_topk(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.delta import Delta

    return Delta("delta-topk", _entries(chosen))


def _topk(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.feedback import Feedback

    return Feedback("topk", _entries(chosen))


def _residual(chosen: dict[str, float], width: int) -> Codec:
    from hybridep_rt.codecs.shared import SharedResidual

    return SharedResidual(chosen["keep"])


def _scaled(name: str) -> Callable[[dict[str, float], int], Codec]:
    def make(chosen: dict[str, float], width: int) -> Codec:
        from hybridep_rt.codecs.scaled import Scaled

        return Scaled(name, width, fp8=name == "fp8")

    return make


_ZSTD = {"zstd": Option(0, 0, 19)}
_BLOCK = Option(64, min(BLOCKS), max(BLOCKS))
_PERIOD = Option(1, 1, 255)
_KEEP = {"keep": Option(0.01, 1e-6, 0.5, whole=False)}
_PREDICTOR = {"predict": Option(0.0, 0.0, 1.0, whole=False), "rho": Option(0.9, 0.0, 0.999, whole=False)}
_DELTA = {"t": _PERIOD, "scale": Option(1.0, 0.1, 4.0, whole=False), "block": _BLOCK, **_PREDICTOR}
_THREE = {
    "t": _PERIOD,
    "block": Option(256, min(BLOCKS), max(BLOCKS)),
    "dead": Option(DEAD, 0.1, 3.0, whole=False),
    "zstd": Option(0, 0, 1),
    **_PREDICTOR,
}
_COARSE = {"t": _PERIOD, "block": _BLOCK, "vs": Option(0, 0, 255), "beta": Option(0.95, 0.0, 0.9999, whole=False)}
_ADAPTIVE = {**_COARSE, "adapt": Option(0, 0, 1)}

_CODECS: dict[str, _Entry] = {
    "exact": _Entry(_exact, _ANY, _ZSTD),
    "fp32": _Entry(_cast("fp32", "float32"), _ANY, _ZSTD),
    "bf16": _Entry(_cast("bf16", "bfloat16"), _ANY, _ZSTD),
    "int8": _Entry(_scaled("int8"), _ANY, {}),
    "fp8": _Entry(_scaled("fp8"), (TOKENS, TOKEN_GRADIENTS), {}),
    "delta-2bit": _Entry(_levels(2), (WEIGHTS,), _DELTA),
    "delta-1bit": _Entry(_levels(1), (WEIGHTS,), _DELTA),
    "delta-ternary": _Entry(_delta_ternary, (WEIGHTS,), _THREE, _three_levels),
    "delta-topk": _Entry(_delta_topk, (WEIGHTS,), _KEEP, _entries),
    "sr": _Entry(_residual, (WEIGHTS,), {**_KEEP, "t_shared": Option(16, 1, 1 << 20)}, _entries),
    "4bit": _Entry(_coarse(4), _SUMMED, _COARSE),
    "2bit": _Entry(_coarse(2), _SUMMED, _ADAPTIVE),
    "ternary": _Entry(_ternary, (GRADIENTS,), {"sent": Option(0.12, 0.02, 0.4, whole=False)}, _paced),
    "1bit": _Entry(_coarse(1), _SUMMED, _ADAPTIVE),
    "topk": _Entry(_topk, _SUMMED, _KEEP, _entries),
}

NAMES = tuple(_CODECS)

BLOCK = 64
"""Values of weights and gradients that share a scale in `int8`."""


def make_codec(spec: str, *, width: int = BLOCK) -> Codec:
    """A fresh codec for one stream. `width`: of a token, whose values share a scale in `int8` and `fp8`.

    Raises ConfigError that lists the names, or the options of a name.
    """
    entry, chosen = _parse(spec)
    return entry.make(chosen, width)


def options_of(spec: str) -> dict[str, float]:
    """All options of a spec, with defaults where it sets none. Raises ConfigError."""
    return _parse(spec)[1]


def names_for(kind: str) -> tuple[str, ...]:
    """The codecs that a kind of traffic may use."""
    return tuple(name for name, entry in _CODECS.items() if kind in entry.kinds)


def bytes_per_element(spec: str, dtype: torch.dtype, *, width: int = BLOCK, elements: int = 2**20) -> float:
    """Bytes on the wire per value of a tensor of so many, between key frames: what the planner counts.

    Exact, but for codecs that choose entries or pack levels, where it is what many payloads take on average, and for
    values packed by zstd, where what it saves isn't known beforehand and isn't counted.
    """
    entry, chosen = _parse(spec)
    if entry.coder is not None:
        return entry.coder(chosen).expected_bytes(elements) / elements
    chosen |= dict.fromkeys(chosen.keys() & _ZSTD.keys(), 0.0)
    return entry.make(chosen, width).wire_bytes(elements, dtype) / elements


def cut_frames(payload: Bytes, streams: Sequence[tuple[Codec, int]], dtype: torch.dtype) -> list[memoryview]:
    """The payloads of several streams, each a codec and its number of values, that follow one another.

    Raises CodecError where one of them is another codec's, or something is missing or left over.
    """
    rest, parts = memoryview(payload).cast("B"), []
    for codec, elements in streams:
        size = codec.frame_bytes(rest, elements, dtype)
        parts.append(rest[:size])
        if size > rest.nbytes:
            raise CodecError(f"{rest.nbytes} bytes where a payload of {codec.name} has {size}")
        rest = rest[size:]
    if rest.nbytes:
        raise CodecError(f"{rest.nbytes} bytes after the last payload")
    return parts


def _parse(spec: str) -> tuple[_Entry, dict[str, float]]:
    name, *settings = spec.split(":")
    if name not in _CODECS:
        raise ConfigError(f'no codec "{name}": choose one of {", ".join(NAMES)}')
    entry = _CODECS[name]
    chosen = {key: option.default for key, option in entry.options.items()}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise ConfigError(f'codec {name}: no option "{key}"; it has: {known}')
        try:
            chosen[key] = entry.options[key].read(text)
        except ValueError as error:
            raise ConfigError(f'codec {name}: "{setting}": {error}') from None
    if chosen.get("block", BLOCK) not in BLOCKS:
        raise ConfigError(f"codec {name}: block is one of {', '.join(map(str, BLOCKS))}")
    if chosen.get("predict", 0) > 0 and chosen.get("scale", 1) > 1:
        raise ConfigError(f"codec {name}: predict with a scale above 1 swings up: choose one of them")
    if chosen.get("predict", 0) > 0 and chosen.get("dead", 0) > 1.2:
        raise ConfigError(f"codec {name}: predict with dead above 1.2 swings up, as little corrects it: choose less")
    return entry, chosen


@dataclass(frozen=True, slots=True)
class Codecs:
    """Which codec each kind of WAN traffic uses, by spec. Raises ConfigError for one that doesn't exist or fit.

    `token_gradients`: of what tokens bring back in the backward pass; as `tokens` where empty.
    """

    tokens: str = "exact"
    weights: str = "exact"
    gradients: str = "exact"
    dense: str = "exact"
    token_gradients: str = ""

    def __post_init__(self) -> None:
        for kind in _ANY:
            spec = getattr(self, kind)
            if kind == TOKEN_GRADIENTS and not spec:
                continue
            entry, chosen = _parse(spec)
            if kind not in entry.kinds:
                raise ConfigError(f'codec "{spec}" is not one for {kind}: choose one of {", ".join(names_for(kind))}')
            if kind == DENSE and (chosen.get("vs") or chosen.get("adapt")):
                raise ConfigError(f'codec "{spec}": dense gradients have many senders, leave out vs and adapt')

    @property
    def specs(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(spec for kind in _ANY if (spec := getattr(self, kind)))

    @property
    def backward_tokens(self) -> str:
        """The codec of token gradients."""
        return self.token_gradients or self.tokens

    @classmethod
    def parse(cls, text: str) -> Codecs:
        """`"weights=bf16,tokens=bf16"` -> Codecs; what is not named stays exact. Raises ConfigError."""
        return cls(**parse_kinds(filter(None, text.split(","))))


def parse_kinds(items: Iterable[str]) -> dict[str, str]:
    """`["weights=bf16"]` -> codecs by kind. Raises ConfigError for another form, or a kind that is named twice."""
    chosen: dict[str, str] = {}
    for item in items:
        kind, equals, name = item.partition("=")
        if not equals or not name or kind not in _ANY or kind in chosen:
            raise ConfigError(f'codecs: "{item}" should be KIND=CODEC, each KIND once, one of {", ".join(_ANY)}')
        chosen[kind] = name
    return chosen
