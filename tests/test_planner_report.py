"""`hybridep plan --workload`: what it prints and writes, files of models, and what would change the answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hybridep_rt.errors import PlanError
from hybridep_rt.planner import paper, routing
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.paper_levels import paper_layers, paper_plans
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.plan_file import from_file
from hybridep_rt.planner.workload_file import load_model
from launcher.plan_view import plan
from topology.presets import preset

MODEL = """
title: small
hidden: 256
ffn: 512
experts: 8
top_k: 2
layers: 4
tokens: 4096
weight_bytes: 0.5
gradient_bytes: 0.5
flops_per_s: 10 TFLOP/s
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    return str(path)


def view(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments)


def test_people_read_the_split_the_runners_up_and_what_would_change_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    result = view("preset:two-dc", "--workload", model)
    assert result.exit_code == 0, result.output
    for part in ("gradients", "others", "why it lost", "chosen", "waits", "Bottleneck: link", "answer"):
        assert part in result.output


def test_programs_read_json(model: str) -> None:
    report = json.loads(view("preset:three-uneven", "--workload", model, "--tokens", "100", "--json").output)
    assert report["step_s"] <= min(candidate["step_s"] for candidate in report["candidates"])
    for split in report["parts_s"].values():
        assert sum(split.values()) == pytest.approx(report["step_s"])
    assert sum(report["critical_s"].values()) == pytest.approx(report["step_s"])


def test_a_rung_s_bytes_are_counted(model: str, tmp_path: Path) -> None:
    """From the command line or the topology; sizes that are given go before."""
    arguments = ("--workload", model, "--plan", "replicate", "--json")
    raw = json.loads(view("preset:two-dc", *arguments).output)
    coded = json.loads(view("preset:two-dc", *arguments, "--codec", "lean").output)
    assert coded["parts_s"]["a"]["experts"] < raw["parts_s"]["a"]["experts"]
    text = "cluster: c\nlevels:\n  - {name: dc, count: 2, bandwidth: 1 Gbit/s, latency: 1 ms}\ncodec: lean\n"
    (tmp_path / "site.yaml").write_text(text)
    (tmp_path / "bare.yaml").write_text(text.replace("codec: lean\n", ""))
    said = view(str(tmp_path / "site.yaml"), *arguments).output
    assert json.loads(said) == json.loads(view(str(tmp_path / "bare.yaml"), *arguments, "--codec", "lean").output)
    assert said != view(str(tmp_path / "site.yaml"), *arguments, "--weight-bytes", "3").output
    assert "choose one of exact, safe" in view("preset:two-dc", *arguments, "--codec", "fast").output


def test_the_answer_changes_where_it_is_said_to(model: str) -> None:
    """At half the tokens from which another plan is said to be faster, that plan is, and not at twice as many."""

    def seconds(tokens: float, name: str) -> float:
        numbers = ["--tokens", str(round(tokens)), "--plan", name, "--json"]
        return float(json.loads(view("preset:two-dc", "--workload", model, *numbers).output)["step_s"])

    report = json.loads(view("preset:two-dc", "--workload", model, "--json").output)
    switch = next(each for each in report["switches"] if each["what"] == "tokens" and each["factor"] < 1)
    before, after = report["choice"], switch["plan"]
    assert seconds(4096 * switch["factor"] / 2, after) < seconds(4096 * switch["factor"] / 2, before)
    assert seconds(4096 * switch["factor"] * 2, after) > seconds(4096 * switch["factor"] * 2, before)


