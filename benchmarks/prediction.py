"""Is the planner right? Steps as they were predicted against the same steps as they were measured.

    python -m benchmarks.prediction --json benchmarks/results/prediction.json --plot benchmarks/results/prediction.png

Each case is one job: it calibrates itself, predicts its step under plain EP, every domain size, all copies and the
search's choice, and then takes steps under all of them in turns (`prediction_worker`). Aims: the mean absolute error of
a step's time at most 10 %, of its WAN bytes 2 %; the choice never more than 5 % behind the best measured plan beyond
what the steps scatter; the simulator within 10 %, where DCs are alike. Takes about 20 minutes; `--quick` takes two
cases, and `--case 3` one. The jobs run on the testbed, and with `--coordinators` over links that those play.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.intervals import Interval, median_interval, ratio_interval
from benchmarks.prediction_cases import CASES, Case
from benchmarks.report import report, tick_in_decades, write_report

AIM_TIME, AIM_BYTES, AIM_BEHIND = 0.10, 0.02, 0.05
JOB_TIMEOUT_S = 600.0
_ROOT = Path(__file__).parents[1]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean absolute errors, as shares; cases whose choice is clearly more than `AIM_BEHIND` behind the best plan."""

    time_error: float
    bytes_error: float
    simulator_error: float | None
    behind: dict[str, float]


def run_case(number: int, case: Case, rounds: int, steps: int, *, testbed: bool) -> Json:
    """One job. Raises RuntimeError, with its last words, where it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        topology, out = Path(folder, "case.yaml"), Path(folder, "case.json")
        topology.write_text(case.topology(f"prediction-{os.getpid()}"))
        words = [sys.executable, "-m", "launcher.cli", *(["testbed"] if testbed else []), "run", str(topology)]
        words += ["--plan", "ep"]
        words += ["--", "-m", "benchmarks.prediction_worker", "--case", str(number), "--rounds", str(rounds)]
        words += ["--steps", str(steps), "--out", str(out)]
        try:
            done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{case.name}: the job took more than {JOB_TIMEOUT_S} s") from None
        if done.returncode != 0:
            raise RuntimeError(
                f"{case.name}: the job ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        found: Json = json.loads(out.read_text())
    return found


def error(predicted: float, measured: float) -> float:
    """Of a prediction, as a share of what was measured."""
    return predicted / measured - 1


def summary(results: list[Json]) -> Summary:
    """Of all cases and plans."""
    arms = [arm for result in results for arm in result["arms"]]
    simulated = [arm for arm in arms if arm["simulated_s"] is not None]
    behind = {result["case"]: ratio for result in results if (ratio := lag(result)).low > 1 + AIM_BEHIND}
    return Summary(
        fmean(abs(error(arm["predicted_s"], median(arm["step_s"]))) for arm in arms),
        fmean(abs(error(arm["predicted_bytes"], arm["sent_bytes"])) for arm in arms),
        fmean(abs(error(arm["simulated_s"], median(arm["step_s"]))) for arm in simulated) if simulated else None,
        {case: ratio.value for case, ratio in behind.items()},
    )


def lag(result: Json) -> Interval:
    """How much longer the choice's step takes than the fastest plan's, steps paired as they were taken."""
    chosen = next(arm for arm in result["arms"] if arm["chosen"])
    best = min(result["arms"], key=lambda arm: median(arm["step_s"]))
    return ratio_interval(best["step_s"], chosen["step_s"])


def table(results: list[Json]) -> Table:
    """One row per case and plan."""
    shown = Table(title="A step: measured (median), predicted, and by the simulator")
    for column in ("case", "plan", "measured", "95 %", "predicted", "off", "simulated", "WAN bytes off"):
        shown.add_column(column, justify="left" if column in ("case", "plan") else "right", no_wrap=column == "plan")
    for result in results:
        for number, arm in enumerate(result["arms"]):
            taken = median_interval(arm["step_s"])
            simulated = arm["simulated_s"]
            shown.add_row(
                result["case"] if number == 0 else "",
                arm["plan"] + (" *" if arm["chosen"] else ""),
                f"{taken.value:.3f} s",
                f"{taken.low:.3f}-{taken.high:.3f}",
                f"{arm['predicted_s']:.3f} s",
                f"{error(arm['predicted_s'], taken.value):+.1%}",
                "" if simulated is None else f"{error(simulated, taken.value):+.1%}",
                f"{error(arm['predicted_bytes'], arm['sent_bytes']):+.1%}",
            )
    return shown


def draw(results: list[Json], path: Path) -> None:
    """Predicted against measured, one point per case and plan."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for result in results:
        arms = result["arms"]
        measured, predicted = [median(a["step_s"]) for a in arms], [a["predicted_s"] for a in arms]
        axes.scatter(measured, predicted, s=18, label=result["case"])
    ends = [median(arm["step_s"]) for result in results for arm in result["arms"]]
    line = [min(ends) * 0.8, max(ends) * 1.25]
    axes.plot(line, line, color="black", linewidth=0.8)
    for off in (0.9, 1.1):
        axes.plot(line, [end * off for end in line], color="grey", linewidth=0.5, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted step, s")
    for axis in (axes.xaxis, axes.yaxis):
        tick_in_decades(axis)
    axes.legend(fontsize=5)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def say(console: Console, found: Summary) -> None:
    """The summary, against the aims."""
    lines = [
        f"step time: mean absolute error {found.time_error:.1%} (aim {AIM_TIME:.0%})",
        f"WAN bytes: {found.bytes_error:.2%} (aim {AIM_BYTES:.0%})",
    ]
    if found.simulator_error is not None:
        lines.append(f"simulator: {found.simulator_error:.1%} (aim {AIM_TIME:.0%})")
    behind = ", ".join(f"{case} ({ratio:.2f}x)" for case, ratio in found.behind.items())
    lines.append(f"choices clearly more than {AIM_BEHIND:.0%} behind the best: {behind or 'none'}")
    for line in lines:
        console.print(line, highlight=False)


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw predicted against measured.")
@click.option("--quick", is_flag=True, help="Two cases, one round of two steps: to see that it works.")
@click.option("--case", "cases", type=click.IntRange(0, len(CASES) - 1), multiple=True, help="Only this; repeatable.")
@click.option("--coordinators", is_flag=True, help="Let coordinators play the links, where there can be no testbed.")
def main(json_path: Path | None, plot: Path | None, quick: bool, cases: tuple[int, ...], coordinators: bool) -> None:
    """Compare predictions with measurements."""
    rounds, steps = (1, 2) if quick else (3, 4)
    console, results = Console(width=150), list[Json]()
    numbers = cases or ((0, 10) if quick else range(len(CASES)))
    for number in track(numbers, "one job per case", console=console, transient=True):
        results.append(run_case(number, CASES[number], rounds, steps, testbed=not coordinators))
        if json_path is not None:
            settings = {"quick": quick, "rounds": rounds, "steps": steps, "testbed": not coordinators}
            write_report(json_path, report("prediction", settings, results))
    console.print(table(results))
    say(console, summary(results))
    if plot is not None:
        draw(results, plot)


if __name__ == "__main__":
    main()
