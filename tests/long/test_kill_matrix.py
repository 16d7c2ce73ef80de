"""Whoever dies or freezes, in whatever phase of training: the job ends in time, non-zero, names it, leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.kill_matrix import Case, cases, run_case

pytestmark = pytest.mark.long


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_job_ends_and_the_right_one_is_named(case: Case, tmp_path: Path) -> None:
    outcome = run_case(case, tmp_path)
    assert outcome.good, outcome
