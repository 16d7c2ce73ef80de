"""The comparison of predictions with measurements: its cases make sense, and its summary says what the numbers say."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.prediction import draw, lag, say, summary, table
from benchmarks.prediction_cases import CASES, Case
from benchmarks.prediction_worker import Apart
from hybridep_rt.planner import routing
from hybridep_rt.transport.ports import WanPort
from topology.read import parse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_a_job(case: Case) -> None:
    topology = parse(case.topology("t"))
    assert topology.workers_per_dc == case.workers
    assert topology.emulate
    assert (topology.emulate_compute_flops_per_s is None) == (not case.compute)
    tokens = case.tokens // case.micro_batches
    drawn = routing.parse(case.routing, case.experts, case.top_k, samples=tokens)
    drawn.check(case.experts, case.top_k, len(case.workers))
    assert drawn.choices.shape[1] >= tokens
    assert case.experts % sum(case.workers) == 0


def test_cases_cover_what_was_promised() -> None:
    assert len(CASES) >= 12
    assert {len(case.workers) for case in CASES} == {2, 3, 4}
    assert {case.is_even for case in CASES} == {True, False}
    assert any(not case.compute for case in CASES)
    assert any(case.routing.startswith("zipf") for case in CASES)
    assert {"25 Mbit/s", "1 Gbit/s"} <= {case.links for case in CASES if case.is_even}


def arm(name: str, seconds: list[float], predicted_s: float, *, chosen: bool = False, simulated_s: float | None = None):
    return {
        "plan": name,
        "chosen": chosen,
        "step_s": seconds,
        "predicted_s": predicted_s,
        "sent_bytes": 100.0,
        "predicted_bytes": 101.0,
        "simulated_s": simulated_s,
    }


GOOD = {
    "case": "good",
    "arms": [arm("ep", [2.0, 2.0, 2.2], 1.8, simulated_s=2.4), arm("replicate", [1.0, 1.0, 1.1], 1.0, chosen=True)],
}
BAD = {"case": "bad", "arms": [arm("ep", [2.0, 2.0], 1.0, chosen=True), arm("replicate", [1.0, 1.0], 1.5)]}


def test_errors_are_means_over_cases_and_plans() -> None:
    found = summary([GOOD, BAD])
    assert found.time_error == pytest.approx((0.1 + 0.0 + 0.5 + 0.5) / 4)
    assert found.bytes_error == pytest.approx(0.01)
    assert found.simulator_error == pytest.approx(0.2)
    assert found.behind == {"bad": 2.0}
    assert summary([BAD]).simulator_error is None


def test_a_choice_within_what_steps_scatter_is_not_behind() -> None:
    near = {"case": "near", "arms": [arm("ep", [1.0, 1.2], 1, chosen=True), arm("replicate", [1.0, 1.0], 1)]}
    assert lag(near).low == 1.0
    assert summary([near]).behind == {}


def test_it_can_be_read_and_seen(tmp_path: Path) -> None:
    console = Console(width=150, record=True)
    console.print(table([GOOD, BAD]))
    say(console, summary([GOOD, BAD]))
    text = console.export_text()
    assert "replicate *" in text
    assert "-10.0%" in text
    assert "behind the best: bad (2.00x)" in text
    draw([GOOD, BAD], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_an_arms_port_has_all_of_a_port() -> None:
    assert {name for name in vars(WanPort) if not name.startswith("_")} <= {*vars(Apart)}
