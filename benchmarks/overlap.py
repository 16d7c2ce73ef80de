"""How much of a step goes by waiting for experts, where their transfer is shorter than the compute before them?

    python -m benchmarks.overlap --json benchmarks/results/overlap.json [--quick]

Two datacenters of one worker on the testbed, whose compute is emulated; every expert has a copy in the other one, so
that no token crosses. Steps that decode experts as they arrive and steps that decode them on demand take turns in one
job; a second job lets copies be one step behind. What counts is the time that the training thread spends on experts
from elsewhere (waiting, decoding), as a share of the step. Aim: under 5 %. Needs what `hybridep testbed` needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks.intervals import compare, median_interval
from benchmarks.report import report, write_report
from hybridep_rt.codecs.codec import bytes_per_element

ROOT = Path(__file__).resolve().parents[1]
JOB_TIMEOUT_S = 600.0
AIM = 0.05
_TOPOLOGY = """cluster: {name}
emulate: true
levels:
  - {{name: dc, count: 2, bandwidth: {mbit_per_s:g} Mbit/s, latency: {rtt_ms:g} ms}}
  - {{name: worker, count: 1, bandwidth: 2 GB/s}}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """`pre_s`: emulated compute before the experts of one layer, which has to exceed the transfer of one layer's."""

    weights: str
    gradients: str
    mbit_per_s: float
    rtt_ms: float
    layers: int
    hidden: int
    ffn: int
    experts: int
    tokens: int
    pre_s: float

    @property
    def transfer_s(self) -> float:
        """Of one layer's experts that one DC sends: bytes over the rate, without latency."""
        elements = self.experts // 2 * 3 * self.hidden * self.ffn
        return elements * bytes_per_element(self.weights, torch.float32) / (self.mbit_per_s * 1e6 / 8)


CASES = (
    Case("delta-1bit", "2bit", 100, 20, layers=4, hidden=512, ffn=512, experts=8, tokens=512, pre_s=0.08),
    Case("bf16", "bf16", 1000, 20, layers=4, hidden=512, ffn=512, experts=8, tokens=512, pre_s=0.08),
)
QUICK = (Case("delta-1bit", "2bit", 100, 20, layers=2, hidden=128, ffn=128, experts=4, tokens=32, pre_s=0.02),)


def run_job(case: Case, staleness: int, rounds: int) -> dict[str, Any]:
    """What worker 0 measured. Raises RuntimeError, with the job's last words, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        topology, out = Path(folder, "two-dc.yaml"), Path(folder, "overlap.json")
        topology.write_text(
            _TOPOLOGY.format(name=f"overlap-{os.getpid()}", mbit_per_s=case.mbit_per_s, rtt_ms=case.rtt_ms)
        )
        sizes = ("layers", "hidden", "ffn", "experts", "tokens", "pre_s")
        options = [w for name in sizes for w in (f"--{name.replace('_', '-')}", str(getattr(case, name)))]
        words = [
            *(sys.executable, "-m", "launcher.cli", "testbed", "run", str(topology), "--plan", "replicate"),
            *("--codec", f"weights={case.weights}", "--codec", f"gradients={case.gradients}"),
            *("--staleness", str(staleness), "--emulate-compute", "1 TFLOP/s"),
            *("--", "-m", "benchmarks.overlap_worker", *options, "--rounds", str(rounds), "--out", str(out)),
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"a job ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
        measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def share(arm: dict[str, Sequence[float]]) -> dict[str, float]:
    """Median of the parts of steps that experts took, with its interval."""
    found = median_interval([e / s for e, s in zip(arm["experts_s"], arm["step_s"], strict=True)])
    return {"value": found.value, "low": found.low, "high": found.high}


def measure(case: Case, rounds: int, console: Console) -> dict[str, Any]:
    """Both jobs of a case."""
    fresh, stale = (run_job(case, staleness, rounds) for staleness in (0, 1))
    arms = {**fresh["arms"], "one step behind": stale["arms"]["as they arrive"]}
    shares = {name: share(arm) for name, arm in arms.items()}
    ratio = compare("on demand", arms["on demand"]["step_s"], "as they arrive", arms["as they arrive"]["step_s"]).ratio
    console.print(
        f"{case.weights} over {case.mbit_per_s:g} Mbit/s: {case.transfer_s * 1e3:.0f} ms to send a layer's experts, "
        f"{case.pre_s * 1e3:.0f} ms of compute before them"
    )
    for name, found in shares.items():
        verdict = "kept" if found["value"] < AIM else "MISSED"
        console.print(
            f"  {name}: {found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of the step; {AIM:.0%} {verdict}"
        )
    return asdict(case) | {
        "transfer_s": case.transfer_s,
        "share_of_step": shares,
        "step_ratio": {"value": ratio.value, "low": ratio.low, "high": ratio.high},
        "sent_bytes_per_step": fresh["sent_bytes_per_step"],
        "arms": arms,
    }


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="A small case and few steps: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Time that steps spend on experts from elsewhere."""
    console, rounds = Console(width=140), 3 if quick else 20
    results = [measure(case, rounds, console) for case in (QUICK if quick else CASES)]
    if json_path is not None:
        write_report(json_path, report("overlap", {"quick": quick, "rounds": rounds, "aim": AIM}, results))


if __name__ == "__main__":
    main()
