"""Would a DC gain from several coordinators to one other DC? Bare forwarder chains, one against two side by side.

    python -m benchmarks.lanes --json benchmarks/results/lanes.json [--quick]

The same bytes go through one chain (sender, two forwarders, receiver) or half each through two, without and with TLS
between the forwarders, in turns. Lanes pay where two move more per second: where a forwarder's core is what limits, and
others are free. Each costs as much CPU time per byte as the only one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import chain, pair
from benchmarks.chain import Chain
from benchmarks.intervals import Interval, interleave, median_interval, ratio_interval
from benchmarks.report import report, write_report
from hybridep_rt.config import Limits
from launcher.certs import write_certificates
from topology import Link

LANES = (1, 2)
MESSAGE_BYTES = Limits().chunk_max_bytes
FULL_MESSAGES, QUICK_MESSAGES = 256, 16
_LINK = Link(1.25e9, 0.0001)
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Passage:
    """One measurement. `forwarders_cpu_s`: of the processes that stand for coordinators, all lanes together."""

    wall_s: float
    forwarders_cpu_s: float
    all_cpu_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """`lanes` chains side by side, without or with TLS. `goodput_ratio`: against one lane, of neighbours."""

    lanes: int
    tls: bool
    goodput_bytes_per_s: Interval
    goodput_ratio: Interval
    forwarders_cpu_s_per_gb: Interval
    all_cpu_s_per_gb: Interval


def measure(messages: int, rounds: int) -> list[Result]:
    """All arms in turns; `messages` has to be a multiple of the number of lanes."""
    with tempfile.TemporaryDirectory(prefix="certificates-") as folder, contextlib.ExitStack() as stack:
        write_certificates(Path(folder), pair.two_sites(_LINK), timedelta(days=1))
        chains = {
            tls: [stack.enter_context(chain.running(folder if tls else None)) for _ in range(max(LANES))]
            for tls in (False, True)
        }
        arms = {
            f"{tls} {lanes}": lambda used=chains[tls][:lanes]: move(used, messages) for tls in chains for lanes in LANES
        }
        taken = interleave(arms, rounds, warmup=1)
    return [result_of(lanes, tls, taken, messages) for tls in chains for lanes in LANES]


def move(lanes: Sequence[Chain], messages: int) -> Passage:
    """Each lane takes its share of the messages at the same time as the others."""
    forwarders = tuple(pid for lane in lanes for pid in lane.pids[:2])
    ends = tuple(pid for lane in lanes for pid in lane.pids[2:])
    before = pair.cpu_s(forwarders), pair.cpu_s(ends)
    for lane in lanes:
        lane.receiver.send((messages // len(lanes), MESSAGE_BYTES))
    for lane in lanes:
        lane.sender.send((messages // len(lanes), MESSAGE_BYTES))
    began = min([pair.ask(lane.sender) for lane in lanes])
    ended = max([pair.ask(lane.receiver) for lane in lanes])
    forwarders_cpu_s, ends_cpu_s = pair.cpu_s(forwarders) - before[0], pair.cpu_s(ends) - before[1]
    return Passage(ended - began, forwarders_cpu_s, forwarders_cpu_s + ends_cpu_s)


def result_of(lanes: int, tls: bool, taken: dict[str, list[Passage]], messages: int) -> Result:
    """What the passages of all arms, by "TLS lanes", say about one of them."""
    passages, nbytes = taken[f"{tls} {lanes}"], messages * MESSAGE_BYTES
    alone = taken[f"{tls} 1"]
    return Result(
        lanes,
        tls,
        median_interval([nbytes / each.wall_s for each in passages]),
        ratio_interval([each.wall_s for each in passages], [each.wall_s for each in alone]),
        median_interval([each.forwarders_cpu_s / nbytes * _GB for each in passages]),
        median_interval([each.all_cpu_s / nbytes * _GB for each in passages]),
    )


def table(results: Sequence[Result]) -> Table:
    """One line per arm."""
    shown = Table(title=f"Bare chains on {len(os.sched_getaffinity(0))} cores", caption="medians [95 %]")
    for column in ("chains", "MB/s", "of one chain", "forwarders' CPU s/GB", "all CPU s/GB"):
        shown.add_column(column, justify="left" if column == "chains" else "right")
    for result in results:
        ratio = result.goodput_ratio
        shown.add_row(
            f"{result.lanes}{', TLS' if result.tls else ''}",
            f"{result.goodput_bytes_per_s.value / 1e6:.0f}",
            "" if result.lanes == 1 else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
            f"{result.forwarders_cpu_s_per_gb.value:.2f}",
            f"{result.all_cpu_s_per_gb.value:.2f}",
        )
    return shown


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="Few bytes and few rounds: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Move the same bytes through one chain and through two, in turns."""
    messages, rounds = (QUICK_MESSAGES, 3) if quick else (FULL_MESSAGES, 15)
    results = measure(messages, rounds)
    Console(width=120).print(table(results))
    if json_path is not None:
        settings = {"quick": quick, "rounds": rounds, "messages": messages, "message_bytes": MESSAGE_BYTES}
        write_report(json_path, report("lanes", settings, [asdict(result) for result in results]))


if __name__ == "__main__":
    main()
