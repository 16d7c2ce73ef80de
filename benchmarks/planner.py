"""How long planning takes, and simulating a step, from a few DCs to a thousand; memory at its peak.

    python -m benchmarks.planner --json benchmarks/results/planner.json [--quick]

DCs of 8 GPUs, 58 layers of 256 experts (DeepSeek-V3's sizes), top-8, 1 Gbit/s. Each case runs in a process of its own,
so that its peak memory is its own, several times; the time is that of the work alone, without the start of Python. Aim
at 1000 DCs: at most 10 s each, and 2 GB.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.report import report, write_report
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import search
from hybridep_rt.simulate.scenario import CODECS, Scenario, simulate

DCS = (4, 16, 64, 250, 1000)
AIM_S, AIM_BYTES = 10.0, 2e9
SHAPE = LayerShape(7168, 2048, 256, 8, 3 * 7168 * 2048)
TASKS = ("plan", "simulate: ep", "simulate: domains", "simulate: drawn links")
TIMEOUT_S = 600


def scenario(dcs: int) -> Scenario:
    """The step."""
    compute = Compute(400e12, 8.0 * SHAPE.hidden**2, dense_parameters=4.0 * SHAPE.hidden**2 * 58)
    return Scenario(SHAPE, 58, dcs, 8, 125e6, 0.05, 4096, CODECS[3], compute)


def work(task: str, dcs: int) -> Callable[[], str]:
    """What is timed; it returns a word on what came out."""
    case = scenario(dcs)
    if task == "plan":

        def plan() -> str:
            job = Job(case.topology, case.job.work, case.job.routing, case.compute)
            return search(Predictor(job)).choice.name

        return plan
    drawn = replace(case, rate_spread=0.3, rtt_spread=0.3) if task.endswith("links") else case
    size = f"domains:{2 if dcs < 16 else dcs // 4 if dcs < 100 else 50}"
    return lambda: f"{simulate(drawn, 'ep' if task.endswith('ep') else size).step_s:.4g} s a step"


def measure(task: str, dcs: int, rounds: int) -> dict[str, Any]:
    """Run one case in processes of its own."""
    command = [sys.executable, "-m", "benchmarks.planner", "--case", task, str(dcs)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout)
        for _ in range(rounds)
    ]
    seconds = [run["seconds"] for run in runs]
    peak = max(run["peak_bytes"] for run in runs)
    times = {"seconds": median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
    return {
        "task": task,
        "dcs": dcs,
        **times,
        "cpu_s": median(run["cpu_s"] for run in runs),
        "peak_bytes": peak,
        "found": runs[0]["found"],
    }


def run_case(task: str, dcs: int) -> dict[str, Any]:
    """One case, here: seconds and the most memory that this process ever had."""
    todo = work(task, dcs)
    started, worked = time.perf_counter(), time.process_time()
    found = todo()
    return {
        "seconds": time.perf_counter() - started,
        "cpu_s": time.process_time() - worked,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "found": found,
    }


def table(results: list[dict[str, Any]]) -> Table:
    """Seconds and memory by DCs."""
    shown = Table(title=f"Aim at 1000 DCs: {AIM_S:.0f} s, {AIM_BYTES / 1e9:.0f} GB")
    for column in ("task", "DCs", "median s", "least", "most", "CPU s", "peak GB", "found"):
        shown.add_column(column, justify="left" if column in ("task", "found") else "right")
    for result in results:
        times = (f"{result[name]:.2f}" for name in ("seconds", "least_s", "most_s", "cpu_s"))
        memory = f"{result['peak_bytes'] / 1e9:.2f}"
        shown.add_row(result["task"], f"{result['dcs']:,}", *times, memory, result["found"])
    return shown


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="Two small numbers of DCs, once: to see that it works.")
@click.option("--case", type=(click.Choice(TASKS), int), default=None, help="Run this case here and print it.")
def main(json_path: Path | None, quick: bool, case: tuple[str, int] | None) -> None:
    """Time the planner and the simulation."""
    if case is not None:
        click.echo(json.dumps(run_case(*case)))
        return
    console = Console(width=120)
    counts, rounds = ((4, 64), 1) if quick else (DCS, 3)
    results: list[dict[str, Any]] = []
    cases = [(task, dcs) for task in TASKS for dcs in counts]
    for task, dcs in track(cases, "one process per case and round", console=console, transient=True):
        results.append(measure(task, dcs, rounds))
        if json_path is not None:
            settings = {"quick": quick, "rounds": rounds, "aim_s": AIM_S, "aim_bytes": AIM_BYTES}
            write_report(json_path, report("planner", settings, results))
    console.print(table(results))


if __name__ == "__main__":
    main()
