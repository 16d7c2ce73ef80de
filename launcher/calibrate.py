"""`hybridep calibrate`: a short job over all sites that measures links, workers and codecs, for plan and run.

The job is one of `hybridep run`, with the program of `calibrate_worker`.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.workload_file import load_model
from launcher.run import run
from topology.units import SIZE

_BUDGET_LEAST = 1e6


@click.command("calibrate")
@click.argument("topology_file", metavar="TOPOLOGY")
@click.option("--workload", metavar="FILE", help="A model's YAML file, or FILE:NAME: whose shapes are computed.")
@click.option("--codec", "codecs", multiple=True, metavar="CODEC", help="As for hybridep run: to be measured.")
@click.option("--codecs", "rungs", default="", metavar="RUNGS", help="Rungs to be measured too, such as safe,default.")
@click.option("--budget", default="100MB", show_default=True, metavar="SIZE", help="To send on all WAN links together.")
@click.option("--out", default="calibration.yaml", show_default=True, type=click.Path(dir_okay=False))
@click.option("--emulate-compute", metavar="RATE", help="As for hybridep run.")
@click.option("--timeout", "timeouts", multiple=True, metavar="NAME=TIME", help="Such as operation=60s. Repeatable.")
@click.option("--site", metavar="DC", help="Start this DC only; one such command per site makes the job.")
@click.option("--token-file", metavar="FILE", help="Holds the run token.")
def calibrate(
    topology_file: str,
    workload: str | None,
    codecs: tuple[str, ...],
    rungs: str,
    budget: str,
    out: str,
    emulate_compute: str | None,
    timeouts: tuple[str, ...],
    site: str | None,
    token_file: str | None,
) -> None:
    """Measure TOPOLOGY's links and workers; the first DC's site writes the file that plan and run read."""
    budget_bytes = SIZE.parse(budget)
    if budget_bytes < _BUDGET_LEAST:
        raise ConfigError(f"--budget: at least 1 MB is needed, not {budget!r}")
    if not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"--out: {Path(out).parent}: no such folder")
    if workload is not None:
        load_model(workload)
    words = ["--budget", str(budget_bytes), "--out", os.path.abspath(out), "--codecs", rungs]
    words += [] if workload is None else ["--workload", workload]
    job = [topology_file, "--plan", "ep"]
    for name, values in (("--codec", codecs), ("--timeout", timeouts)):
        job += [word for value in values for word in (name, value)]
    for name, value in (("--emulate-compute", emulate_compute), ("--site", site), ("--token-file", token_file)):
        job += [] if value is None else [name, value]
    run.main([*job, "--", "-m", "launcher.calibrate_worker", *words], "hybridep calibrate", standalone_mode=False)
