"""What a training run measured: each worker's part, the parts sent to worker 0, and one JSON file for all.

The file, in SI units: `steps` has for each step the loss (mean over workers), the seconds (of the slowest worker) and
the bytes that left on each directed link, by class; `waits` has the seconds that each worker's training thread waited,
by layer, DC and channel, over all steps; `held_out` the loss at some steps.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hybridep_rt import Runtime
from hybridep_rt.errors import ConfigError, RemoteProtocolError
from hybridep_rt.metrics import Snapshot
from hybridep_rt.protocol.messages import Traffic

CHANNEL = "train_text/report"
REPORT_BYTES = 64 << 20
Json = dict[str, Any]


@dataclass
class WorkerReport:
    """One worker's losses, seconds and bytes, an entry per step, and its waits."""

    loss: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    sent_bytes: list[dict[str, int]] = field(default_factory=list)
    """Per step: "<index of the DC> <class>" -> bytes."""
    waited_s: dict[str, float] = field(default_factory=dict)
    """"<layer or -1> <index of the peer's DC> <channel>" -> seconds."""

    def add(self, loss: float, seconds: float, used: Snapshot) -> None:
        """Record one step."""
        self.loss.append(loss)
        self.step_s.append(seconds)
        self.sent_bytes.append({f"{dc} {Traffic(kind).name.lower()}": n for (dc, kind), n in used.sent_bytes.items()})
        for (layer, dc, channel), waited_s in used.waited_s.items():
            key = f"{layer} {dc} {channel}"
            self.waited_s[key] = self.waited_s.get(key, 0.0) + waited_s

    def pack(self) -> bytes:
        """For the wire."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, payload: memoryview, steps: int, dcs: int) -> WorkerReport:
        """What another worker packed. Raises RemoteProtocolError unless it is a report of `steps` steps."""
        if len(payload) > REPORT_BYTES:
            raise RemoteProtocolError(f"a training report of {len(payload)} bytes is over the limit")
        try:
            report = cls(**json.loads(bytes(payload)))
            _check_numbers([*report.loss, *report.step_s, *report.waited_s.values()])
            _check_numbers([n for sent in report.sent_bytes for n in sent.values()])
            named = {int(key.split(" ")[0]) for sent in report.sent_bytes for key in sent}
            named |= {int(key.split(" ", 2)[1]) for key in report.waited_s}
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise RemoteProtocolError(f"this is no training report: {error}") from None
        lengths = {len(report.loss), len(report.step_s), len(report.sent_bytes)}
        if lengths != {steps} or not named <= set(range(dcs)):
            raise RemoteProtocolError("a training report of another job")
        return report


def check_destination(file: str) -> None:
    """Raise ConfigError before the training rather than after it, where `file` can't be written."""
    folder = Path(file).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise ConfigError(f"--json {file}: can't be written there")


def gather(runtime: Runtime, mine: WorkerReport, *, timeout_s: float = 60.0) -> list[WorkerReport]:
    """Every worker's report, in the order of their numbers, at worker 0; nothing elsewhere. All must call it."""
    mailbox = runtime.mailbox(CHANNEL)
    if runtime.rank != 0:
        mailbox.send(0, mine.pack())
        return []
    others = (mailbox.receive(worker, timeout_s=timeout_s) for worker in range(1, runtime.world_size))
    return [mine, *(WorkerReport.unpack(payload, len(mine.loss), len(runtime.dc_names)) for payload in others)]


def summary(runtime: Runtime, reports: list[WorkerReport]) -> Json:
    """`steps` and `waits` of the file, links and workers by the names of their DCs."""
    names = runtime.dc_names
    dcs = [runtime.layout.locate(worker)[0] for worker in range(runtime.world_size)]
    steps = [
        {
            "loss": sum(report.loss[step] for report in reports) / len(reports),
            "step_s": max(report.step_s[step] for report in reports),
            "sent_bytes": _by_link(names, [(dc, r.sent_bytes[step]) for dc, r in zip(dcs, reports, strict=True)]),
        }
        for step in range(len(reports[0].loss))
    ]
    waits = [wait for worker, report in enumerate(reports) for wait in _waits(runtime, worker, report)]
    return {"steps": steps, "waits": waits}


def machine() -> Json:
    """Where it was measured, and when."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def write(file: str, content: Json) -> None:
    """Write JSON; numbers that are not finite become null. The file appears complete or not at all."""
    draft = Path(f"{file}.part")
    draft.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", "utf-8")
    draft.replace(file)


def _check_numbers(values: list[Any]) -> None:
    if not all(type(value) in (int, float) for value in values):
        raise TypeError("numbers expected")


def _by_link(names: tuple[str, ...], sent: list[tuple[int, dict[str, int]]]) -> dict[str, dict[str, int]]:
    links: dict[str, Counter[str]] = {}
    for dc, by_key in sent:
        for key, nbytes in by_key.items():
            to, kind = key.split(" ", 1)
            links.setdefault(f"{names[dc]}->{names[int(to)]}", Counter())[kind] += nbytes
    return {link: dict(kinds) for link, kinds in sorted(links.items())}


def _waits(runtime: Runtime, worker: int, report: WorkerReport) -> list[Json]:
    dc, local = runtime.layout.locate(worker)
    names = runtime.dc_names
    waits = []
    for key, seconds in sorted(report.waited_s.items()):
        layer, peer, channel = key.split(" ", 2)
        where = {"dc": names[dc], "worker": local, "layer": int(layer), "peer": names[int(peer)]}
        waits.append({**where, "channel": channel, "seconds": seconds})
    return waits


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value
