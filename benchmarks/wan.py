"""How much of a slow link does the runtime fill? Worker to worker of another DC with TLS, against tuned iperf3.

    python -m benchmarks.wan --json benchmarks/results/wan.json [--quick]

Both run over the testbed, in turns: one TCP stream of iperf3 from host to host, and messages of 1 MiB from worker to
coordinator to coordinator to worker. The first seconds of each are not counted. On the link without loss iperf3 runs
with bbr and with cubic, and the better one counts. The aims: .95 at 1 Gbit/s and 50 ms, .85 at 200 Mbit/s, 100 ms and
0.1 % loss, where the testbed drops single packets also out of the kernel's super-packets. Needs iperf3, and what
`hybridep testbed` needs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks import pair
from benchmarks.intervals import Interval, interleave, median_interval, ratio_interval
from benchmarks.report import report, write_report
from benchmarks.transport import send_loads
from hybridep_rt.transport.worker_link import WorkerLink
from launcher.certs import write_certificates
from launcher.testbed import tun
from launcher.testbed.bed import Testbed
from launcher.testbed.rights import obtain_rights
from launcher.testbed.shaping import Access, Shape
from topology import Link

MESSAGE_BYTES = 1 << 20
RUNTIME = "runtime, TLS"
PORT = 5201
_READY_S = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """One link and what to compare with."""

    name: str
    shape: Shape
    controls: tuple[str, ...]
    aim: float


CASES = (
    Case("1 Gbit/s, 50 ms", Shape(125e6, 0.025), ("bbr", "cubic"), 0.95),
    Case("200 Mbit/s, 100 ms, 0.1 % loss", Shape(25e6, 0.050, loss=0.001), ("bbr",), 0.85),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One link. `ratio`: the runtime's goodput over that of the best iperf3, of neighbours."""

    case: str
    aim: float
    goodput_bytes_per_s: dict[str, Interval]
    best: str
    ratio: Interval


def receive_tail(link: WorkerLink, told: Connection) -> None:
    """The receiving worker: tells when the first `skipped` messages were there, and when all."""
    while (task := told.recv()) is not None:
        count, skipped = task
        for number in range(count):
            link.receive(pair.HERE, "load", pair.AT)
            if number + 1 == skipped:
                told.send(time.monotonic())
        told.send(time.monotonic())


def iperf_s_per_byte(bed: Testbed, control: str, seconds: float, skipped_s: float) -> float:
    """One stream from a to b. Raises RuntimeError where iperf3 fails."""
    server = subprocess.Popen(
        bed.command("b", ["iperf3", "--server", "--one-off", "--port", str(PORT), "--forceflush"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise RuntimeError("iperf3 does not listen")
        words = ["iperf3", "--client", bed.address("b"), "--port", str(PORT), "--congestion", control, "--json"]
        words += ["--time", f"{seconds:g}", "--omit", f"{skipped_s:g}", "--length", "1M"]
        client = subprocess.run(
            bed.command("a", words), capture_output=True, text=True, timeout=seconds + skipped_s + _READY_S, check=False
        )
        answer = json.loads(client.stdout)
        if "error" in answer:
            raise RuntimeError(f"iperf3: {answer['error']}")
        return 8 / float(answer["end"]["sum_received"]["bits_per_second"])
    finally:
        server.kill()
        server.wait()


def runtime_s_per_byte(ours: pair.Pair, rate_bytes_per_s: float, seconds: float, skipped_s: float) -> float:
    """As many messages as the link carries in that time."""
    skipped = int(rate_bytes_per_s * skipped_s / MESSAGE_BYTES) + 1
    counted = int(rate_bytes_per_s * seconds / MESSAGE_BYTES) + 1
    ours.there.send((skipped + counted, skipped))
    ours.here.send((skipped + counted, MESSAGE_BYTES))
    pair.ask(ours.here)
    began, ended = pair.ask(ours.there), pair.ask(ours.there)
    return float(ended - began) / (counted * MESSAGE_BYTES)


def measure(case: Case, rounds: int, seconds: float, skipped_s: float) -> Result:
    """Everything over one link, in turns."""
    shape = case.shape
    topology = pair.two_sites(Link(shape.rate_bytes_per_s, 2 * shape.delay_s))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="certificates-"))
        write_certificates(Path(folder), topology, timedelta(days=1))
        shapes = {(0, 1): shape, (1, 0): shape}
        bed = stack.enter_context(Testbed(("a", "b"), [Access(), Access()], shapes, label="benchmarks.wan"))
        first, second = (pair.Place(bed.address(name), partial(tun.inside, bed.path(name))) for name in "ab")
        ours = stack.enter_context(pair.running(topology, send_loads, receive_tail, folder, places=(first, second)))
        arms: dict[str, Callable[[], float]] = {
            f"iperf3, {control}": partial(iperf_s_per_byte, bed, control, seconds, skipped_s)
            for control in case.controls
        }
        arms[RUNTIME] = partial(runtime_s_per_byte, ours, shape.rate_bytes_per_s, seconds, skipped_s)
        taken = interleave(arms, rounds)
    goodput = {name: median_interval([1 / value for value in values]) for name, values in taken.items()}
    best = max((name for name in goodput if name != RUNTIME), key=lambda name: goodput[name].value)
    return Result(case.name, case.aim, goodput, best, ratio_interval(taken[RUNTIME], taken[best]))


def table(results: list[Result]) -> Table:
    """One line per link and way."""
    shown = Table(title="One stream over a slow link", caption="medians [95 %]")
    for column in ("link", "way", "Mbit/s", "of the best iperf3", "aim"):
        shown.add_column(column, justify="left" if column in ("link", "way") else "right")
    for result in results:
        for name, goodput in result.goodput_bytes_per_s.items():
            ratio, ours = result.ratio, name == RUNTIME
            compared = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" if ours else ""
            aim = f"{result.aim:g}" if ours else ""
            shown.add_row(result.case, name, f"{goodput.value * 8 / 1e6:.1f}", compared, aim)
    return shown


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="One short round: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Compare the runtime over slow links with iperf3."""
    if shutil.which("iperf3") is None:
        raise click.ClickException("iperf3 is not installed: it is in the package of that name of your system")
    obtain_rights()
    rounds, seconds, skipped_s = (1, 2.0, 2.0) if quick else (5, 8.0, 3.0)
    console = Console(width=120)
    results = []
    for case in CASES:
        with console.status(case.name):
            results.append(measure(case, rounds, seconds, skipped_s))
    console.print(table(results))
    if json_path is not None:
        settings = {"quick": quick, "rounds": rounds, "seconds": seconds, "skipped_s": skipped_s}
        write_report(json_path, report("wan", settings, [asdict(result) for result in results]))


if __name__ == "__main__":
    main()
