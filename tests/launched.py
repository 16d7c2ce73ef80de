"""Real `hybridep` commands for tests: their output line by line, their processes, and a program for their workers."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launcher.processes import JOB_VARIABLE

END_S = 15.0
START_S = 45.0
TOKEN = "ab" * 32

# What a worker does once all have joined: `end`, `exit N` or `raise` (the last worker of the last DC), or `wait`.
PROGRAM = """
import os, sys, types
from hybridep_rt.config import Limits
from hybridep_rt.errors import PlanError
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.link import Job
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.environment import Environment
from hybridep_rt.transport.worker_link import WorkerLink
from topology import load

told = Environment.read(os.environ)
settings = told.settings
topology = load(settings.topology)
me = Address(topology.dc_index(told.dc), told.worker)
last = Address(len(topology.datacenters) - 1, topology.workers_per_dc[-1] - 1)
job = Job(topology.cluster, topology.digest(), settings.epoch, settings.run_token)
link = WorkerLink.connect(told.endpoint, me, job, topology.dc_names, settings.timeouts, Limits(), Metrics())
sys.modules["hybridep_rt.runtime.start"] = types.SimpleNamespace(fail=link.fail)  # as `init` does, without torch
print("joined", sys.argv[1:], "torch" in sys.modules, flush=True)
if sys.argv[1] in ("exit", "raise", "typed") and me == last:
    if sys.argv[1] == "exit":
        sys.exit(int(sys.argv[2]))
    raise PlanError("no such plan") if sys.argv[1] == "typed" else ValueError("a mistake in the script")
if sys.argv[1] != "end":
    link.receive(Address(0, 0), "never", Position(0, 0, -1, Phase.MAILBOX))
link.close()
"""


class Launched:
    """A running `hybridep` command. `lines` holds what has been read of stdout and stderr together."""

    def __init__(self, arguments: list[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._mark = f"HYBRIDEP_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "hybridep"), *arguments],
            cwd=folder,
            env={**os.environ, **variables, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, wanted: str, times: int = 1, patience_s: float = START_S) -> None:
        """Read until so many lines contain `wanted`."""
        deadline = time.monotonic() + patience_s
        while sum(wanted in line for line in self.lines) < times:
            line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"the command ended before {wanted!r}:\n{self.text}"
            self.lines.append(line)

    def end(self, timeout_s: float = END_S) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(timeout_s)
        while (line := self._queue.get(timeout=timeout_s)) is not None:
            self.lines.append(line)
        return code

    def pids(self, wanted: str = "") -> list[int]:
        """Processes of this command, itself included, whose command line contains `wanted`."""
        return [pid for pid in _pids() if self._mark in _read(pid, "environ") and wanted in _read(pid, "cmdline")]

    def mark_of_ranks(self) -> str:
        """By which the launcher knows its processes and folders."""
        return _read(self.pids("launcher.entry")[-1], "environ").partition(f"{JOB_VARIABLE}=")[2].split()[0]

    def wait_until_gone(self) -> None:
        """Fails unless all processes are gone within the time that a broken job may take."""
        deadline = time.monotonic() + END_S
        while left := self.pids():
            assert time.monotonic() < deadline, f"processes left: {left}"
            self.process.poll()

    def close(self) -> None:
        """Leave nothing behind, whatever the test did."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)


Launch = Callable[..., Launched]


def launching(folder: Path) -> Iterator[Launch]:
    """Body of a fixture: a function that starts commands in `folder`, where `job.py` lies. All are ended after."""
    (folder / "job.py").write_text(PROGRAM)
    with contextlib.ExitStack() as stack:

        def launch(*arguments: str, **variables: str) -> Launched:
            launched = Launched(list(arguments), folder, variables)
            stack.callback(launched.close)
            return launched

        yield launch


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
