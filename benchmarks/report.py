"""What every benchmark publishes: numbers with the machine and the date, as versioned JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.intervals import Comparison, Floor, Interval, verdict

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
NOISE = RESULTS / "noise.json"


def machine() -> dict[str, Any]:
    """What the numbers depend on. `load_1min`: processes that wanted a core, of others too."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_1min": os.getloadavg()[0],
    }


def report(benchmark: str, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Any:
    """One benchmark's JSON. `results`: one object per case, its intervals as {value, low, high}."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "results": list(results),
    }


def write_report(path: Path, content: Any) -> None:
    """As indented JSON, for which the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_report(path: Path, benchmark: str) -> Any:
    """A published report. Raises ValueError where the file is of another benchmark or schema."""
    content = json.loads(path.read_text())
    found = (content.get("benchmark"), content.get("schema")) if isinstance(content, dict) else None
    if found != (benchmark, SCHEMA):
        raise ValueError(f"{path}: expected benchmark {benchmark!r} of schema {SCHEMA}, found {found}")
    return content


def load_floor(kind: str, path: Path = NOISE) -> Floor:
    """The published noise floor of one kind of measurement. Raises ValueError where there is none of that kind."""
    floors = read_report(path, "noise")["settings"]["floors"]
    if kind not in floors:
        raise ValueError(f"{path}: no noise floor for {kind!r}, only for {', '.join(floors)}")
    return Floor(floors[kind])


def comparison_json(comparison: Comparison, floor: Floor) -> dict[str, Any]:
    """A comparison with what may be said about it."""
    return asdict(comparison) | {"floor": floor.ratio, "verdict": verdict(comparison.ratio, floor)}


def tick_in_decades(axis: Any) -> None:
    """Label a plot's logarithmic axis at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def comparison_table(title: str, rows: Sequence[tuple[str, Comparison, Floor]]) -> Table:
    """One line per case: both medians, the paired ratio with its interval, the floor and the verdict."""
    table = Table(title=title, caption=f"median [95 % interval]; {_pairs(rows)} pairs a case")
    for column in ("case", "base ms", "other ms", "ratio", "floor", "other is"):
        table.add_column(column, justify="left" if column in ("case", "other is") else "right")
    for case, found, floor in rows:
        table.add_row(
            case,
            f"{found.base} {_milliseconds(found.base_s)}",
            f"{found.other} {_milliseconds(found.other_s)}",
            f"{found.ratio.value:.3f} [{found.ratio.low:.3f}, {found.ratio.high:.3f}]",
            f"{floor.ratio:.3f}",
            verdict(found.ratio, floor),
        )
    return table


def _milliseconds(interval: Interval) -> str:
    return f"{interval.value * 1e3:.1f}"


def _pairs(rows: Sequence[tuple[str, Comparison, Floor]]) -> str:
    return ", ".join(map(str, sorted({found.pairs for _, found, _ in rows})))


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
