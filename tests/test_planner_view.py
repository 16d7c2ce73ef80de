"""`hybridep plan`: tables for people, JSON for programs, errors with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.plan_file import from_file
from launcher.plan_view import plan

MODEL = ["--hidden", "512", "--ffn", "1024", "--experts", "8", "--top-k", "2", "--layers", "2"]


def view(*arguments: str) -> Result:
    return CliRunner().invoke(plan, [*arguments, *MODEL])


def test_the_table_names_every_candidate_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    result = view("preset:two-dc", "--tokens", "64")
    assert result.exit_code == 0
    for part in ("ep *", "domains:2", "replicate", "a -> b", "no expert should cross the WAN"):
        assert part in result.output


def test_json_has_the_terms() -> None:
    result = view("preset:two-dc", "--tokens", "8000", "--weight-bytes", "0.2", "--gradient-bytes", "0.2", "--json")
    report = json.loads(result.output)
    assert report["choice"] == "replicate"
    assert report["break_even_tokens_per_worker"] > 0
    assert [c["plan"] for c in report["candidates"]] == ["ep", "domains:1,2", "domains:2", "replicate"]
    assert report["plan"]["links"][0]["weights_bytes"] == pytest.approx(2 * 4 * 3 * 512 * 1024 * 0.2)


def test_a_plan_can_be_written_and_asked_for_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    assert view("preset:two-dc", "--tokens", "64", "--plan", "domains:2", "--output", path).exit_code == 0
    assert len(from_file(path, Layout((2, 2))).layers) == 2
    report = json.loads(view("preset:two-dc", "--tokens", "64", "--plan", path, "--json").output)
    assert report["choice"] == "ep"
    assert report["plan"]["weights_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["preset:nowhere", "--tokens", "1"], "no preset 'nowhere'"),
        (["preset:two-dc", "--tokens", "1", "--plan", "most"], "allowed: auto, ep, replicate"),
        (["preset:two-dc", "--tokens", "1", "--plan", "domains:3"], "domain size 3 is not possible"),
        (["preset:two-dc", "--tokens", "1", "--plan", "missing.yaml"], "can't be read"),
        (["preset:two-dc", "--tokens", "0"], "--tokens"),
    ],
)
def test_errors_end_with_code_2_and_say_what_is_allowed(arguments: list[str], says: str) -> None:
    result = view(*arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_planning_loads_neither_torch_nor_mpi() -> None:
    code = "import sys; from examples import plan_only; plan_only.main(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "replicate" in result.stdout or "domains:2" in result.stdout
    assert not {"torch", "mpi4py"} & set(result.stdout.split())
