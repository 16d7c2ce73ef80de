"""Tensor <-> bytes. One interface for tokens, weights and gradients, lossless or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridep_rt.codecs.dense import Cast, Exact
from hybridep_rt.errors import ConfigError
from hybridep_rt.protocol.messages import Bytes


class Codec(Protocol):
    """One stream of tensors from one sender to its receivers.

    A codec instance belongs to one stream, so that codecs which remember what the receiver holds (deltas) or what was
    not sent yet (error feedback) keep that memory themselves.
    """

    name: str

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Exact size in bytes of `elements` values of `dtype` on the wire."""

    def encode(self, values: torch.Tensor) -> Bytes:
        """Bytes of a tensor of any shape on any device, in row-major order."""

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Overwrite `into` (contiguous) with what `payload` encodes. Raises CodecError where the size is wrong."""


_CODECS: dict[str, Callable[[], Codec]] = {
    "exact": Exact,
    "fp32": lambda: Cast("fp32", torch.float32),
    "bf16": lambda: Cast("bf16", torch.bfloat16),
}

NAMES = tuple(_CODECS)


def make_codec(name: str) -> Codec:
    """A fresh codec for one stream. Raises ConfigError that lists the names."""
    if name not in _CODECS:
        raise ConfigError(f'no codec "{name}": choose one of {", ".join(NAMES)}')
    return _CODECS[name]()


@dataclass(frozen=True, slots=True)
class Codecs:
    """Which codec each kind of WAN traffic uses, by name. Raises ConfigError for a name that doesn't exist."""

    tokens: str = "exact"
    weights: str = "exact"
    gradients: str = "exact"
    dense: str = "exact"

    def __post_init__(self) -> None:
        for name in (self.tokens, self.weights, self.gradients, self.dense):
            make_codec(name)

    @classmethod
    def parse(cls, text: str) -> Codecs:
        """`"weights=bf16,tokens=bf16"` -> Codecs; what is not named stays exact. Raises ConfigError."""
        chosen: dict[str, str] = {}
        for item in filter(None, text.split(",")):
            kind, equals, name = item.partition("=")
            if not equals or kind not in cls.__dataclass_fields__ or kind in chosen:
                allowed = ", ".join(cls.__dataclass_fields__)
                raise ConfigError(f'codecs: "{item}" should be KIND=CODEC, each KIND once, one of {allowed}')
            chosen[kind] = name
        return cls(**chosen)
