"""Published results: readable again, of a known schema, and careful with differences."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks.intervals import Floor, compare
from benchmarks.noise import publish, step_kind
from benchmarks.overhead import as_json, judge
from benchmarks.report import comparison_table, load_floor, machine, read_report, report, write_report
from benchmarks.sizes import FULL, QUICK
from benchmarks.steps import Steps

SLOWER = compare("A", [1.0, 1.1, 0.9], "B", [2.0, 2.2, 1.8])


def test_a_report_is_read_back(tmp_path):
    path = tmp_path / "new" / "r.json"
    write_report(path, report("speed", {"rounds": 3}, [{"case": 1}]))
    content = read_report(path, "speed")
    assert content["results"] == [{"case": 1}]
    assert content["machine"].keys() >= {"cpu", "cores", "memory_bytes", "kernel", "python", "torch", "load_1min"}
    assert content["date"].endswith("+00:00")


@pytest.mark.parametrize("content", ["[]", "{}", '{"benchmark": "speed", "schema": 99}'])
def test_another_schema_or_benchmark_is_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected benchmark 'speed'"):
        read_report(path, "speed")


def test_the_machine_is_described_in_json():
    assert json.loads(json.dumps(machine()))["cores"] >= 1


@pytest.mark.parametrize(("floor", "words"), [(1.5, "slower"), (2.5, "within the floor")])
def test_the_table_says_a_difference_only_beyond_the_floor(floor, words):
    console = Console(width=160)
    with console.capture() as shown:
        console.print(comparison_table("t", [("case", SLOWER, Floor(floor))]))
    assert words in shown.get()
    assert "2.000" in shown.get()


def test_floors_are_published_and_overhead_is_judged_by_them(tmp_path):
    path = tmp_path / "noise.json"
    size = QUICK[0]
    found = {
        step_kind(size.workers, "wall"): [compare("A", [1.0, 1.0], "A again", [1.2, 1.2])],
        step_kind(size.workers, "cpu"): [compare("A", [1.0, 1.0], "A again", [1.0, 1.0])],
    }
    with (quiet := Console(quiet=True)).capture():
        publish(found, True, path, quiet)
    assert load_floor("step, 2 workers, wall", path).ratio == pytest.approx(1.2)
    with pytest.raises(ValueError, match="no noise floor for 'job'"):
        load_floor("job", path)
    taken = {"plain": [1.0, 1.0, 1.0], "runtime": [1.1, 1.1, 1.1]}
    steps = Steps([3.0], taken, taken, 9.0)
    result = json.loads(json.dumps(as_json(size, steps, judge(size, steps, path))))
    assert result["wall"]["verdict"] == "within the floor"
    assert result["cpu"]["verdict"] == "slower"
    assert result["size"]["workers"] == 2


def test_sizes_split_the_experts_evenly():
    assert all(size.experts % size.workers == 0 for size in (*FULL, *QUICK))
