"""Runs mpirun: shows its output by DC and worker, passes signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import click

from hybridep_rt.errors import ConfigError
from launcher.command import Rank
from launcher.notices import PREFIX, Line, Notices
from launcher.processes import clear_away, die_with_parent

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LINE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 16
_POLL_S = 0.1
_ENDING_S = 8.0
"""So long may mpirun take once a process died or a signal was passed on; then it is killed, and all ranks with it."""
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run. `mark` is in the environment of each of its processes; `log_dir` None: no log files."""

    command: Sequence[str]
    environment: Mapping[str, str]
    ranks: Sequence[Rank]
    mark: str
    log_dir: Path | None = None


def supervise(job: Job) -> int:
    """Run the job to its end. Returns the exit code: mpirun's, or 128 + the signal that ended it."""
    try:
        with contextlib.ExitStack() as stack:
            screen = stack.enter_context(_Screen(job.ranks, job.log_dir))
            return _Mpirun(job, screen).run()
    finally:
        clear_away(job.mark)


class _Mpirun:
    """The child process, its two pipes and its deadline."""

    def __init__(self, job: Job, screen: _Screen) -> None:
        self._ranks = job.ranks
        self._screen = screen
        self._signalled: int | None = None
        self._deadline: float | None = None
        launcher = os.getpid()
        self._process = subprocess.Popen(
            list(job.command),
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches mpirun once, through us
            preexec_fn=lambda: die_with_parent(launcher),
        )

    def run(self) -> int:
        with self._process, _handling(self._pass_on):
            try:
                self._read_all()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDING_S)
            finally:
                self._process.kill()
        code = self._process.wait()
        self._tell_end(code)
        if self._signalled is not None:
            return 128 + self._signalled
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # Who asks twice does not want to wait.
        self._process.send_signal(number if self._signalled is None else signal.SIGKILL)
        self._signalled = number
        self._end_soon()

    def _end_soon(self) -> None:
        self._deadline = self._deadline or time.monotonic() + _ENDING_S

    def _read_all(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            for pipe in (self._process.stdout, self._process.stderr):
                selector.register(pipe, selectors.EVENT_READ, _Lines())
            gone_at: float | None = None
            while selector.get_map():
                for key, _ in selector.select(_POLL_S):
                    self._read(selector, key)
                if self._screen.somebody_died:
                    self._end_soon()
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._process.kill()
                if gone_at is None and self._process.poll() is not None:
                    gone_at = time.monotonic()
                if gone_at is not None and time.monotonic() > gone_at + _DRAIN_S:
                    return  # somebody else still holds the pipe

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, _READ_BYTES)
        is_error = key.fileobj is self._process.stderr
        for line in key.data.feed(data):
            self._screen.feed(line, is_error)
        if not data:
            selector.unregister(key.fileobj)

    def _tell_end(self, code: int) -> None:
        self._screen.finish(code)
        if self._signalled is not None:
            self._screen.say(f"ended by {signal.Signals(self._signalled).name}")
        elif code < 0 and not self._screen.somebody_died:
            who = ", ".join(rank.describe() for rank in self._ranks)
            self._screen.say(f"mpirun died (signal {-code}), and with it {who}")


class _Lines:
    """Bytes of one pipe into lines. A line that never ends is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LINE_BYTES_MAX):
            lines.append(self._rest)
            self._rest = b""
        return (line.decode("utf-8", "replace") for line in lines)


class _Screen:
    """Where lines go: the terminal with the rank's tag, and the rank's log file."""

    def __init__(self, ranks: Sequence[Rank], log_dir: Path | None) -> None:
        self._ranks = ranks
        self._notices = (Notices(ranks), Notices(ranks))
        self._log_dir = log_dir
        self._logs: list[IO[str]] = []
        names = list(dict.fromkeys(rank.dc for rank in ranks))
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}

    def __enter__(self) -> _Screen:
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                for rank in self._ranks:
                    path = self._log_dir / f"{rank.tag.replace('/', '-')}.log"
                    self._logs.append(open(path, "w", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--log-dir: {error.filename}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.close()

    @property
    def somebody_died(self) -> bool:
        return any(notices.somebody_died for notices in self._notices)

    def feed(self, line: str, is_error: bool) -> None:
        for shown in self._notices[is_error].feed(line):
            self._show(shown, is_error)

    def finish(self, code: int) -> None:
        for is_error, notices in enumerate(self._notices):
            for shown in notices.finish(code):
                self._show(shown, bool(is_error))

    def say(self, text: str) -> None:
        self._show(Line(None, PREFIX + text), True)

    def _show(self, line: Line, is_error: bool) -> None:
        stream = sys.stderr if is_error or line.rank is None else sys.stdout
        text = line.text
        if line.rank is not None:
            if self._logs:
                print(text, file=self._logs[line.rank], flush=True)
            rank = self._ranks[line.rank]
            text = f"{click.style(f'[{rank.tag}]', fg=self._colours[rank.dc])} {text}"
        with contextlib.suppress(BrokenPipeError):
            click.echo(text, file=stream)


@contextlib.contextmanager
def _handling(handler: signal._HANDLER) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
