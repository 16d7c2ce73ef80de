"""The simulation: fair shares, its agreement with the planner's model, its plans, sweeps and figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner import predict
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.site_plan import consecutive, domain
from hybridep_rt.simulate.fair import FairNetwork, fluid_s, max_min_rates, queued_s
from hybridep_rt.simulate.paper_figures import PaperModel, messages, speedups, traffic
from hybridep_rt.simulate.scenario import CODECS, Scenario, simulate
from hybridep_rt.simulate.sweep import SWEEPS, default_values, sweep
from launcher.simulate import simulate as command

SHAPE = LayerShape(hidden=256, ffn=512, num_experts=16, top_k=2, parameters_per_expert=3 * 256 * 512)
SMALL = Scenario(SHAPE, 6, 8, 2, 12.5e6, 0.02, 1000.0, CODECS[3], Compute(1e12, dense_parameters=1e5), samples=256)


@st.composite
def networks(draw: st.DrawFn) -> FairNetwork:
    dcs = draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    bandwidth = np.exp(rng.normal(size=(dcs, dcs)))
    np.fill_diagonal(bandwidth, np.inf)
    limits = np.exp(rng.normal(size=(2, dcs)) + 1)
    limits[rng.random((2, dcs)) < draw(st.floats(0, 1))] = np.inf
    return FairNetwork(bandwidth, np.zeros((dcs, dcs)), *limits)


def volumes(network: FairNetwork, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(size=network.bandwidth.shape)) * (rng.random(network.bandwidth.shape) < 0.7)
    np.fill_diagonal(drawn, 0.0)
    return drawn


@given(networks(), st.integers(0, 1000))
def test_rates_are_max_min_fair(network: FairNetwork, seed: int) -> None:
    active = volumes(network, seed) > 0
    rates = max_min_rates(network, active)
    used_up, used_down = rates.sum(1), rates.sum(0)
    assert (used_up <= network.uplink * (1 + 1e-9)).all()
    assert (used_down <= network.downlink * (1 + 1e-9)).all()
    for source, target in np.argwhere(active):
        rate = rates[source, target]
        full_link = rate >= network.bandwidth[source, target] * (1 - 1e-9)
        top_up = used_up[source] >= network.uplink[source] * (1 - 1e-9) and rate >= rates[source].max() * (1 - 1e-9)
        top_down = used_down[target] >= network.downlink[target] * (1 - 1e-9) and rate >= rates[:, target].max() * (
            1 - 1e-9
        )
        assert full_link or top_up or top_down


@given(networks(), st.integers(0, 1000))
def test_fluid_times_lie_between_their_bounds(network: FairNetwork, seed: int) -> None:
    sent = volumes(network, seed)
    times = fluid_s(network, sent)
    assert (times[sent > 0] > 0).all()
    assert (times[sent == 0] == 0).all()
    assert (times.max(1) >= sent.sum(1) / network.uplink * (1 - 1e-9)).all()
    assert (times.max(0) >= sent.sum(0) / network.downlink * (1 - 1e-9)).all()
    assert (times >= sent / network.bandwidth * (1 - 1e-9)).all()
    total_s = sent.sum() / min(network.bandwidth.min(), network.uplink.min(), network.downlink.min())
    assert times.max() <= total_s * (1 + 1e-9)


@given(st.integers(2, 6), st.integers(0, 1000))
def test_behind_uplinks_alone_queues_are_exact(dcs: int, seed: int) -> None:
    free = np.full((dcs, dcs), np.inf)
    network = FairNetwork(free, np.zeros((dcs, dcs)), np.full(dcs, 3.0), np.full(dcs, np.inf))
    sent = volumes(network, seed)
    assert fluid_s(network, sent) == pytest.approx(queued_s(network, sent))
    assert network.wire_s(sent[None])[0] == pytest.approx(fluid_s(network, sent))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([10.0, 1000.0]), st.floats(0, 0.5))
def test_equal_to_the_planner_where_all_dcs_are_alike(dcs: int, tokens: float, zipf: float) -> None:
    scenario = replace(SMALL, dcs=dcs, tokens=tokens, zipf=zipf)
    job = scenario.job
    members = consecutive(dcs, 2)
    plan = [domain(scenario.spread, members)] * 6
    planned = Predictor(Job(job.topology, job.work, job.routing, job.compute)).predict([plan]).step_s[0]
    assert simulate(scenario, "domains:2").step_s == pytest.approx(planned, rel=0.05 if zipf else 1e-3)


@pytest.mark.parametrize("plan", ["ep", "domains:2", "replicate"])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_a_few_layers_stand_for_many(plan: str, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = replace(SMALL, layers=24, rate_spread=spread, rtt_spread=spread)
    whole = simulate(scenario, plan)
    monkeypatch.setattr(predict, "_FEW_DCS", 1)
    short = simulate(scenario, plan)
    assert short.step_s == pytest.approx(whole.step_s, rel=0.05 if spread else 1e-6)
    assert short.uplink_bytes == pytest.approx(whole.uplink_bytes)


def test_shares_of_copies_lie_between_plain_ep_and_replication() -> None:
    uplinks = [simulate(SMALL, f"p:{p}").uplink_bytes for p in (1, 0.75, 0.5, 0.25, 0)]
    for share, plan in ((0, "ep"), (-1, "replicate")):
        assert uplinks[share] == pytest.approx(simulate(SMALL, plan).uplink_bytes)
    assert len(set(uplinks)) == 5


def test_data_parallelism_sends_gradients_only() -> None:
    result = simulate(SMALL, "dp")
    assert result.parts_s["tokens"] == result.parts_s["experts"] == result.parts_s["gradients"] == 0
    shared = 6 * 16 * SHAPE.parameters_per_expert * 2.0 + 1e5 * 4.0
    assert result.uplink_bytes == pytest.approx(2 * 7 / 8 * shared)


@pytest.mark.parametrize("what", SWEEPS)
def test_every_sweep_runs(what: str) -> None:
    values = default_values(SMALL, what)
    points = sweep(SMALL, what, values[:2], ["ep"])
    assert [point.value for point in points] == values[:2]
    assert all(point.results[0].step_s > 0 for point in points)


def test_more_bandwidth_is_faster_and_spread_is_slower() -> None:
    steps = [point.results[0].step_s for point in sweep(SMALL, "bandwidth", ["50 Mbit/s", "1 Gbit/s"], ["ep"])]
    assert steps[1] < steps[0]
    assert simulate(replace(SMALL, rate_spread=0.5), "ep").step_s > simulate(SMALL, "ep").step_s


def test_nonsense_is_refused() -> None:
    for plan in ("domains:3", "domains:x", "p:2", "most", "domains:0"):
        with pytest.raises(PlanError, match="allowed: ep, domains:S"):
            simulate(SMALL, plan)
    with pytest.raises(PlanError, match="tokens can't be 'x'"):
        sweep(SMALL, "tokens", ["x"], ["ep"])
    with pytest.raises(PlanError, match="bandwidth above 0"):
        replace(SMALL, bandwidth=0.0)
    with pytest.raises(PlanError, match="spreads from 0"):
        replace(SMALL, rate_spread=-1.0)


def test_the_papers_figures_by_hand() -> None:
    few = {row.size: row for row in messages(32)}
    assert (few[1].all_gather, few[1].all_to_all) == (0, 32 * 31)
    assert (few[4].all_gather, few[4].all_to_all) == (32 * 3, 32 * 7)
    assert (few[32].all_gather, few[32].all_to_all) == (32 * 31, 0)
    whole = [row for row in traffic(PaperModel(), 8, [256, 4096]) if row.size == 8]
    assert whole[0].hybrid_bytes == whole[1].hybrid_bytes
    assert whole[1].plain_bytes == 16 * whole[0].plain_bytes
    cheap = PaperModel(experts=32, compression=1e9, pre_expert_s=0.0)
    ratios = {(row.kind, row.value): row.ratio for row in speedups(cheap, [1000], [1e8], [250], [0.5])}
    assert ratios["p", 0.5] == pytest.approx(2, rel=1e-3)
    assert ratios["S", 250] == pytest.approx(999 / 750, rel=1e-3)


def view(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_the_command_prints_tables_json_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "plot.png"
    shown = view("--dcs", "4", "--plot", str(path))
    assert shown.exit_code == 0, shown.output
    assert "replicate" in shown.output
    assert path.read_bytes().startswith(b"\x89PNG")
    swept = view("--dcs", "4", "--sweep", "tokens", "--values", "100,1000", "--plan", "ep", "--plan", "dp", "--json")
    content = json.loads(swept.stdout)
    assert [point["value"] for point in content["points"]] == ["100", "1000"]
    assert [result["plan"] for result in content["points"][0]["results"]] == ["ep", "dp"]


@pytest.mark.parametrize("figure", ["16", "17", "messages"])
def test_the_command_draws_the_papers_figures(figure: str, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    shown = view("--dcs", "8", "--figure", figure, "--plot", str(path), "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["figure"] == figure
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bandwidth", "fast"], "allowed: a number with a unit"),
        (["--dcs", "4", "--plan", "domains:3"], "where S divides 4"),
        (["--dcs", "4", "--sweep", "codec", "--values", "zip"], "codec can't be 'zip'"),
        (["--workload", "missing.yaml"], "can't be read"),
    ],
)
def test_errors_end_with_code_2(arguments: list[str], says: str) -> None:
    result = view(*arguments)
    assert result.exit_code == 2
    assert says in result.output
