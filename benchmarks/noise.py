"""The noise floor of this machine: what A/A runs, two arms of the very same thing, show as a difference.

    python -m benchmarks.noise --json benchmarks/results/noise.json [--quick]

Kinds of measurement, each with its floor: one training step, by wall clock and by CPU time, with 1 and 2 workers, and
a whole job under `hybridep run`. A floor is the worst end of all intervals of its kind. Later benchmarks ask
`differs(ratio, load_floor(kind))` before they call anything a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console

from benchmarks.intervals import Comparison, compare, floor_of, interleave
from benchmarks.report import comparison_json, comparison_table, report, write_report
from benchmarks.sizes import Size
from benchmarks.steps import measure_steps

ARMS = ("A", "A again")


def step_kind(workers: int, clock: str) -> str:
    """The name of a step's floor. `clock`: "wall" or "cpu"."""
    return f"step, {workers} worker{'s' if workers > 1 else ''}, {clock}"


def measure_step_noise(workers: int, blocks: int, rounds: int) -> dict[str, list[Comparison]]:
    """A/A of a step, in several jobs, because what differs between processes is noise too."""
    found: dict[str, list[Comparison]] = {step_kind(workers, clock): [] for clock in ("wall", "cpu")}
    for block in range(blocks):
        # The heaviest and the lightest sizes that are measured: noise is not the same for both.
        size = Size(workers, 512, 256, 512) if block % 2 == 0 else Size(workers, 2048, 256, 512)
        steps = measure_steps(size, ARMS, rounds)
        for clock, taken in (("wall", steps.wall_s), ("cpu", steps.cpu_s)):
            found[step_kind(workers, clock)].append(compare(ARMS[0], taken[ARMS[0]], ARMS[1], taken[ARMS[1]]))
    return found


def measure_job_noise(rounds: int) -> dict[str, list[Comparison]]:
    """A/A of a whole job: mpirun, coordinator, 2 workers, a few steps, and its end."""

    def job() -> float:
        return measure_steps(Size(2, 512, 256, 512), ["runtime"], rounds=4).job_s

    taken = interleave(dict.fromkeys(ARMS, job), rounds)
    return {"job": [compare(ARMS[0], taken[ARMS[0]], ARMS[1], taken[ARMS[1]])]}


def publish(found: Mapping[str, list[Comparison]], quick: bool, path: Path | None, console: Console) -> None:
    """Show and write the floors."""
    floors = {kind: floor_of([each.ratio for each in block]) for kind, block in found.items()}
    rows = [(kind, each, floors[kind]) for kind, block in found.items() for each in block]
    console.print(comparison_table("A/A: the same thing measured as two arms", rows))
    if path is not None:
        settings = {"quick": quick, "floors": {kind: floor.ratio for kind, floor in floors.items()}}
        results = [{"kind": kind} | comparison_json(each, floor) for kind, each, floor in rows]
        write_report(path, report("noise", settings, results))


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="Fewer rounds: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Measure the same thing twice, in turns, and publish how much two equal things seem to differ."""
    blocks, rounds, jobs = (1, 8, 2) if quick else (2, 24, 5)
    found: dict[str, list[Comparison]] = {}
    for workers in (1, 2):
        found |= measure_step_noise(workers, blocks, rounds)
    publish(found | measure_job_noise(jobs), quick, json_path, Console(width=140))


if __name__ == "__main__":
    main()
