"""What the runs of `benchmarks.quality` say: gaps between rows and exact training, in loss, in steps and in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.intervals import Interval, mean_difference
from benchmarks.quality_runs import LONGER, ROWS
from benchmarks.report import tick_in_decades

Run = Mapping[str, Any]
"""What `quality_runs.run` returned."""

Runs = Mapping[tuple[str, int], Run]
"""By row and seed."""

_EXACT = ("exact", "null")
"""Exact training, begun alike or a thousandth off: which of them a run is compared with makes no difference."""

_MOST_TIMES = 1000
_TICKS = (-0.1, -0.03, -0.01, -0.005, 0, 0.005, 0.01, 0.03, 0.1, 0.3, 1)


@dataclass(frozen=True, slots=True)
class Found:
    """One row. Loss in nats per byte; bytes per copied parameter, optimizer step and subscriber, both ways together.

    `gap`: mean final loss less that of all exact runs (of `null`: of the others), whatever their seeds, as seeds matter
    less than what makes runs with one seed differ. `extra_steps`: the part of steps that the row needs on top to end
    like exact training, None where that wasn't trained longer to compare with. `mean_bytes` counts warm-up and key
    frames in. `error`: of the copies at the end, as a part of the weights' norm.
    """

    row: str
    gap: Interval
    extra_steps: Interval | None
    weight_bytes: float
    gradient_bytes: float
    mean_bytes: float
    error: float
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]
    """Mean gap at some steps, on a text of its own."""


def evaluate(runs: Runs) -> list[Found]:
    """All rows but exact training itself, if there is any of that."""
    exact, gain, found = _of(("exact",), runs), _gain(runs), []
    for name in (name for name in ROWS if exact and name not in ("exact", "longer")):
        seeds = tuple(sorted(seed for row, seed in runs if row == name))
        if seeds:
            found.append(_row(name, seeds, runs, exact if name == "null" else _of(_EXACT, runs), gain))
    return found


def results(found: Sequence[Found], runs: Runs) -> list[dict[str, Any]]:
    """For the JSON: every row, then the final losses of all runs."""
    rows = [{"title": ROWS[row.row].title, "rung": asdict(ROWS[row.row].rung), **_finite(asdict(row))} for row in found]
    finals = [{"row": row, "seed": seed, "final_loss": run["final"]} for (row, seed), run in sorted(runs.items())]
    return [*rows, {"runs": finals, "gain_of_longer": _gain(runs)}]


def table(found: Sequence[Found]) -> Table:
    """One line per row."""
    shown = Table(title="Against exact training", caption="difference of means [95 % interval, Welch]")
    for column in ("", "seeds", "gap, nats/byte", "more steps, %", "bytes out + back", "with warm-up", "copies off by"):
        shown.add_column(column, justify="left" if not column else "right")
    for row in found:
        shown.add_row(
            ROWS[row.row].title,
            str(len(row.seeds)),
            _interval(row.gap, 1, "+.4f"),
            "" if row.extra_steps is None else _interval(row.extra_steps, 100, "+.1f"),
            f"{row.weight_bytes:.3f} + {row.gradient_bytes:.3f}",
            f"{row.mean_bytes:.3f}",
            f"{row.error:.2%}",
        )
    return shown


def plot(found: Sequence[Found], file: Path) -> None:
    """Gaps over the steps, and at the end against bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_bytes) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for number, row in enumerate(found):
        color = f"C{number}"
        title = ROWS[row.row].title
        steps, gaps = zip(*row.curve, strict=True)
        over_steps.plot(steps, gaps, color=color, label=title, marker=".", linewidth=1)
        if row.weight_bytes:
            total, low, high = row.weight_bytes + row.gradient_bytes, row.gap.low, row.gap.high
            error = [[row.gap.value - low], [high - row.gap.value]] if math.isfinite(high) else None
            over_bytes.errorbar(total, row.gap.value, error, color=color, fmt="o", capsize=3)
            side, shift = ("right", -6) if total > 1 else ("left", 6)
            place = (shift, -9 if number % 2 else 4)
            over_bytes.annotate(title, (total, row.gap.value), place, textcoords="offset points", fontsize=8, ha=side)
    for axes in (over_steps, over_bytes):
        axes.axhspan(-0.003, 0.003, color="0.9", zorder=0)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylabel("loss less that of exact training, nats per byte")
        low, high = axes.get_ylim()
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.grid(alpha=0.3)
    over_steps.set_xlabel("optimizer steps")
    over_steps.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    over_bytes.set_xscale("log")
    tick_in_decades(over_bytes.xaxis)
    over_bytes.set_xlabel("bytes per parameter and step, both ways (exact: 8)")
    over_bytes.margins(x=0.25)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    """With None for bounds that there aren't, as JSON has no infinity."""
    parts = {key: _finite(value) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: None if value in (math.inf, -math.inf) else value for key, value in parts.items()}


def _interval(found: Interval, unit: float, form: str) -> str:
    value, low, high = (format(number * unit, form) for number in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def _row(row: str, seeds: tuple[int, ...], runs: Runs, exact: Sequence[Run], gain: float | None) -> Found:
    mine = [runs[row, seed] for seed in seeds]
    losses = tuple(run["final"] for run in mine)
    gap = mean_difference(losses, [run["final"] for run in exact])
    sent = mine[0]["bytes"] or dict.fromkeys(("weights", "gradients", "weights_mean", "gradients_mean", "shared"), 0.0)
    return Found(
        row,
        gap,
        None if gain is None else Interval(*(_more_steps(end, gain) for end in (gap.value, gap.low, gap.high))),
        sent["weights"] + sent["shared"],
        sent["gradients"],
        sent["weights_mean"] + sent["shared"] + sent["gradients_mean"],
        fmean(run["curve"][-1]["distance"] for run in mine),
        seeds,
        losses,
        tuple((step, loss - other) for (step, loss), (_, other) in zip(_curve(mine), _curve(exact), strict=True)),
    )


def _of(rows: Sequence[str], runs: Runs) -> list[Run]:
    return [run for (row, _), run in runs.items() if row in rows]


def _gain(runs: Runs) -> float | None:
    """What `LONGER` times the steps gain with exact training, if they do."""
    exact, longer = _of(_EXACT, runs), _of(("longer",), runs)
    gain = _loss(exact) - _loss(longer) if exact and longer else 0.0
    return gain if gain > 0 else None


def _loss(runs: Sequence[Run]) -> float:
    return fmean(run["final"] for run in runs)


def _curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Mean loss at the same points of all runs."""
    points = zip(*(run["curve"] for run in runs), strict=True)
    return [(at[0]["step"], fmean(point["loss"] for point in at)) for at in points]


def _more_steps(gap: float, gain: float) -> float:
    """As a part of all: loss falls about linearly in the logarithm of steps."""
    times = gap / gain
    return LONGER**times - 1 if times < _MOST_TIMES else math.inf
