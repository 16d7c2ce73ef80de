"""The codec rung joins the search: what each costs in bytes and memory, and which one is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hybridep_rt.codecs.ladder import parse_rung, rung
from hybridep_rt.planner.calibration import Calibration, CodecFigures, Figure, LinkFigures, SiteFigures
from hybridep_rt.planner.calibration_file import dump_calibration
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.routing import uniform
from hybridep_rt.planner.search import copy_bytes
from hybridep_rt.planner.site_plan import canonical_spread, consecutive, domain, plain
from launcher.cli import main
from launcher.plan_rungs import search_rungs, with_rung
from topology.read import parse

SHAPE = LayerShape(128, 128, 8, 2, 2 * 128 * 128)
WORK = Workload((SHAPE,) * 2, 20_000.0)
TEXT = (
    "cluster: t\nlevels:\n  - {name: dc, count: 2, bandwidth: 100 Mbit/s, latency: 20 ms}\n"
    "  - {name: gpu, count: 2, bandwidth: 1 GB/s}\n"
)
JOB = Job(parse(TEXT), WORK, (uniform(8, 2, samples=256),), Compute(1e13))


def test_a_rung_is_its_bytes_and_what_it_remembers() -> None:
    exact, safe, default = (with_rung(WORK, rung(name)) for name in ("exact", "safe", "default"))
    assert (exact.token_bytes, exact.weight_bytes, exact.copy_bytes, exact.home_bytes) == (4.0, 4.0, 8.0, 0.0)
    assert (safe.token_bytes, safe.copy_bytes, safe.home_bytes, safe.subscriber_bytes) == (2.0, 20.0, 8.0, 4.0)
    assert (default.copy_bytes, default.home_bytes, default.subscriber_bytes) == (20.0, 8.0, 4.0)
    light = parse_rung("weights=delta-1bit,gradients=1bit")
    assert with_rung(WORK, light).home_bytes == 4.0
    warmed = replace(light, warm_up_steps=9, warm_up=rung("safe").codecs)
    assert with_rung(WORK, warmed).home_bytes == 8.0
    assert default.weight_bytes < safe.weight_bytes < 0.5


def test_memory_counts_copies_and_what_homes_remember() -> None:
    work = replace(WORK, layers=(SHAPE,), copy_bytes=10.0, home_bytes=4.0, subscriber_bytes=1.0)
    job = Job(JOB.topology, work, JOB.routing)
    spread = canonical_spread(Layout((2, 2)), 8)
    assert copy_bytes(job, (plain(spread),)) == 0
    everything = domain(spread, consecutive(2, 2))
    assert np.all(everything.copies == 2)
    assert copy_bytes(job, (everything,)) == 2 * SHAPE.parameters_per_expert * (10 + 4 + 1)


def test_the_fastest_rung_is_taken_and_the_faithful_one_of_equals() -> None:
    name, coded, found, tried = search_rungs(JOB, "safe,exact,default", None, None)
    assert list(tried) == ["exact", "safe", "default"]
    assert found.choice.step_s == min(tried.values()) == tried[name]
    assert coded.work.weight_bytes == with_rung(WORK, rung(name)).weight_bytes
    few = replace(JOB, work=replace(WORK, tokens_per_worker_per_step=0.0))
    assert search_rungs(few, "safe,exact", None, None)[0] == "exact"


def test_slow_codecs_lose(tmp_path: Path) -> None:
    slow = CodecFigures(Figure(1e-5, 1e-5, 1e-5), Figure(1e-5, 1e-5, 1e-5))
    found = Calibration("t", "2026-11-29T00:00:00", "", codecs={"tokens=bf16": slow})
    assert search_rungs(JOB, "safe,exact", None, None)[0] == "safe"
    assert search_rungs(JOB, "safe,exact", found, 0.0)[0] == "exact"


def test_plan_with_a_calibration_and_rungs(tmp_path: Path) -> None:
    def exactly(value: float) -> Figure:
        return Figure(value, value, value)

    (tmp_path / "t.yaml").write_text(TEXT)
    (tmp_path / "m.yaml").write_text("{hidden: 128, ffn: 128, experts: 8, top_k: 2, layers: 2, tokens: 4096}\n")
    figures = (1e9, 2.0, 1e-4, 2e-4, 1e-6, 1e-3, 1e-9, 1e9)
    site = SiteFigures(*map(exactly, figures))
    links = {pair: LinkFigures(exactly(1e5), exactly(0.1)) for pair in (("a", "b"), ("b", "a"))}
    found = Calibration("t", "2026-11-29T00:00:00", "", {"a": site, "b": site}, links)
    (tmp_path / "c.yaml").write_text(dump_calibration(found))

    def planned(*words: str) -> dict[str, float]:
        paths = [str(tmp_path / "t.yaml"), "--workload", str(tmp_path / "m.yaml"), "--json"]
        result = CliRunner().invoke(main, ["plan", *paths, *words])
        assert result.exit_code == 0, result.output
        answer: dict[str, float] = json.loads(result.output)
        return answer

    calibrated = ["--calibration", str(tmp_path / "c.yaml")]
    assert planned(*calibrated)["step_s"] > planned()["step_s"] * 2
    coded = planned(*calibrated, "--codecs", "default,exact")
    assert coded["codecs_s"].keys() == {"exact", "default"}
    assert coded["workload"] == "the model, codec default"


def test_an_unknown_rung_is_refused() -> None:
    model = "benchmarks/workloads/paper_kind.yaml:llama-tiny"
    words = ["plan", "preset:two-dc", "--workload", model, "--tokens", "64", "--codecs", "tiny"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert 'no rung "tiny"' in result.output


@pytest.mark.parametrize("name", ["home_bytes", "subscriber_bytes"])
def test_memory_is_not_negative(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(WORK, **{name: -1.0})
