"""`hybridep plan --plot`: step time against the share of tokens that still cross, and the timeline of the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.paper import layer_s, p_of_size
from hybridep_rt.planner.paper_levels import paper_layers
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import Found, Option
from hybridep_rt.planner.timeline import Timeline

COLOURS = {
    "compute": "#4c72b0",
    "tokens": "#dd8452",
    "experts": "#55a868",
    "gradients": "#8172b3",
    "dense": "#937860",
}
_LANES_MOST = 24


def draw(title: str, job: Job, found: Found, played: Timeline | None, path: str) -> None:
    """Write a PNG, SVG or PDF, by the path's suffix."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(11, 9), height_ratios=(1, 1.4), layout="constrained", squeeze=False)
    figure.suptitle(f"{title} on {job.topology.cluster}, {job.work.tokens_per_worker_per_step:,.0f} tokens per worker")
    _shares(axes[0, 0], job, found)
    if played is None:
        axes[1, 0].set_axis_off()
    else:
        _lanes(axes[1, 0], played)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def crossing_share(predictor: Predictor, option: Option, plain: Option) -> float:
    """p: routed choices that cross to another DC, against plain EP."""
    crossing = [_crossing(predictor, each) for each in (option, plain)]
    return crossing[0] / crossing[1] if crossing[1] else 0.0


def _crossing(predictor: Predictor, option: Option) -> float:
    sent = predictor.predict([option.layers]).sent_bytes["tokens"][0]
    return float(sent.sum())


def _shares(axis: Any, job: Job, found: Found) -> None:
    predictor = Predictor(job)
    plain = next(option for option in found.named if option.name == "ep")
    options = [*found.named, *([] if found.choice in found.named else [found.choice])]
    named: set[tuple[float, str]] = set()
    for option in sorted(options, key=lambda option: option is not found.choice):
        p = crossing_share(predictor, option, plain)
        chosen = option is found.choice
        axis.plot(
            p, option.step_s, "*" if chosen else "o", color="#c44e52" if chosen else "#4c72b0", ms=14 if chosen else 6
        )
        spot = (round(p, 2), f"{option.step_s:.2g}")
        if spot not in named:
            axis.annotate(option.name, (p, option.step_s), textcoords="offset points", xytext=(6, 5), fontsize=8)
        named.add(spot)
    level = paper_layers(job)[0]
    if level.workers > 1 and np.isfinite(level.bandwidth_bytes_per_s):
        layers = len(job.work.layers)
        shares = np.linspace(0, 1, 101)
        axis.plot(shares, [layers * layer_s(level, p) for p in shares], color="grey", lw=1, label="paper: forward")
        sizes = [size for size in range(1, level.workers + 1) if level.workers % size == 0]
        points = [p_of_size(size, level.workers) for size in sizes]
        axis.plot(
            points, [layers * layer_s(level, p) for p in points], "s", color="grey", ms=4, label="its domain sizes"
        )
        axis.legend(loc="best", fontsize=8)
    axis.set(xlabel="p: share of token bytes that still cross the WAN", ylabel="seconds per step", xlim=(-0.05, 1.15))
    axis.set_ylim(bottom=0)
    axis.set_title("Step time of the plans weighed (star: chosen)", fontsize=10)


def _lanes(axis: Any, played: Timeline) -> None:
    busy: dict[str, float] = {}
    for interval in played.intervals:
        busy[played.lane(interval)] = busy.get(played.lane(interval), 0.0) + interval.seconds
    links = sorted((lane for lane in busy if " -> " in lane), key=lambda lane: -busy[lane])
    lanes = [*played.names, *sorted(links[: max(0, _LANES_MOST - len(played.names))])]
    rows = {lane: row for row, lane in enumerate(lanes)}
    for stream, colour in COLOURS.items():
        for row, bars in _bars(played, rows, stream).items():
            axis.broken_barh(bars, (row - 0.36, 0.72), color=colour, lw=0)
    for interval in played.critical:
        at = rows.get(played.lane(interval))
        if at is not None:
            axis.plot([interval.start_s, interval.end_s], [at + 0.43] * 2, color="black", lw=2)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="seconds", xlim=(0, played.step_s))
    handles = [axis.barh([0], [0], color=colour, label=stream) for stream, colour in COLOURS.items()]
    handles += axis.plot([], [], color="black", lw=2, label="critical")
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, fontsize=8)
    axis.set_title("Timeline: compute of each DC, and its links", fontsize=10)


def _bars(played: Timeline, rows: dict[str, int], stream: str) -> dict[int, list[tuple[float, float]]]:
    found: dict[int, list[tuple[float, float]]] = {}
    for interval in played.intervals:
        row = rows.get(played.lane(interval))
        if row is not None and interval.stream == stream:
            found.setdefault(row, []).append((interval.start_s, interval.seconds))
    return found
