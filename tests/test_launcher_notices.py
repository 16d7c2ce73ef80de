"""mpirun's tagged output becomes lines that name DC and role; its own long notices become one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.command import Rank
from launcher.notices import RULER, Line, Notices

RANKS = (Rank("a", None), Rank("a", 0), Rank("b", None), Rank("b", 0), Rank("b", 1))
KILLED = [
    RULER,
    "prterun noticed that process rank 4 with PID 4188 on node vm exited on",
    "signal 9 (Killed).",
    RULER,
]
ABORTED = [
    RULER,
    "prterun has exited due to process rank 4 with PID 0 on node vm calling",
    '"abort". This may have caused other processes in the application to be',
    "terminated by signals sent by prterun (as reported here).",
    RULER,
]
EXITED = [
    RULER,
    "prterun detected that one or more processes exited with non-zero status,",
    "thus causing the job to be terminated. The first process to do so was:",
    "",
    "   Process name: [prterun-vm-4837@1,4]",
    "   Exit code:    3",
    RULER,
]
ABORT_WORDS = [
    RULER,
    "MPI_ABORT was invoked on rank 4 in communicator MPI_COMM_WORLD",
    "  Errorcode: 7",
    "",
    RULER,
    "\0",
]


def show(lines: list[str], exit_code: int = 1) -> list[Line]:
    notices = Notices(RANKS)
    return [shown for line in lines for shown in notices.feed(line)] + notices.finish(exit_code)


def tagged(rank: int, lines: list[str]) -> list[str]:
    return [f"[1,{rank}]<stderr>: {line}" for line in lines]


@given(
    st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"])).filter(lambda s: "hybridep" not in s)
)
def test_a_line_of_a_process_keeps_its_text(text: str) -> None:
    assert show([f"[1,3]<stdout>: {text}"]) == [Line(3, text.rstrip("\r"))]


@pytest.mark.parametrize(
    ("notice", "said"),
    [
        (KILLED, "died (signal 9)"),
        (ABORTED, "ended the job (exit code 7)"),
        (EXITED, "ended the job (exit code 3)"),
        (
            [
                RULER,
                "prterun noticed that process rank 4 with PID 1 on node vm exited on",
                "signal 14 (Alarm clock).",
                RULER,
            ],
            "waited in vain for the other processes of this mpirun to start",
        ),
    ],
)
def test_a_death_is_one_line_at_the_end(notice: list[str], said: str) -> None:
    assert show([*notice, *tagged(4, ABORT_WORDS)], exit_code=7) == [Line(None, f'hybridep: worker 1 of DC "b" {said}')]


def test_who_spoke_itself_is_not_spoken_for() -> None:
    own = 'hybridep: worker 1 of DC "b": no such plan'
    assert show([*ABORTED, *tagged(4, [own])]) == [Line(None, own)]


def test_one_reason_is_told_once() -> None:
    lines = [f'[1,{rank}]<stderr>: hybridep: worker {rank - 3} of DC "b": no such plan' for rank in (3, 4)]
    lines.append('[1,0]<stderr>: hybridep: coordinator of DC "a": worker 1 of DC "b": no such plan')
    assert show(lines) == [Line(None, 'hybridep: worker 0 of DC "b": no such plan')]


def test_a_process_may_print_rulers() -> None:
    table = [RULER, "a table", RULER]
    assert show(tagged(1, table)) == [Line(1, text) for text in table]


def test_unknown_notices_of_mpirun_are_shown() -> None:
    assert show([RULER, "There are not enough slots", "", RULER]) == [Line(None, "mpirun: There are not enough slots")]


@given(
    st.lists(st.sampled_from([*KILLED, *ABORTED, *EXITED, *ABORT_WORDS, *tagged(9, KILLED), *tagged(4, ABORT_WORDS)]))
)
def test_no_order_of_lines_breaks_it(lines: list[str]) -> None:
    show(lines)
