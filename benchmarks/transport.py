"""Worker -> coordinator -> coordinator -> worker: goodput and CPU time, against a chain that only forwards bytes.

    python -m benchmarks.transport --json benchmarks/results/transport.json [--quick]

Once without and once with TLS between the coordinators, and between the forwarders of the bare chain.

Both chains have the same four processes and the same kinds of socket (Unix, TCP on loopback, Unix), live at the same
time and move the same bytes in turns. The aim is at least 0.8 times the bare chain's goodput.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import chain, pair
from benchmarks.intervals import Interval, interleave, median_interval, ratio_interval
from benchmarks.report import report, write_report
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.transport.worker_link import WorkerLink
from launcher.certs import write_certificates
from topology import Link

AIM = 0.8
BARE, RUNTIME = "bare chain", "runtime"
_LINK = Link(1.25e9, 0.0001)
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Load:
    """What one measurement moves."""

    messages: int
    message_bytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.messages * self.message_bytes


FULL = (Load(128, 4 << 20), Load(4096, 64 << 10))
QUICK = (Load(32, 4 << 20), Load(512, 64 << 10))


@dataclass(frozen=True, slots=True)
class Result:
    """One load over both chains. `goodput_ratio`: the runtime's against the bare chain's, of neighbours."""

    load: Load
    tls: bool
    goodput_bytes_per_s: dict[str, Interval]
    cpu_s_per_gb: dict[str, Interval]
    goodput_ratio: Interval


def send_loads(link: WorkerLink, told: Connection) -> None:
    """The sending worker: tells for each load when it began."""
    while (task := told.recv()) is not None:
        count, nbytes = task
        body = bytes(nbytes)
        told.send(time.monotonic())
        for _ in range(count):
            link.send(pair.THERE, "load", pair.AT, [body], traffic=Traffic.EXPERTS)


def receive_loads(link: WorkerLink, told: Connection) -> None:
    """The receiving worker: tells for each load when it had all. One machine, one clock."""
    while (task := told.recv()) is not None:
        for _ in range(task[0]):
            link.receive(pair.HERE, "load", pair.AT)
        told.send(time.monotonic())


def measure(loads: Sequence[Load], rounds: int, tls: bool, console: Console) -> list[Result]:
    """Every load over both chains in turns."""
    topology = pair.two_sites(_LINK)
    with tempfile.TemporaryDirectory(prefix="certificates-") as folder:
        write_certificates(Path(folder), topology, timedelta(days=1))
        used = folder if tls else None
        with chain.running(used) as bare, pair.running(topology, send_loads, receive_loads, used) as ours:
            ways = {BARE: (bare.sender, bare.receiver, bare.pids), RUNTIME: (ours.here, ours.there, ours.pids)}
            shown = "with TLS" if tls else "without TLS"
            return [_measure_one(load, rounds, tls, ways) for load in track(loads, shown, console=console)]


def _measure_one(
    load: Load, rounds: int, tls: bool, ways: dict[str, tuple[Connection, Connection, tuple[int, ...]]]
) -> Result:
    def once(sender: Connection, receiver: Connection, pids: tuple[int, ...]) -> tuple[float, float]:
        before_s = pair.cpu_s(pids)
        receiver.send((load.messages, load.message_bytes))
        sender.send((load.messages, load.message_bytes))
        began, ended = pair.ask(sender), pair.ask(receiver)
        return ended - began, pair.cpu_s(pids) - before_s

    arms = {name: lambda way=way: once(*way) for name, way in ways.items()}
    taken = interleave(arms, rounds, warmup=1)
    seconds = {name: [wall for wall, _ in values] for name, values in taken.items()}
    return Result(
        load,
        tls,
        {name: median_interval([load.nbytes / wall for wall in values]) for name, values in seconds.items()},
        {name: median_interval([cpu / load.nbytes * _GB for _, cpu in values]) for name, values in taken.items()},
        ratio_interval(seconds[RUNTIME], seconds[BARE]),
    )


def table(results: Sequence[Result]) -> Table:
    """One line per load and chain."""
    shown = Table(title=f"Worker to worker of another DC (aim: {AIM:g} of the bare chain)", caption="medians [95 %]")
    for column in ("load", "way", "MB/s", "CPU s/GB", "of the bare chain"):
        shown.add_column(column, justify="left" if column in ("load", "way") else "right")
    for result in results:
        load = f"{result.load.messages} x {result.load.message_bytes >> 10} KiB" + (", TLS" if result.tls else "")
        for name, goodput in result.goodput_bytes_per_s.items():
            ratio = result.goodput_ratio
            compared = "" if name == BARE else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
            shown.add_row(load, name, f"{goodput.value / 1e6:.0f}", f"{result.cpu_s_per_gb[name].value:.2f}", compared)
    return shown


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="Small loads and few rounds: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Move bytes between two workers over the runtime and over a bare chain, in turns."""
    console = Console(width=120)
    loads, rounds = (QUICK, 4) if quick else (FULL, 15)
    results = [result for tls in (False, True) for result in measure(loads, rounds, tls, console)]
    console.print(table(results))
    if json_path is not None:
        settings = {"quick": quick, "rounds": rounds, "aim": AIM}
        write_report(json_path, report("transport", settings, [asdict(result) for result in results]))


if __name__ == "__main__":
    main()
