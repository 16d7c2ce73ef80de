"""Starts the jobs that measure training steps, under `hybridep run`, and reads what they measured. A shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sizes import Size

JOB_TIMEOUT_S = 900.0
_ONE_DC = """cluster: {name}
levels:
  - {{name: dc, count: 1, bandwidth: 1 Gbit/s, latency: 0 ms}}
  - {{name: gpu, count: {workers}, bandwidth: 100 Gbit/s, latency: 0 ms}}
"""


@dataclass(frozen=True, slots=True)
class Steps:
    """What one job measured. `wall_s`, `cpu_s`: arm -> one value per round; `job_s`: the whole job with its start."""

    losses: list[float]
    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    job_s: float


def measure_steps(size: Size, arms: Sequence[str], rounds: int) -> Steps:
    """Run one job of one DC. Raises RuntimeError, with the job's last words, where it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        topology, out = Path(folder, "one-dc.yaml"), Path(folder, "steps.json")
        topology.write_text(_ONE_DC.format(name=f"bench-{os.getpid()}", workers=size.workers))
        worker = ["--size", json.dumps(asdict(size)), "--arms", ",".join(arms), "--rounds", str(rounds)]
        start = time.perf_counter()
        _run(["run", str(topology), "--plan", "ep", "--", "-m", "benchmarks.steps_worker", *worker, "--out", str(out)])
        job_s = time.perf_counter() - start
        measured: dict[str, Any] = json.loads(out.read_text())
    return Steps(measured["losses"], measured["wall_s"], measured["cpu_s"], job_s)


def _run(words: list[str]) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "launcher.cli", *words]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a job took more than {JOB_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"a job ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
