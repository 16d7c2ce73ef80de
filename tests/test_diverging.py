"""Workers of a real job that go different ways: both places are named, nobody hangs, nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launched import START_S, Launch, launching

JOB = Path(__file__).with_name("diverging_job.py")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    yield from launching(tmp_path)


@pytest.mark.parametrize(
    ("way", "who", "mine", "theirs"),
    [
        ("ends", "1", 'worker 0 of DC "a": workers diverged: this worker is at step 2', "is at its end (after step 1"),
        ("skips", "2", "this worker is at step 3, micro-batch 0, layer 0", "is at step 2, micro-batch 1, layer 0"),
    ],
)
def test_both_places_are_named(launch: Launch, way: str, who: str, mine: str, theirs: str) -> None:
    job = launch("run", "preset:two-dc", "--plan", "ep", "--timeout", "operation=60s", "--", str(JOB), way, who)
    job.until("plan: ep", patience_s=2 * START_S)
    assert job.end(START_S) == 1
    assert any(mine in line and theirs in line for line in job.lines), job.text
    job.wait_until_gone()
