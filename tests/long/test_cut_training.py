"""A hundred cuts in two hundred steps, and a link that freezes for five seconds without closing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.report import RESULTS, report, write_report
from tests.cutting import free_port, same_bits, train
from tests.launched import Launch, launching
from tests.proxy import Proxy

STEPS = 200
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    yield from launching(tmp_path)


@pytest.mark.parametrize("plan", ["ep", "domains:2"])
def test_cuts_and_a_stall(launch: Launch, tmp_path: Path, plan: str) -> None:
    with (
        Proxy(free_port()) as calm,
        Proxy(free_port(), cut_after_bytes=150_000, cuts=100) as rough,
        Proxy(free_port()) as stalled,
    ):
        train(launch, tmp_path, "calm", plan, STEPS, calm)
        train(launch, tmp_path, "rough", plan, STEPS, rough)
        train(launch, tmp_path, "stalled", plan, STEPS, stalled, stall_s=5.0)
        cuts = rough.cuts
    assert cuts >= 90
    same_bits(tmp_path, "calm", "rough")
    same_bits(tmp_path, "calm", "stalled")
    path = RESULTS / "cuts.json"
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    results = [each for each in earlier if each["plan"] != plan]
    results.append({"plan": plan, "steps": STEPS, "cuts": cuts, "stall_s": 5.0, "same_bits": True})
    write_report(path, report("cuts", {}, results))
