"""`hybridep simulate --plot`: what was simulated as bars or curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

PARTS = {
    "compute": "#4c72b0",
    "codecs": "#8c8c8c",
    "tokens": "#dd8452",
    "experts": "#55a868",
    "gradients": "#8172b3",
    "dense": "#937860",
}


def draw(content: dict[str, Any], path: str) -> None:
    """`content`: what `hybridep simulate --json` prints. The path's suffix says the format."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 5.6), layout="constrained")
    if "figure" in content:
        _DRAWN[content["figure"]](axis, content)
    elif content["sweep"] is None or len(content["points"][0]["results"]) == 1:
        _bars(axis, content)
    else:
        _curves(axis, content)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, content: dict[str, Any]) -> None:
    results = [result for point in content["points"] for result in point["results"]]
    names = [result["plan"] for result in results]
    below = [0.0] * len(results)
    for part, colour in PARTS.items():
        heights = [result["parts_s"][part] for result in results]
        axis.bar(names, heights, bottom=below, color=colour, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set(ylabel="seconds per step, mean over DCs", title=_title(content["scenario"]))
    axis.legend()


def _curves(axis: Any, content: dict[str, Any]) -> None:
    points = content["points"]
    for plan in [result["plan"] for result in points[0]["results"]]:
        found = [(point["value"], r["step_s"]) for point in points for r in point["results"] if r["plan"] == plan]
        axis.plot(*zip(*found, strict=True), marker="o", label=plan)
    axis.set(xlabel=content["sweep"], ylabel="seconds per step", yscale="log", title=_title(content["scenario"]))
    axis.grid(alpha=0.3)
    axis.legend()


def _title(scenario: dict[str, Any]) -> str:
    return (
        f"{scenario['dcs']} DCs x {scenario['workers']} GPUs, {scenario['bandwidth'] * 8 / 1e9:g} Gbit/s, "
        f"{scenario['rtt_s'] * 1e3:g} ms, {scenario['tokens']:,.0f} tokens per GPU, codec {scenario['codec']['name']}"
    )


def _traffic(axis: Any, content: dict[str, Any]) -> None:
    rows = content["rows"]
    tokens = sorted({row["tokens"] for row in rows})
    plain = {row["tokens"]: row["plain_bytes"] for row in rows}
    axis.plot(tokens, [plain[count] for count in tokens], "k--", label="all as tokens")
    for size in sorted({row["size"] for row in rows}):
        found = {row["tokens"]: row["hybrid_bytes"] for row in rows if row["size"] == size}
        axis.plot(tokens, [found[count] for count in tokens], marker=".", label=f"S = {size}")
    axis.set(xscale="log", yscale="log", xlabel="tokens per GPU", ylabel="bytes out of a DC, per layer forward")
    axis.set_title(f"Traffic against tokens, {content['dcs']} DCs, the paper's model")
    axis.legend(fontsize=8, ncols=2)


def _messages(axis: Any, content: dict[str, Any]) -> None:
    rows = content["rows"]
    sizes = [str(row["size"]) for row in rows]
    axis.bar(sizes, [row["all_gather"] for row in rows], label="all-gather")
    twice = [2 * row["all_to_all"] for row in rows]
    axis.bar(sizes, twice, bottom=[row["all_gather"] for row in rows], label="two all-to-alls")
    axis.set(
        xlabel="domain size", ylabel="messages", yscale="log", title=f"Messages per layer, {content['dcs']} workers"
    )
    axis.legend()


def _speedups(axis: Any, content: dict[str, Any]) -> None:
    slowest = min(row["bandwidth"] for row in content["rows"])
    rows = [row for row in content["rows"] if row["bandwidth"] == slowest and row["assumed"].startswith("32")]
    for kind, value in sorted({(row["kind"], row["value"]) for row in rows}):
        found = [(row["dcs"], row["ratio"]) for row in rows if (row["kind"], row["value"]) == (kind, value)]
        axis.plot(*zip(*found, strict=True), ":", marker=".", label=f"paper's model, {kind} = {value:g}")
    plans = sorted({result["plan"] for point in content["points"] for result in point["results"]} - {"ep"})
    for plan in plans:
        found = []
        for point in content["points"]:
            seconds = {result["plan"]: result["step_s"] for result in point["results"]}
            if plan in seconds:
                found.append((int(point["value"]), seconds["ep"] / seconds[plan]))
        axis.plot(*zip(*found, strict=True), marker="o", label=f"whole step, {plan}")
    axis.axhline(1, color="black", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="DCs", ylabel="times faster than plain EP")
    axis.set_title(
        "Dotted: the paper's model of a forward pass, 32 experts in all.\n"
        "Solid: the whole step with gradient return, against EP that sends a token once per DC",
        fontsize=9,
    )
    axis.legend(fontsize=8, ncols=2)


_DRAWN = {"16": _traffic, "messages": _messages, "17": _speedups}
