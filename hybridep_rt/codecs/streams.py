"""What a codec remembers about its stream, if it does: for receivers that join late, and for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.protocol.messages import Bytes


@runtime_checkable
class _Keyed(Protocol):
    @property
    def ready(self) -> bool: ...

    def key_frame(self) -> Bytes: ...


@runtime_checkable
class _Remembering(Protocol):
    def state(self) -> dict[str, torch.Tensor]: ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None: ...


def joining_payload(codec: Codec, values: torch.Tensor) -> Bytes:
    """What brings a receiver that joins now to where the stream's other receivers are since the last `encode`."""
    return codec.key_frame() if isinstance(codec, _Keyed) and codec.ready else codec.encode(values)


def stream_state(stream: object) -> dict[str, torch.Tensor]:
    """What `load_stream_state` needs to go on with the stream in another instance or process."""
    return stream.state() if isinstance(stream, _Remembering) else {}


def load_stream_state(stream: object, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """At a sender, or at a receiver that keeps no copy: go on as if nothing had happened."""
    if isinstance(stream, _Remembering) and state:
        stream.load_state({name: part.to(device) if part.dim() else part for name, part in state.items()})
