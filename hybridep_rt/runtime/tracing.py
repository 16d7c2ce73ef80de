"""The traces of all workers, gathered by the first one at the end of a job, on its clock, in one file."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import msgpack

from hybridep_rt.errors import HybridEPError
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.trace import Recorder, Span, chrome, read_spans, shifted
from hybridep_rt.transport.ports import WanPort

_LOG = logging.getLogger("hybridep_rt")
_ROOT = Address(0, 0)
_CHANNEL = "trace"
_AT = Position(0, 0, -1, Phase.SHUTDOWN)
_ROUNDS = 5
"""Questions for a clock: the one that was answered fastest counts."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Says which start of which machine this is: processes with the same one share its clock."""


def gather(trace: Recorder, path: str, me: Address, layout: Layout, dc_names: tuple[str, ...], wan: WanPort) -> None:
    """Write the trace of all workers to `path`; all of them call it. A worker that is gone is left out, and said so.

    Raises HybridEPError where the first worker can't be reached.
    """
    if me != _ROOT:
        _tell(trace, wan)
        return
    found = {me.describe(dc_names): trace.spans()}
    for other in (Address(*layout.locate(number)) for number in range(1, layout.workers)):
        try:
            found[other.describe(dc_names)] = _ask(other, wan)
        except (HybridEPError, ValueError, msgpack.UnpackException) as error:
            _LOG.warning("trace: nothing from %s: %s", other.describe(dc_names), error)
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(chrome(found), file)
    except OSError as error:
        _LOG.warning("trace: %s: %s", path, error.strerror)


def _tell(trace: Recorder, wan: WanPort) -> None:
    payload = msgpack.packb([_boot(), trace.spans()])
    wan.send(_ROOT, _CHANNEL, _AT, [payload], traffic=Traffic.CONTROL)
    while bytes(wan.receive(_ROOT, _CHANNEL, _AT).payload) == b"time":
        now = time.monotonic_ns().to_bytes(8, "big")
        wan.send(_ROOT, _CHANNEL, _AT, [now], traffic=Traffic.CONTROL)


def _ask(other: Address, wan: WanPort) -> list[Span]:
    """The spans of one worker, on this one's clock."""
    message = wan.receive(other, _CHANNEL, _AT)
    told = msgpack.unpackb(message.payload)
    boot, spans = told if isinstance(told, list) and len(told) == 2 else ("", None)
    offset_ns = 0 if boot == _boot() else -_clock_ahead(other, wan)
    wan.send(other, _CHANNEL, _AT, [b"done"], traffic=Traffic.CONTROL)
    return shifted(read_spans(spans), offset_ns)


def _clock_ahead(other: Address, wan: WanPort) -> int:
    """How many ns the other's clock shows more than this one: an error of half the shortest round trip at most."""
    answers = []
    for _ in range(_ROUNDS):
        asked_ns = time.monotonic_ns()
        wan.send(other, _CHANNEL, _AT, [b"time"], traffic=Traffic.CONTROL)
        theirs_ns = int.from_bytes(bytes(wan.receive(other, _CHANNEL, _AT).payload[:8]), "big")
        now_ns = time.monotonic_ns()
        answers.append((now_ns - asked_ns, theirs_ns - (asked_ns + now_ns) // 2))
    return min(answers)[1]


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
