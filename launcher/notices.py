"""mpirun's tagged output, line by line, into lines that name DC and role. Pure: lines in, lines out.

Open MPI prints `[job,rank]<stdout>: text`, and its own notices as blocks between rulers of dashes. A notice of a
death becomes one line; it is kept until the end, because the words of the process itself, which say more, may come
after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.command import Rank

RULER = "-" * 74
PREFIX = "hybridep: "
START_ALARM = 14
_BLOCK_LINES = 100
_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?(.*)", re.DOTALL)
_SIGNALLED = re.compile(r"process rank (\d+) .*exited on signal (\d+)")
_ABORTED = re.compile(r'process rank (\d+) .*calling "abort"')
_EXITED = re.compile(r"exited with non-zero status.*Process name: \[[^,\]]*,(\d+)\].*Exit code: *(\d+)")
_IMPROPER = re.compile(r"process rank (\d+) .*exiting improperly")
_OWN_WORDS = re.compile(rf'{PREFIX}(?:(?:worker \d+|coordinator) of DC "[^"]*": )*(.*)')


@dataclass(frozen=True, slots=True)
class Line:
    """One line to show. `rank` None: it is from mpirun or about the job, not from one process."""

    rank: int | None
    text: str


@dataclass(frozen=True, slots=True)
class _Death:
    """The first rank that mpirun blames for the end. `what` may hold `{exit_code}`."""

    rank: int
    what: str
    by_signal: bool = False


class Notices:
    """Call `feed` for each line and `finish` once at the end."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._blocks: dict[int | None, list[str]] = {}
        self._death: _Death | None = None
        self._explained: set[int] = set()
        self._reasons: set[str] = set()

    @property
    def somebody_died(self) -> bool:
        """mpirun has told of a death: it should end soon."""
        return self._death is not None

    def feed(self, line: str) -> list[Line]:
        """The lines to show now. `line` has no newline."""
        match = _TAG.fullmatch(line)
        rank, text = (int(match[1]), match[2].rstrip("\r")) if match else (None, line)
        if rank is not None and rank >= len(self._ranks):
            rank, text = None, line
        block = self._blocks.get(rank)
        if block is None:
            if text.rstrip() != RULER:
                return self._plain(rank, text)
            self._blocks[rank] = [text]
            return []
        block.append(text)
        if self._is_over(rank, block):
            del self._blocks[rank]
            return self._end_of_block(rank, block)
        return []

    def finish(self, exit_code: int) -> list[Line]:
        """What is left to say after mpirun ended: unfinished blocks, and who died unless that has been told."""
        lines = [Line(rank, text) for rank, block in self._blocks.items() for text in block]
        self._blocks.clear()
        # Who was killed could not explain itself, and others only saw it vanish.
        if self._death is not None and (self._death.by_signal or self._death.rank not in self._explained):
            what = self._death.what.format(exit_code=exit_code)
            lines.append(Line(None, f"{PREFIX}{self._ranks[self._death.rank].describe()} {what}"))
        return lines

    def _plain(self, rank: int | None, text: str) -> list[Line]:
        if rank is None:
            return [Line(None, f"mpirun: {text}")] if text.strip() else []
        match = _OWN_WORDS.fullmatch(text)
        if match is None:
            # Open MPI's abort leaves a lone NUL behind.
            return [] if text == "\0" else [Line(rank, text)]
        self._explained |= {rank} | {number for number, each in enumerate(self._ranks) if each.describe() in text}
        if match[1] in self._reasons:
            return []
        self._reasons.add(match[1])
        return [Line(None, text)]

    def _is_over(self, rank: int | None, block: list[str]) -> bool:
        # A process may print a ruler of its own: only what mpirun or its library says is held back.
        ours = rank is None or block[1].startswith("MPI_ABORT was invoked")
        return not ours or block[-1].rstrip() == RULER or len(block) > _BLOCK_LINES

    def _end_of_block(self, rank: int | None, block: list[str]) -> list[Line]:
        if rank is not None:
            return [] if block[1].startswith("MPI_ABORT was invoked") else [Line(rank, text) for text in block]
        death = _read_death(" ".join(block))
        if death is None or death.rank >= len(self._ranks):
            return [Line(None, f"mpirun: {text}") for text in block if text.strip() and text != RULER]
        self._death = self._death or death
        return []


def _read_death(text: str) -> _Death | None:
    if match := _SIGNALLED.search(text):
        alarm = int(match[2]) == START_ALARM
        waited = "waited in vain for the other processes of this mpirun to start"
        return _Death(int(match[1]), waited if alarm else f"died (signal {match[2]})", by_signal=True)
    if match := _ABORTED.search(text):
        return _Death(int(match[1]), "ended the job (exit code {exit_code})")
    if match := _EXITED.search(text):
        return _Death(int(match[1]), f"ended the job (exit code {match[2]})")
    if match := _IMPROPER.search(text):
        return _Death(int(match[1]), "ended without leaving MPI in good order")
    return None
