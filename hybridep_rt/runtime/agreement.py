"""Before the first step: do all workers of all DCs hold the same model, plan, codecs and topology?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
from torch import nn

from hybridep_rt.errors import ConfigError, RemoteProtocolError
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message, Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.transport.ports import WanPort

_FACTS_BYTES_MAX = 1 << 16


def digest(value: Any) -> str:
    """A short fingerprint of anything whose repr says all of it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def describe_model(model: nn.Module, experts: set[int], shapes: Sequence[Any]) -> str:
    """A fingerprint of names, shapes and dtypes of the dense tensors, and of the MoE layers' sizes."""
    dense = [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters() if id(p) not in experts]
    buffers = [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
    return digest((dense, buffers, tuple(shapes)))


def agree(
    facts: Mapping[str, str],
    me: Address,
    layout: Layout,
    dc_names: tuple[str, ...],
    wan: WanPort,
    position: Position,
) -> None:
    """Compare `facts` with those of worker 0 of the first DC. All raise the same ConfigError, naming what differs."""
    root = Address(0, 0)
    if me != root:
        wan.send(root, "agreement", position, [msgpack.packb(dict(facts))], traffic=Traffic.CONTROL)
        verdict = bytes(wan.receive(root, "agreement", position).payload[:_FACTS_BYTES_MAX]).decode()
    else:
        others = [Address(*layout.locate(number)) for number in range(1, layout.workers)]
        differences = []
        for other in others:
            theirs = _facts(wan.receive(other, "agreement", position))
            wrong = sorted(key for key in {*facts, *theirs} if facts.get(key) != theirs.get(key))
            if wrong:
                differences.append(f"{', '.join(wrong)} at {other.describe(dc_names)}")
        verdict = "; ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
        for other in others:
            wan.send(other, "agreement", position, [verdict.encode()], traffic=Traffic.CONTROL)
    if verdict:
        raise ConfigError(f"workers don't agree: compared with {root.describe(dc_names)}, there differs: {verdict}")


def _facts(message: Message) -> dict[str, str]:
    if message.payload.nbytes > _FACTS_BYTES_MAX:
        raise RemoteProtocolError(f"{message.payload.nbytes} bytes of facts")
    try:
        facts = msgpack.unpackb(message.payload, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"unreadable facts from {message.source.describe()}") from error
    if not isinstance(facts, dict):
        raise RemoteProtocolError(f"unreadable facts from {message.source.describe()}")
    return {str(key): str(value) for key, value in facts.items()}
