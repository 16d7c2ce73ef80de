"""`hybridep calibrate`: who measures when, how much is sent, what arrivals say, and one real job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.planner.calibration_file import load_calibration
from hybridep_rt.planner.link_rounds import MESSAGES, goodputs, message_bytes, rounds
from launcher.cli import main
from tests.launched import Launch, launching


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    yield from launching(tmp_path)


@given(st.integers(1, 40))
def test_every_pair_measures_once_and_no_dc_twice_at_a_time(dcs: int) -> None:
    turns = rounds(dcs)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(dcs) for b in range(a + 1, dcs)]
    for turn in turns:
        assert max(Counter(dc for pair in turn for dc in pair).values()) == 1
    assert len(turns) <= dcs


def test_links_send_what_keeps_them_busy_for_a_while_within_the_budget() -> None:
    assert message_bytes(1e6, 100e6, 2) == int(1.2e6 / MESSAGES)
    assert message_bytes(1e9, 10e6, 2) == int(5e6 / MESSAGES)
    assert message_bytes(1.0, 1.0, 2) == 4096


def test_arrivals_make_rates_of_segments_after_the_ramp() -> None:
    steady = [0.1 * number for number in range(MESSAGES)]
    assert goodputs(steady, 1000) == pytest.approx([10_000.0] * 8)
    late = [time + (0.05 if number == 10 else 0) for number, time in enumerate(steady)]
    assert goodputs(late, 1000) == pytest.approx([10_000.0] * 8, rel=0.05)
    slow_start = [5.0 + time for time in steady[:4]] + [10.0 + time for time in steady[4:]]
    assert goodputs(slow_start, 1000) == pytest.approx([10_000.0] * 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "5 kB"], "at least 1 MB"),
        (["--out", "nowhere/calibration.yaml"], "nowhere: no such folder"),
        (["--workload", "nowhere.yaml"], "nowhere.yaml: can't be read"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["calibrate", "preset:two-dc", *words])
    assert result.exit_code == 2
    assert message in result.output


def test_a_real_job_finds_the_emulated_rates(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "t.yaml").write_text(
        "cluster: calibrated\nemulate: true\ndatacenters:\n  a: {workers: 1}\n  b: {workers: 1}\nlinks:\n"
        "  a -> b: {bandwidth: 16 Mbit/s, rtt: 20 ms}\n  b -> a: {bandwidth: 8 Mbit/s, rtt: 20 ms}\n"
    )
    (tmp_path / "m.yaml").write_text("{hidden: 64, ffn: 64, experts: 4, top_k: 2, layers: 1, tokens: 64}\n")
    job = launch("calibrate", "t.yaml", "--workload", "m.yaml", "--budget", "2MB", "--out", "found.yaml")
    job.until("calibrating: written", patience_s=100)
    assert job.end() == 0
    found = load_calibration(tmp_path / "found.yaml")
    assert found.cluster == "calibrated"
    assert found.sites["b"].gemm_flops_per_s.median > 0
    there, back = found.links["a", "b"], found.links["b", "a"]
    assert there.goodput_bytes_per_s.median == pytest.approx(2e6 * 1448 / 1500, rel=0.3)
    assert back.goodput_bytes_per_s.median == pytest.approx(1e6 * 1448 / 1500, rel=0.3)
    assert there.rtt_s.low >= 0.02
