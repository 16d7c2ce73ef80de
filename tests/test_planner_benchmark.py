"""The planner's benchmark: its cases run and say what they found."""

from __future__ import annotations

import pytest

from benchmarks.planner import TASKS, run_case, table


@pytest.mark.parametrize("task", TASKS[1:])
def test_every_case_runs(task: str) -> None:
    result = run_case(task, 2)
    assert result["seconds"] > 0
    assert result["cpu_s"] > 0
    assert result["found"]
    assert result["peak_bytes"] > 1e6
    shown = result | {"task": task, "dcs": 2, "least_s": 0.0, "most_s": 0.0}
    assert table([shown]).row_count == 1
