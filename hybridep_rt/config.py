"""Every setting of a run, its default and its bounds, in one table."""

from __future__ import annotations

from dataclasses import dataclass

from hybridep_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. The ladder heartbeat < silence <= resume < operation is checked: the nearest cause is reported first.

    `rendezvous_s`: until all coordinators and workers have met. `handshake_s`: one connection's handshake.
    `heartbeat_s`: a quiet link sends a heartbeat this often. `silence_s`: a link that is quiet for so long is lost.
    `resume_s`: a link between DCs whose connection was lost has so long to come back; then the run ends. `refused_s`:
    sooner, if the other DC's address refuses connections for so long: nobody listens there any more.
    `operation_s`: one wait for one peer inside a training step. `goodbye_s`: for an orderly end.
    """

    rendezvous_s: float = 120.0
    handshake_s: float = 10.0
    heartbeat_s: float = 1.0
    silence_s: float = 10.0
    resume_s: float = 30.0
    refused_s: float = 5.0
    operation_s: float = 300.0
    goodbye_s: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"timeouts: {name} must be above 0, not {getattr(self, name)}")
        if not self.heartbeat_s < self.silence_s <= self.resume_s < self.operation_s:
            raise ConfigError(
                "timeouts must be in the order heartbeat_s < silence_s <= resume_s < operation_s, "
                f"not {self.heartbeat_s:g} < {self.silence_s:g} <= {self.resume_s:g} < {self.operation_s:g}"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that hold whatever a peer sends.

    `message_bytes`: one message. `metadata_bytes`: its header's metadata. `chunk_s`: a message is cut into chunks of
    this many seconds of the link's rate, and between two chunks a more urgent message may pass.
    `chunk_min_bytes`/`chunk_max_bytes` bound the chunk at very slow and very fast links.
    `open_messages`: messages of one link whose first chunk is sent and the last is not. `window_bytes`: so many bytes
    of one link's messages may wait at the receiving process (besides one message of each flow, which may always
    travel: see `protocol.credits`). `flows`: flows of one link that may have messages waiting at the receiving process.
    `unacked_bytes`: what a link between DCs keeps to send again. `strangers`: connections of one listener that have not
    proved who they are yet.
    """

    message_bytes: int = 1 << 31
    metadata_bytes: int = 1 << 16
    chunk_s: float = 0.005
    chunk_min_bytes: int = 16 << 10
    chunk_max_bytes: int = 4 << 20
    open_messages: int = 64
    window_bytes: int = 256 << 20
    flows: int = 1 << 16
    unacked_bytes: int = 256 << 20
    strangers: int = 32

    def chunk_bytes(self, bandwidth_bytes_per_s: float) -> int:
        """Size of one chunk on a link of that rate, in bytes."""
        return int(min(max(bandwidth_bytes_per_s * self.chunk_s, self.chunk_min_bytes), self.chunk_max_bytes))
