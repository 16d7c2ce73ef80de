"""What the runtime costs where it has nothing to gain: one DC, no WAN, against plain torch.distributed EP.

    python -m benchmarks.overhead --json benchmarks/results/overhead.json [--quick]

Both models live in the same processes of one job and take steps in turns (baseline, runtime, or the other way round).
Same weights, routing, optimizer and batch; that their losses agree is checked first. The aim is at most 1.10 times the
baseline's step.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from benchmarks.intervals import Comparison, Floor, compare
from benchmarks.noise import step_kind
from benchmarks.report import NOISE, comparison_json, comparison_table, load_floor, report, write_report
from benchmarks.sizes import FULL, QUICK, Size
from benchmarks.steps import Steps, measure_steps

AIM = 1.10
ARMS = ("plain", "runtime")
Case = tuple[Size, Steps, dict[str, tuple[Comparison, Floor]]]


def judge(size: Size, steps: Steps, noise: Path) -> dict[str, tuple[Comparison, Floor]]:
    """By clock: the runtime's step against the baseline's, and the floor of that kind of measurement."""
    base, other = ARMS
    return {
        clock: (compare(base, taken[base], other, taken[other]), load_floor(step_kind(size.workers, clock), noise))
        for clock, taken in (("wall", steps.wall_s), ("cpu", steps.cpu_s))
    }


def as_json(size: Size, steps: Steps, judged: dict[str, tuple[Comparison, Floor]]) -> dict[str, object]:
    """One case's result: sizes, the losses that both arms had, and both comparisons."""
    return {"size": asdict(size), "losses": steps.losses} | {
        clock: comparison_json(*found) for clock, found in judged.items()
    }


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--noise", type=click.Path(exists=True, path_type=Path), default=NOISE, help="This machine's floors.")
@click.option("--quick", is_flag=True, help="Two small cases and fewer rounds: to see that it works.")
def main(json_path: Path | None, noise: Path, quick: bool) -> None:
    """Time training steps over the runtime and over plain torch.distributed, in turns."""
    console = Console(width=140)
    sizes, rounds = (QUICK, 10) if quick else (FULL, 24)
    judged: list[Case] = []
    for size in track(sizes, "one job per size", console=console):
        steps = measure_steps(size, ARMS, rounds)
        judged.append((size, steps, judge(size, steps, noise)))
        if json_path is not None:  # after each case: a run that is stopped leaves what it has
            settings = {"quick": quick, "rounds": rounds, "aim": AIM}
            write_report(json_path, report("overhead", settings, [as_json(*case) for case in judged]))
    for clock, title in (("wall", "Step time"), ("cpu", "CPU time of a step, mean of the workers")):
        rows = [(str(size), *found[clock]) for size, _, found in judged]
        console.print(comparison_table(f"{title}: the runtime against plain EP in one DC (aim: {AIM:.2f})", rows))


if __name__ == "__main__":
    main()
