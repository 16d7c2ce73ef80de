"""Do the two ways to play a slow WAN agree? The coordinators' own emulation against the testbed's relay.

    python -m benchmarks.emulation --json benchmarks/results/emulation.json [--quick]

The demo's training job (two datacenters of two workers, 100 Mbit/s, 40 ms) runs under `hybridep run`, which emulates in
the coordinators, and under `hybridep testbed run`, which sends real packets through a relay, in turns. A third arm
repeats the first: what those two show as a difference is the floor. The bytes of every class have to be equal; the
seconds of equal steps are compared. With real compute relay, TLS and workers share the machine's cores, with emulated
compute they hardly do. Congestion control is cubic, as coordinators play links that are never less than full; a fourth
arm says what bbr leaves unused. Needs what `hybridep testbed` needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.intervals import compare, floor_of, interleave
from benchmarks.report import comparison_json, comparison_table, report, write_report

ROOT = Path(__file__).resolve().parents[1]
TOPOLOGY = ROOT / "examples/topologies/testbed-two-dc.yaml"
SCRIPT = ROOT / "examples/train_text.py"
CODECS = ("tokens=bf16", "weights=bf16", "gradients=bf16")
ARMS = {
    "coordinators": (("run",), ""),
    "coordinators again": (("run",), ""),
    "testbed": (("testbed", "run"), "cubic"),
    "testbed, bbr": (("testbed", "run"), "bbr"),
}
"""The words of the command, and the congestion control."""
EMULATED = ("--emulate-compute", "5 GFLOP/s")
CASES = (("ep", EMULATED), ("domains:2", EMULATED), ("ep", ()), ("domains:2", ()))
JOB_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """One run's steps: seconds, and bytes by link and class of all steps together."""

    step_s: tuple[float, ...]
    sent_bytes: dict[str, int]


def run_job(command: tuple[str, ...], congestion: str, plan: str, steps: int, compute: tuple[str, ...]) -> Job:
    """Train the demo's model. Raises CalledProcessError, with the output, where the job fails."""
    with tempfile.TemporaryDirectory() as folder:
        result, topology = Path(folder) / "run.json", Path(folder) / "topology.yaml"
        topology.write_text(TOPOLOGY.read_text() + (f"congestion: {congestion}\n" if congestion else ""))
        words = [sys.executable, "-m", "launcher.cli", *command, str(topology), "--plan", plan, *compute]
        for codec in CODECS:
            words += ["--codec", codec]
        words += [
            "--",
            str(SCRIPT),
            "--shape",
            "demo",
            "--accumulate",
            "2",
            "--steps",
            str(steps),
            "--json",
            str(result),
        ]
        subprocess.run(words, check=True, cwd=ROOT, capture_output=True, text=True, timeout=JOB_TIMEOUT_S)
        return read_job(json.loads(result.read_text()))


def read_job(content: dict[str, Any]) -> Job:
    """A result of `train_text`; its first step, which warms up, counts for bytes only."""
    sent: dict[str, int] = {}
    for step in content["steps"]:
        for link, classes in step["sent_bytes"].items():
            for kind, nbytes in classes.items():
                sent[f"{link} {kind}"] = sent.get(f"{link} {kind}", 0) + nbytes
    return Job(tuple(step["step_s"] for step in content["steps"][1:]), sent)


def measure(plan: str, rounds: int, steps: int, compute: tuple[str, ...]) -> dict[str, list[Job]]:
    """All arms in turns."""
    return interleave(
        {name: lambda arm=arm: run_job(*arm, plan, steps, compute) for name, arm in ARMS.items()},
        rounds,
    )


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--case", "cases", type=click.IntRange(0, len(CASES) - 1), multiple=True, help="Only this; repeatable.")
@click.option("--quick", is_flag=True, help="One round of few steps: to see that it works.")
def main(json_path: Path | None, cases: tuple[int, ...], quick: bool) -> None:
    """Compare the coordinators' emulation of a WAN with the testbed."""
    rounds, steps = (1, 3) if quick else (2, 7)
    console, results = Console(width=140), []
    for number in cases or range(len(CASES)):
        plan, compute = CASES[number]
        case = f"{plan}, {'emulated' if compute else 'real'} compute"
        taken = measure(plan, rounds, steps, compute)
        equal = all(job.sent_bytes == taken["coordinators"][0].sent_bytes for jobs in taken.values() for job in jobs)
        seconds = {name: [s for job in jobs for s in job.step_s] for name, jobs in taken.items()}
        again, *found = (
            compare("coordinators", seconds["coordinators"], name, seconds[name]) for name in list(ARMS)[1:]
        )
        floor = floor_of([again.ratio])
        rows = [("A/A", again, floor), *((each.other, each, floor) for each in found)]
        console.print(comparison_table(f"Step time, {case}: coordinators (base) against the testbed", rows))
        console.print(f"bytes by link and class {'are equal' if equal else 'DIFFER'} in all {len(ARMS) * rounds} jobs")
        what = {"plan": plan, "emulated_compute": bool(compute), "bytes_equal": equal}
        bytes_sent = {"bytes": taken["testbed"][0].sent_bytes}
        results += [what | bytes_sent | comparison_json(each, floor) for each in (again, *found)]
        if json_path is not None:
            write_report(json_path, report("emulation", {"quick": quick, "rounds": rounds, "steps": steps}, results))


if __name__ == "__main__":
    main()
