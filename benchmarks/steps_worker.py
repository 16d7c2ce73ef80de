"""One worker of a job that measures training steps; `benchmarks.steps` starts it.

hybridep run ONE_DC.yaml --plan ep -- python -m benchmarks.steps_worker --size JSON --arms plain,runtime --rounds 40
    --out FILE
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch

import hybridep_rt
from benchmarks.arms import Arm, batch, plain_arm, runtime_arm
from benchmarks.intervals import interleave
from benchmarks.sizes import Size

WARMUP = 3
CHECKED_STEPS = 3
TOLERANCE = 1e-5


def build(size: Size, names: list[str], runtime: hybridep_rt.Runtime) -> dict[str, Arm]:
    """Arms that start with the same weights: "runtime" is the one over the runtime, all others are the baseline."""
    first = runtime_arm(size, runtime)
    return {name: first if name == "runtime" else plain_arm(size, first.model) for name in names}


def check_fair(arms: dict[str, Arm], x: torch.Tensor, target: torch.Tensor) -> list[float]:
    """All arms' losses at a few steps. Raises ValueError where they differ by more than rounding."""
    checked: list[float] = []
    for step in range(CHECKED_STEPS):
        losses = {name: float(arm.step(x, target)) for name, arm in arms.items()}
        checked.append(next(iter(losses.values())))
        if max(losses.values()) - min(losses.values()) > TOLERANCE * abs(checked[-1]):
            raise ValueError(f"the arms don't train alike, their losses at step {step} are {losses}")
    return checked


@click.command()
@click.option("--size", "size_json", required=True)
@click.option("--arms", required=True)
@click.option("--rounds", type=click.IntRange(1), required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(size_json: str, arms: str, rounds: int, out: Path) -> None:
    """Check that the arms train alike, then time their steps in turns.

    Worker 0 writes the slowest worker's seconds and the mean CPU seconds of each step.
    """
    runtime = hybridep_rt.init()
    size = Size(**json.loads(size_json))
    built = build(size, arms.split(","), runtime)
    x, target = batch(size, runtime.rank)
    losses = check_fair(built, x, target)
    steps = {name: (lambda arm=arm: arm.timed_step(x, target)) for name, arm in built.items()}
    taken = torch.tensor(list(interleave(steps, rounds, warmup=WARMUP).values()), dtype=torch.float64)
    wall = dict(zip(built, runtime.all_reduce(taken[..., 0], "max").tolist(), strict=True))
    cpu = dict(zip(built, runtime.all_reduce(taken[..., 1], "mean").tolist(), strict=True))
    if runtime.rank == 0:
        out.write_text(json.dumps({"losses": losses, "wall_s": wall, "cpu_s": cpu}))
    runtime.shutdown()


if __name__ == "__main__":
    main()
