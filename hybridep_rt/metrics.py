"""Counters of one process: bytes by destination and class, waits by layer and peer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hybridep_rt.trace import Recorder


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """Of one layer at one worker. `copy_error`: ||W - copy|| / ||W|| of the experts homed there that others hold.
    `owed_norm`: Euclidean norm of what error feedback owes of the gradients of its copies.
    """

    copy_error: float
    owed_norm: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals since the start. `minus` gives what happened between two of them."""

    sent_bytes: dict[tuple[int, int], int]
    """(destination DC, traffic class) -> bytes, payload and header metadata, WAN only."""
    sent_messages: dict[tuple[int, int], int]
    waited_s: dict[tuple[int, int, str], float]
    """(layer or -1, peer's DC, channel) -> seconds the training thread waited."""
    codec_figures: dict[int, CodecFigures] = field(default_factory=dict)
    """By layer, when they were last taken."""

    def minus(self, earlier: Snapshot) -> Snapshot:
        """What came between `earlier` and this snapshot; entries that did not change are left out."""
        return Snapshot(
            sent_bytes=_difference(self.sent_bytes, earlier.sent_bytes),
            sent_messages=_difference(self.sent_messages, earlier.sent_messages),
            waited_s=_difference(self.waited_s, earlier.waited_s),
            codec_figures=self.codec_figures,
        )


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """How one link is, and totals since its start. Payload bytes; `queued_bytes` is by the name of the class."""

    is_up: bool
    reconnects: int
    rtt_s: float | None
    sent_bytes: int
    received_bytes: int
    sent_bytes_per_s: float
    received_bytes_per_s: float
    """Over the last second or more."""
    retransmitted_bytes: int
    unacked_bytes: int
    queued_bytes: dict[str, int]
    peer_holds_bytes: int
    """What the peer has not dealt with, of `window_bytes`."""
    window_bytes: int
    credit_stalls: int
    last_failure: str


class Metrics:
    """Thread-safe counters; the runtime's threads add, anyone takes a snapshot. `trace` also keeps when."""

    def __init__(self, trace: Recorder | None = None) -> None:
        self.trace = trace or Recorder()
        self._lock = threading.Lock()
        self._sent_bytes: Counter[tuple[int, int]] = Counter()
        self._sent_messages: Counter[tuple[int, int]] = Counter()
        self._waited_s: Counter[tuple[int, int, str]] = Counter()
        self._codec_figures: dict[int, CodecFigures] = {}

    def sent(self, dc: int, traffic: int, nbytes: int) -> None:
        """One message of `nbytes` went to another DC."""
        with self._lock:
            self._sent_bytes[dc, traffic] += nbytes
            self._sent_messages[dc, traffic] += 1

    def waited(self, layer: int, dc: int, channel: str, seconds: float) -> None:
        """The training thread waited for a message of `channel` from a worker of `dc`."""
        with self._lock:
            self._waited_s[layer, dc, channel] += seconds  # type: ignore[assignment]
        if self.trace.is_on:
            now_ns = time.monotonic_ns()
            self.trace.add("wait", f"{channel} from DC {dc}", now_ns - int(seconds * 1e9), now_ns)

    def coded(self, figures: dict[int, CodecFigures]) -> None:
        """What codecs did to each layer was measured."""
        with self._lock:
            self._codec_figures = figures

    def snapshot(self) -> Snapshot:
        """A consistent copy of all totals."""
        with self._lock:
            return Snapshot(
                dict(self._sent_bytes), dict(self._sent_messages), dict(self._waited_s), self._codec_figures
            )


def _difference(later: dict[Any, Any], earlier: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value - earlier.get(key, 0) for key, value in later.items() if value != earlier.get(key, 0)}