def test_the_plan_can_be_written_and_asked_for_again(model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    first = view("preset:two-dc", "--workload", model, "--output", path, "--json")
    assert len(from_file(path, Layout((2, 2))).layers) == 4
    again = json.loads(view("preset:two-dc", "--workload", model, "--plan", path, "--json").output)
    assert again["step_s"] == pytest.approx(json.loads(first.output)["step_s"])
    assert "as asked for" in again["reason"]
    slower = json.loads(view("preset:two-dc", "--workload", model, "--plan", "ep", "--json").output)
    assert slower["step_s"] > again["step_s"]


def test_a_plot_is_drawn(model: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert view("preset:two-dc", "--workload", model, "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_papers_model_alone(model: str) -> None:
    report = json.loads(view("preset:three-level", "--workload", model, "--model", "paper", "--json").output)
    assert report["model"] == "paper"
    assert len(report["candidates"]) == 2 * 2 * 3
    assert report["candidates"][0]["layer_s"] == min(candidate["layer_s"] for candidate in report["candidates"])
    assert "one all-to-all" in view("preset:three-level", "--workload", model, "--model", "paper").output


@pytest.mark.parametrize("pre_expert_s", [0.0, 0.01, 0.1, 1.0])
def test_at_one_level_the_enumeration_is_the_closed_form(pre_expert_s: float) -> None:
    topology = preset("four-dc-10g")
    work = Workload((LayerShape(256, 512, 8, 2, 10**6),), 1000.0, pre_expert_s=pre_expert_s)
    job = Job(topology, work, (routing.uniform(8, 2),), Compute())
    level = paper_layers(job)[0]
    outer = [each for each in paper_plans(job) if each.sizes[1] == 8]
    for each in outer:
        within = each.all_to_all_s - paper.a2a_bytes(level, paper.p_of_size(each.sizes[0], 4)) / 1.25e9
        assert within == pytest.approx(0, abs=1e-12)
    best = min(outer, key=lambda each: each.layer_s)
    assert best.layer_s == pytest.approx(paper.layer_s(level, paper.p_of_size(paper.best_size(level), 4)), rel=0.05)


def test_models_by_name_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    entry = "hidden: 8\n  ffn: 16\n  experts: 4\n  top_k: 2\n  layers: 3\n"
    path.write_text(f"one:\n  {entry}two:\n  {entry}  matrices: 2\n")
    assert load_model(f"{path}:two").shape.parameters_per_expert == 2 * 8 * 16
    assert load_model(f"{path}:one").shape.parameters_per_expert == 3 * 8 * 16
    for text, says in (
        (f"{path}", "which model"),
        (f"{path}:three", "which model"),
        (f"{path}.missing", "can't be read"),
    ):
        with pytest.raises(PlanError, match=says):
            load_model(text)
    for line, says in (
        ("hidden: 0", "whole number from 1"),
        ("hiden: 8", "did you mean 'hidden'"),
        ("weight_bytes: much", "a number from 0"),
        ("weight_bytes: nan", "a number from 0"),
        ("flops_per_s: 3", "without a unit"),
    ):
        path.write_text(
            f"ffn: 16\nexperts: 4\ntop_k: 2\nlayers: 3\n{line}\n" + ("hidden: 8\n" if "dd" not in line else "")
        )
        with pytest.raises(PlanError, match=says):
            load_model(str(path))


def test_every_published_workload_can_be_read() -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "workloads"
    for file, name in (("public", "deepseek-v3"), ("public", "mixtral-8x7b"), ("paper_kind", "gpt-large")):
        assert load_model(f"{folder / file}.yaml:{name}").layers > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "MODEL", "--routing", "zipf:x"], "allowed: zipf:EXPONENT"),
        (["--workload", "MODEL", "--routing", "missing.npy"], "can't be read"),
        (["--workload", "MODEL", "--plan", "domains:3"], "domain size 3 is not possible"),
        (["--workload", "missing.yaml"], "can't be read"),
        (["--tokens", "8"], "Missing option '--hidden'"),
    ],
)
def test_errors_end_with_code_2(arguments: list[str], says: str, model: str) -> None:
    result = view("preset:two-dc", *(model if argument == "MODEL" else argument for argument in arguments))
    assert result.exit_code == 2
    assert says in result.output


def test_routing_samples_from_files(tmp_path: Path) -> None:
    chosen = np.array([[0, 1], [2, 3], [0, 3]])
    np.save(tmp_path / "a.npy", chosen)
    np.savetxt(tmp_path / "b.txt", chosen, fmt="%d")
    np.savetxt(tmp_path / "c.csv", chosen, fmt="%d", delimiter=",")
    for name in ("a.npy", "b.txt", "c.csv"):
        assert routing.read(tmp_path / name).of(0).tolist() == chosen.tolist()
    (tmp_path / "d.txt").write_text("0 0\n1 2\n")
    with pytest.raises(PlanError, match="distinct"):
        routing.read(tmp_path / "d.txt")
    (tmp_path / "e.npy").write_bytes(b"\x93NUMPY garbage")
    with pytest.raises(PlanError, match=r"e\.npy: no routing samples"):
        routing.read(tmp_path / "e.npy")


def test_drawn_routing_is_distinct_and_as_skewed_as_asked() -> None:
    even = np.bincount(routing.uniform(16, 4).of(0).ravel())
    assert even.max() == even.min()
    skewed = np.bincount(routing.zipf(16, 1, 2.0, samples=4096).of(0).ravel(), minlength=16)
    assert skewed.max() / skewed.sum() == pytest.approx(1 / sum(n**-2.0 for n in range(1, 17)), rel=0.1)
    assert routing.zipf(4, 4, 1.0).choices.shape == (1, 2048, 4)
