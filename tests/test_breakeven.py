"""The Monte Carlo of WAN bytes against published break-even points, by hand, and for independence."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.breakeven import CODECS, Codec, Crossings, Model, count, foreign_domains, main, models

COMPACT, RAW = CODECS[0], CODECS[3]
MIDDLE = CODECS[2]


def crossings(name: str, dcs: int, routing: str = "uniform") -> Crossings:
    return next(result for result in count(models()[name], routing, samples=6000, seed=7) if result.dcs == dcs)


@pytest.mark.parametrize(
    ("name", "dcs", "q", "compact", "middle", "raw"),
    [
        ("mixtral-8x7b", 2, 0.79, 33e3, 30e3, 109e3),
        ("mixtral-8x7b", 8, 0.25, 26e3, 24e3, 86e3),
        ("qwen3-30b-a3b", 4, 0.91, 12e3, 11e3, 41e3),
        ("olmoe-7b", 8, 0.68, 6e3, 5e3, 18e3),
        ("deepseek-v3", 4, 0.90, 66e3, 60e3, 217e3),
    ],
)
def test_break_even_points_of_open_models(
    name: str, dcs: int, q: float, compact: float, middle: float, raw: float
) -> None:
    result = crossings(name, dcs)
    error = 4 * result.error[1] / (dcs - 1)
    assert result.q == pytest.approx(q, abs=0.005 + error)
    for codec, tokens in ((COMPACT, compact), (MIDDLE, middle), (RAW, raw)):
        assert result.break_even(codec) == pytest.approx(tokens, abs=501 + tokens * error / q)


def test_uneven_popularity_changes_little() -> None:
    uniform, zipf = crossings("mixtral-8x7b", 4), crossings("mixtral-8x7b", 4, "zipf")
    assert zipf.q == pytest.approx(uniform.q, rel=0.12)
    assert zipf.q != uniform.q


def test_foreign_domains_by_brute_force() -> None:
    chosen = np.array([pair for pair in combinations(range(8), 2) for _ in range(4)])
    for size in (1, 2, 4):
        found = foreign_domains(chosen, 8, 4, size)
        for token, pair in enumerate(chosen):
            needed = {int(expert) // 2 // size for expert in pair} - {token % 4 // size}
            assert found[token] == len(needed)


def test_bytes_by_hand() -> None:
    model = Model("m", "by hand", hidden=10, ffn=5, experts=8, top_k=2, layers=1, matrices=2)
    result = Crossings(model, 4, "uniform", mean={1: 1.5, 2: 0.75, 4: 0.0}, error={})
    assert result.uplink_bytes(100, Codec("c", 2.0, 0.5)) == {
        "plain EP": 4 * 100 * 1.5 * 20,
        "domains of 2": 4 * 100 * 0.75 * 20 + 2 * 1 * 100 * 0.5,
        "replicate": 2 * 3 * 100 * 0.5,
        "DP": 2 * 3 / 4 * 8 * 100 * 2,
    }


def test_every_workload_says_where_its_numbers_come_from() -> None:
    assert len(models()) == 8
    for model in models().values():
        assert model.source
        assert model.experts % 8 == 0
    small = [model for model in models().values() if model.experts == 32]
    assert {512 <= model.hidden <= 1024 and 2.0e6 < model.parameters < 8.5e6 for model in small} == {True}


def test_the_command_writes_json_and_map(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "b.json", tmp_path / "b.png"
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(main, ["--samples", "64", "--json", str(numbers), "--png", str(picture)])
    assert result.exit_code == 0, result.output
    assert len(json.loads(numbers.read_text())["results"]) == 8 * 2 * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_witness_does_not_know_the_planner() -> None:
    code = "import sys; import benchmarks.breakeven; print([m for m in sys.modules if m.startswith('hybridep_rt')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
