"""What codecs do to learning: a small language model trained over four emulated DCs, against exact training.

    python -m benchmarks.quality --json benchmarks/results/quality.json --plot benchmarks/results/quality.png

Each run is a file in a folder. What is there isn't trained again, so the hours this takes may be interrupted.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp

import click
from rich.console import Console

from benchmarks.quality_report import evaluate, plot, results, table
from benchmarks.quality_runs import ROWS, Settings, finished, run
from benchmarks.report import report, write_report
from examples.text_data import load_text

ORDER = (
    "exact",
    "default",
    "lean",
    "null",
    "safe",
    "longer",
    "sr-1",
    "sr-1-alone",
    "extreme",
    "side",
    "default-cold",
    "sr-2",
)
AT_ONCE = 3
RUNS = Path("benchmarks/results/quality")


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", metavar="[RUNS]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--rows", default=",".join(ORDER), show_default=True, help="those to train")
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option(
    "--steps", default=Settings().steps, show_default=True, help="of every run; other lengths, another folder"
)
@click.option("--processes", default=1, show_default=True, help="runs at a time, on one core each")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="a tiny model and 30 steps, to see that it works")
def main(
    folder: Path | None,
    rows: str,
    seeds: str,
    steps: int,
    processes: int,
    json_file: Path | None,
    plot_file: Path | None,
    quick: bool,
) -> None:
    """Train what is missing, then report all that is there."""
    settings = Settings().quick() if quick else Settings(steps=steps)
    chosen = [row for row in rows.split(",") if row]
    unknown = set(chosen) - ROWS.keys()
    if unknown:
        raise click.BadParameter(f"no row {', '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    if folder is None:
        folder = RUNS if settings == Settings() else Path(mkdtemp(prefix="quality-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    # A few rows with all their seeds, then the next few: what was stopped early says something about the first.
    groups = [chosen[first : first + AT_ONCE] for first in range(0, len(chosen), AT_ONCE)]
    jobs = [(row, int(seed)) for group in groups for seed in seeds.split(",") for row in group]
    text = load_text()
    missing = [job for job in jobs if finished(_file(folder, *job), job[0], settings, text) is None]
    # A process for each run: a runtime numbers the layers of all models that it ever saw.
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(_train, folder, *job, settings) for job in missing]):
            console.print(future.result())
    files = ((row, int(seed)) for row, _, seed in (file.stem.rpartition("-") for file in folder.glob("*-*.json")))
    known = (job for job in files if job[0] in ROWS)
    read = {job: finished(_file(folder, *job), job[0], settings, text) for job in known}
    there = {job: content for job, content in read.items() if content is not None}
    found = evaluate(there)
    console.print(table(found))
    if json_file is not None:
        write_report(json_file, report("quality", asdict(settings), results(found, there)))
    if plot_file is not None and found:
        plot(found, plot_file)


def _train(folder: Path, row: str, seed: int, settings: Settings) -> str:
    result = run(row, seed, settings)
    file = _file(folder, row, seed)
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(result) + "\n")
    draft.replace(file)
    return f"{row}, seed {seed}: {result['final']:.4f} after {result['cpu_s']:.0f} s"


def _file(folder: Path, row: str, seed: int) -> Path:
    return folder / f"{row}-{seed}.json"


if __name__ == "__main__":
    main()
