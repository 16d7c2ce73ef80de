"""Run one command line per site, show their output line by line, end them together. A thin shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO

# How long the others have to notice by themselves that one site failed; they should say whom they miss.
GRACE_S = 30.0
_TERMINATE_S = 10.0
_LOOK_S = 0.05
_LINE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Program:
    """What to run for one site, already wrapped to run inside it.

    `prefix` goes before each line of its output; `environment` adds to this process's own.
    """

    site: str
    prefix: str
    command: Sequence[str]
    environment: Mapping[str, str]


def run_all(programs: Sequence[Program], log_directory: Path | None = None) -> int:
    """Run all to their end: 0, or the exit status of the site that failed first (128 + signal, as shells do).

    After a failure the others get GRACE_S to end by themselves. Output goes to this process's, each line after its
    site's name, or to a file per site in `log_directory`.
    """
    with in_background(programs, log_directory) as running:
        return _wait(running)


@contextmanager
def in_background(
    programs: Sequence[Program], log_directory: Path | None = None
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """All run inside the block, and are ended with it."""
    if log_directory is not None:
        log_directory.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    pumps: list[threading.Thread] = []
    try:
        for program in programs:
            running.append(_start(program))
        for program, process in zip(programs, running, strict=True):
            pumps.append(_pump(program, process, log_directory))
        yield running
    finally:
        _end(running)
        for pump in pumps:
            pump.join()


def _start(program: Program) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        program.command,
        env={**os.environ, **program.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, until = 0, None
    while True:
        codes = [process.poll() for process in running]
        failed = failed or next((code for code in codes if code), 0)
        if None not in codes:
            break
        if failed and until is None:
            until = monotonic() + GRACE_S
        if until is not None and monotonic() > until:
            break
        sleep(_LOOK_S)
    return failed if failed >= 0 else 128 - failed


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those still running to end, then make them."""
    for number, wait_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        until = monotonic() + wait_s
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - monotonic(), 0.0))


def _pump(program: Program, process: subprocess.Popen[bytes], log_directory: Path | None) -> threading.Thread:
    """A thread that passes a site's output on until the site ends."""
    assert process.stdout is not None
    pump = threading.Thread(target=_pass_on, args=(program, process.stdout, log_directory), daemon=True)
    pump.start()
    return pump


def _pass_on(program: Program, output: IO[bytes], log_directory: Path | None) -> None:
    with output:
        if log_directory is not None:
            with open(log_directory / f"{program.site}.log", "wb") as log:
                while data := os.read(output.fileno(), _LINE_BYTES_MAX):
                    log.write(data)
                    log.flush()
            return
        while line := output.readline(_LINE_BYTES_MAX):
            with suppress(BrokenPipeError):
                sys.stdout.buffer.write(program.prefix.encode() + line.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()
