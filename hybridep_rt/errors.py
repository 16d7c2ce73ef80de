"""Every typed error of the runtime. Attributes carry the facts; nobody has to parse the text.

HybridEPError
├── ConfigError (also ValueError)          exit code 2
│   ├── TopologyError
│   └── PlanError                          .reason
├── ProtocolError
│   ├── LocalProtocolError                 our own misuse of a machine: a bug here
│   └── RemoteProtocolError                what a peer sent breaks the protocol
├── HandshakeRefused                       .peer .reason; exit code 2
├── TransportError
│   ├── ConnectFailed                      .peer
│   └── ConnectionLost                     .peer
├── DeadlineExceeded (also TimeoutError)   .peer .operation .layer .bytes_outstanding .waited_s
├── PeerLost                               .peer .reason
│   └── PeerRestarted                      it came back without its state
├── PositionMismatch                       .mine .theirs .peer
└── CodecError
"""

from __future__ import annotations

from topology.errors import ConfigError, HybridEPError, TopologyError

__all__ = [
    "CodecError",
    "ConfigError",
    "ConnectFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "HandshakeRefused",
    "HybridEPError",
    "LocalProtocolError",
    "PeerLost",
    "PeerRestarted",
    "PlanError",
    "PositionMismatch",
    "ProtocolError",
    "RemoteProtocolError",
    "TopologyError",
    "TransportError",
]


class PlanError(ConfigError):
    """A plan can't be executed, or can't be made; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ProtocolError(HybridEPError):
    """The rules of the wire were broken."""


class LocalProtocolError(ProtocolError):
    """This program used a protocol machine wrongly."""


class RemoteProtocolError(ProtocolError):
    """A peer sent bytes that no correct peer sends."""


class HandshakeRefused(HybridEPError):
    """A peer was reached but the two sides don't belong together (token, cluster, version, plan)."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class TransportError(HybridEPError):
    """A connection could not be made or kept."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class ConnectFailed(TransportError):
    """Nobody answered at the address before the deadline."""


class ConnectionLost(TransportError):
    """An open connection ended without goodbye."""


class DeadlineExceeded(HybridEPError, TimeoutError):
    """A wait ran out. Names who was waited for, in which operation and layer, how long, and what is missing."""

    def __init__(
        self,
        *,
        peer: str,
        operation: str,
        layer: int | None,
        waited_s: float,
        bytes_outstanding: int | None = None,
    ) -> None:
        where = "" if layer is None or f"layer {layer}" in operation else f", layer {layer}"
        missing = "" if bytes_outstanding is None else f", {bytes_outstanding} bytes outstanding"
        super().__init__(f"{operation}{where}: nothing from {peer} for {waited_s:.1f} s{missing}")
        self.peer = peer
        self.operation = operation
        self.layer = layer
        self.waited_s = waited_s
        self.bytes_outstanding = bytes_outstanding


class PeerLost(HybridEPError):
    """A DC or one of its processes is gone: died, failed, was cut off, or left while it was still needed."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class PeerRestarted(PeerLost):
    """One end of a link between DCs came back as a new process: what it had received and queued is lost."""


class PositionMismatch(HybridEPError):
    """Two workers are at different places of the training loop. Both places are named."""

    def __init__(self, *, mine: str, peer: str, theirs: str) -> None:
        super().__init__(
            f"workers diverged: this worker is at {mine}, but {peer} is at {theirs}. "
            "Every worker has to run the same number of forwards, backwards and steps, in the same mode."
        )
        self.mine = mine
        self.peer = peer
        self.theirs = theirs


class CodecError(HybridEPError):
    """A payload does not decode, or a tensor can't be encoded."""
