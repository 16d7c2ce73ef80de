"""The examples run alone, in seconds, and the data that they train on is what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from examples import demo, text_report, train_text
from examples.text_data import Text, held_out_batches, load_text, training_batch
from examples.text_shapes import SHAPES
from hybridep_rt.errors import ConfigError, RemoteProtocolError
from hybridep_rt.metrics import Snapshot
from hybridep_rt.planner.auto import decide
from hybridep_rt.planner.plan import Layout
from hybridep_rt.runtime import start
from topology import load

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["embed.py", "mailbox.py", "plan_only.py"]


@pytest.fixture
def alone(monkeypatch):
    """A process in which `init` has not been called, nor will have been."""
    monkeypatch.setattr(start, "_current", None)
    monkeypatch.setattr(start.atexit, "register", lambda *_: None)
    monkeypatch.delenv("HYBRIDEP_DC", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDEP_")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def text_of(content: bytes) -> Text:
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(values, values, "a test", "0" * 16)


@pytest.mark.parametrize("name", SHORT)
def test_short_examples_stay_short(name):
    assert len((ROOT / "examples" / name).read_text("utf-8").splitlines()) < 60


def test_embed_learns(alone, capsys):
    from examples import embed

    embed.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_mailbox_talks_to_itself(alone, capsys):
    from examples import mailbox

    mailbox.main()
    said = capsys.readouterr().out
    assert "greetings from worker 0" in said
    assert "squares [0]" in said
    assert "nothing from worker 0" in said


def test_plan_only_runs_without_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['mpi4py'] = None; import examples.plan_only as p; p.main()"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "tokens per worker" in done.stdout


def test_train_text_as_a_script_writes_json(tmp_path):
    file = tmp_path / "run.json"
    options = ["--steps", "3", "--batch", "8", "--sequence", "16", "--accumulate", "2", "--clip", "1"]
    done = run("examples/train_text.py", *options, "--eval-every", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "step 3/3: loss" in done.stdout
    assert "plan: " in done.stdout
    content = json.loads(file.read_text("utf-8"))
    losses = [step["loss"] for step in content["steps"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert [at["step"] for at in content["held_out"]] == [2, 3]
    assert content["shape"]["name"] == "demo"
    assert content["workers_per_dc"] == {"a": 1}
    assert {"plan", "machine", "date", "waits", "text", "codecs", "options"} <= set(content)


def test_a_missing_text_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        train_text.main(["--text", str(tmp_path / "missing")])


def test_a_file_that_cannot_be_written_is_found_before_the_training(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        train_text.main(["--json", str(tmp_path / "missing" / "run.json")])


def test_a_text_that_is_too_short_is_one_clear_error():
    with pytest.raises(ConfigError, match="too short"):
        training_batch(text_of(b"short"), 1, 8, seed=0, step=1, micro_batch=0, worker=0, workers=1)


@pytest.mark.parametrize("word", ["0", "-1", "x", "1e3", "99999999999"])
def test_numbers_of_options_are_checked(word, capsys):
    with pytest.raises(SystemExit):
        train_text.parse(["--steps", word])
    assert "whole number" in capsys.readouterr().err


def test_the_library_text_is_the_same_every_time():
    first, second = load_text(), load_text()
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train)
    assert len(first.held_out) * 8 < len(first.train) < len(first.held_out) * 10


def test_batches_depend_on_seed_step_micro_batch_and_worker():
    text = text_of(torch.randint(256, (20_000,)).to(torch.uint8).numpy().tobytes())
    base = {"seed": 0, "step": 1, "micro_batch": 0, "worker": 0}
    batch = training_batch(text, 4, 16, **base, workers=4)
    assert batch.shape == (4, 17)
    assert torch.equal(batch, training_batch(text, 4, 16, **base, workers=4))
    for name in base:
        other = training_batch(text, 4, 16, **(base | {name: base[name] + 1}), workers=4)
        assert not torch.equal(batch, other), name


def test_shards_of_workers_are_disjoint():
    sequence, workers = 2, 3
    text = text_of(bytes(range(62)))
    starts = [
        set(
            training_batch(text, 500, sequence, seed=0, step=1, micro_batch=0, worker=w, workers=workers)[:, 0].tolist()
        )
        for w in range(workers)
    ]
    assert sorted(start for each in starts for start in each) == list(range(0, 60, sequence))


def test_held_out_batches_cover_the_text_once():
    text = text_of(bytes(range(25)))
    windows = [
        window
        for worker in range(2)
        for batch in held_out_batches(text, 3, 2, count=2, worker=worker, workers=2)
        for window in batch.tolist()
    ]
    assert windows == [[start, start + 1, start + 2] for start in range(0, 24, 2)]


def test_shapes_are_those_of_the_benchmarks():
    workloads = yaml.safe_load((ROOT / "benchmarks" / "workloads" / "paper_kind.yaml").read_text("utf-8"))
    for name, other in workloads.items():
        shape = SHAPES[name]
        mine = (shape.hidden, shape.ffn, shape.experts, shape.top_k, shape.layers)
        assert mine == tuple(other[key] for key in ("hidden", "ffn", "experts", "top_k", "layers")), name
        assert (other["matrices"], shape.expert) == (2, "gelu"), name


def report(loss: float, seconds: float) -> text_report.WorkerReport:
    made = text_report.WorkerReport()
    made.add(loss, seconds, Snapshot({(1, 1): 10, (1, 2): 5}, {}, {(0, 1, "dispatch"): 0.5}))
    made.add(loss, seconds, Snapshot({(1, 1): 10}, {}, {(0, 1, "dispatch"): 0.25}))
    return made


def test_reports_survive_the_wire():
    mine = report(1.5, 0.5)
    assert mine.waited_s == {"0 1 dispatch": 0.75}
    assert text_report.WorkerReport.unpack(memoryview(mine.pack()), steps=2, dcs=2) == mine


def test_the_summary_adds_links_and_keeps_the_slowest_worker():
    runtime = SimpleNamespace(dc_names=("a", "b"), layout=Layout((2, 1)), world_size=3)
    there = text_report.WorkerReport()
    there.add(4.0, 2.0, Snapshot({(0, 1): 7}, {}, {}))
    there.add(4.0, 2.0, Snapshot({}, {}, {}))
    summary = text_report.summary(runtime, [report(1.0, 0.5), report(1.0, 3.0), there])
    assert summary["steps"] == [
        {"loss": 2.0, "step_s": 3.0, "sent_bytes": {"a->b": {"tokens": 20, "experts": 10}, "b->a": {"tokens": 7}}},
        {"loss": 2.0, "step_s": 3.0, "sent_bytes": {"a->b": {"tokens": 20}}},
    ]
    wait = {"dc": "a", "worker": 0, "layer": 0, "peer": "b", "channel": "dispatch", "seconds": 0.75}
    assert summary["waits"] == [wait, wait | {"worker": 1}]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"loss": 1}',
        b'{"loss": ["x", "y"], "step_s": [1, 1], "sent_bytes": [{}, {}]}',
        b'{"loss": [1, 1], "step_s": [1, 1], "sent_bytes": [{"7 tokens": 1}, {}]}',
        b'{"loss": [1, 1], "step_s": [1, 1], "sent_bytes": [{"1 tokens": "1"}, {}]}',
        b'{"loss": [1, 1], "step_s": [1, 1], "sent_bytes": [{"tokens": 1}, {}]}',
        b'{"loss": [1, 1], "step_s": [1, 1], "sent_bytes": [{}, {}], "waited_s": {"0": 1}}',
        b'{"loss": [1, 1], "step_s": [1, 1], "sent_bytes": [{}, {}], "evil": 1}',
    ],
)
def test_what_is_no_report_is_refused(payload):
    with pytest.raises(RemoteProtocolError):
        text_report.WorkerReport.unpack(memoryview(payload), steps=2, dcs=2)


def test_numbers_that_are_not_finite_become_null(tmp_path):
    file = tmp_path / "run.json"
    text_report.write(str(file), {"loss": [1.0, float("nan")]})
    assert json.loads(file.read_text("utf-8")) == {"loss": [1.0, None]}


def test_the_demo_shows_why_experts_move():
    decision = decide(load(demo.TOPOLOGY), demo.workload())
    assert decision.choice.sizes[0] == 2
    assert decision.break_even_tokens < demo.workload().tokens_per_worker_per_step
    steps = [
        {"loss": 2.0, "step_s": 1.0, "sent_bytes": {"a->b": {"tokens": 2e6}, "b->a": {"tokens": 1e6}}}
    ] * demo.STEPS
    wait = {"dc": "a", "worker": 0, "layer": 0, "peer": "b", "channel": "dispatch", "seconds": 4.0 * demo.STEPS}
    run = demo.Run(
        {
            "steps": steps,
            "waits": [wait, wait | {"peer": "a"}],
            "held_out": [{"step": demo.STEPS, "loss": 1.0}],
            "workers_per_dc": {"a": 2, "b": 2},
            "plan": {"reason": "because"},
        }
    )
    assert (run.step_s, run.wait_s, run.wan_bytes) == (1.0, 1.0, {"tokens": 3e6})
    table = demo.comparison({"ep": run, "auto": run}, decision)
    assert table.row_count == 12
    assert "because" in demo.remarks({"ep": run, "auto": run})[0]


def test_the_demo_fails_with_the_code_of_a_run_that_fails(monkeypatch, tmp_path):
    code = "print('step 1/2: loss 3'); print('the end is near'); raise SystemExit(7)"
    monkeypatch.setattr(demo, "command", lambda plan, file: [sys.executable, "-c", code])
    seen = []
    with pytest.raises(demo.Failed, match="the end is near") as caught:
        demo.train("ep", tmp_path / "run.json", lambda step, said: seen.append((step, said)))
    assert caught.value.code == 7
    assert seen == [(1, "loss 3")]
