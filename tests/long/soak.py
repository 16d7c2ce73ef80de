"""Does a coordinator's memory stay where it is, however much passes and however often its link is cut?

    python -m tests.long.soak --json benchmarks/results/soak.json --plot benchmarks/results/soak.png [--share 0.01]

2 million messages of 64 B to 1 KiB and 20 GB in messages of 2.5 MB, half of them each way, over loopback, while the
connection between the two coordinators is cut every few seconds. Every message is checked where it arrives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click

from benchmarks import pair
from benchmarks.report import report, write_report
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.transport.worker_link import WorkerLink
from tests.proxy import Proxy
from topology import Link

ROUNDS = 1000
SMALL_PER_ROUND, SMALL_LEAST_BYTES, SMALL_MOST_BYTES = 1000, 64, 1024
LARGE_PER_ROUND, LARGE_BYTES = 4, 2_500_000
MARGIN_BYTES = 32 << 20
"""So much more than in the first tenth of the run may be resident later: about 16 bytes per message."""

_STAMP_BYTES = 8
_SAMPLE_S = 1.0
_CUT_S = 3.0
_PAGE_BYTES = 4096
_LINK = Link(1.25e9, 0.0001)


@dataclass(frozen=True, slots=True)
class Soak:
    """One run. `samples`: (seconds since the start, resident bytes of coordinator a, of b)."""

    small_messages: int
    large_bytes: int
    seconds: float
    cuts: int
    reconnects: int
    samples: list[tuple[float, int, int]]

    @property
    def growth_bytes(self) -> tuple[int, ...]:
        """By coordinator: its most resident bytes after the first tenth of the run, less its most in that tenth."""
        tenth = max(1, sum(each[0] <= self.seconds / 10 for each in self.samples))
        first, later = self.samples[:tenth], self.samples[tenth:] or self.samples
        return tuple(max(each[at] for each in later) - max(each[at] for each in first) for at in (1, 2))


def exchange(link: WorkerLink, told: Connection) -> None:
    """A worker: in each round both ends send, then both receive and check."""
    peer = Address(1 - link.address.dc, 0)
    large = bytes(range(256)) * (LARGE_BYTES // 256)
    while (rounds := told.recv()) is not None:
        for number in range(rounds):
            for index in range(SMALL_PER_ROUND):
                link.send(peer, "small", pair.AT, [_small(number, index)], traffic=Traffic.TOKENS, counts=(index,))
            for index in range(LARGE_PER_ROUND):
                payload = [_stamp(number, index), large]
                link.send(peer, "large", pair.AT, payload, traffic=Traffic.EXPERTS, counts=(index,))
            for index in range(SMALL_PER_ROUND):
                message = link.receive(peer, "small", pair.AT)
                assert (message.counts, message.payload) == ((index,), _small(number, index)), (number, index)
            for index in range(LARGE_PER_ROUND):
                message = link.receive(peer, "large", pair.AT)
                assert message.payload[:_STAMP_BYTES] == _stamp(number, index), (number, index)
                assert message.payload[_STAMP_BYTES:] == large, (number, index)
        told.send("done")


def soak(share: float) -> Soak:
    """Run that share of the rounds. Raises RuntimeError where a process ends early."""
    rounds = max(1, round(ROUNDS * share))
    with contextlib.ExitStack() as stack:
        proxies: list[Proxy] = []

        def between(where: tuple[str, int]) -> tuple[str, int]:
            proxies.append(stack.enter_context(Proxy(where)))
            return proxies[0].address

        with pair.running(pair.two_sites(_LINK), exchange, exchange, between=between) as running:
            [proxy] = proxies
            started = time.monotonic()
            for end in (running.here, running.there):
                end.send(rounds)
            # A short run is looked at, and cut, more often.
            samples = list(_sample(running, proxy, started, min(1.0, max(0.2, share))))
            seconds = time.monotonic() - started
            for end in (running.here, running.there):
                pair.ask(end)
    large_bytes = 2 * rounds * LARGE_PER_ROUND * (LARGE_BYTES // 256 * 256 + _STAMP_BYTES)
    small_messages = 2 * rounds * SMALL_PER_ROUND
    return Soak(small_messages, large_bytes, seconds, proxy.cuts, proxy.connections - 1, samples)


def write(found: Soak, share: float, json_path: Path | None, plot_path: Path | None) -> None:
    """All numbers as JSON, the memory over time as a picture."""
    if json_path is not None:
        settings = {"share": share, "cut_every_s": _CUT_S, "margin_bytes": MARGIN_BYTES}
        result = asdict(found) | {"growth_bytes": found.growth_bytes}
        columns = [list(column) for column in zip(*found.samples, strict=True)]
        result["samples"] = dict(zip(("seconds", "resident_bytes_a", "resident_bytes_b"), columns, strict=True))
        write_report(json_path, report("soak", settings, [result]))
    if plot_path is not None:
        _draw(found, plot_path)


def _small(number: int, index: int) -> bytes:
    size = SMALL_LEAST_BYTES + (number * SMALL_PER_ROUND + index) * 37 % (SMALL_MOST_BYTES - SMALL_LEAST_BYTES + 1)
    return _stamp(number, index) + bytes(size - _STAMP_BYTES)


def _stamp(number: int, index: int) -> bytes:
    return (number * SMALL_PER_ROUND + index).to_bytes(_STAMP_BYTES, "big")


def _sample(running: pair.Pair, proxy: Proxy, started: float, pace: float) -> Iterator[tuple[float, int, int]]:
    """The coordinators' memory again and again, and a cut now and then, until the first worker has done."""
    cut_at, done = started + _CUT_S * pace, False
    while not done:
        now = time.monotonic()
        if now >= cut_at:
            proxy.cut()
            cut_at = now + _CUT_S * pace
        yield round(now - started, 1), _resident_bytes(running.pids[0]), _resident_bytes(running.pids[1])
        done = running.here.poll(_SAMPLE_S * pace)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _draw(found: Soak, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    seconds = [each[0] for each in found.samples]
    for at, name in ((1, "a"), (2, "b")):
        axes.plot(seconds, [each[at] / 1e6 for each in found.samples], label=f"coordinator of {name}")
    axes.set(xlabel="s", ylabel="resident MB", ylim=(0, None))
    axes.set_title(
        f"{found.small_messages:,} small messages and {found.large_bytes / 1e9:.1f} GB, {found.reconnects} reconnects"
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here (PNG).")
@click.option("--share", type=click.FloatRange(0.001, 10.0), default=1.0, show_default=True, help="Of the full size.")
def main(json_path: Path | None, plot_path: Path | None, share: float) -> None:
    """Run it; the exit code is 1 where a coordinator has grown by more than the margin."""
    found = soak(share)
    write(found, share, json_path, plot_path)
    grown = ", ".join(f"{nbytes / 1e6:+.1f} MB" for nbytes in found.growth_bytes)
    click.echo(f"{found.seconds:.0f} s, {found.cuts} cuts, {found.reconnects} reconnects; a and b grew by {grown}")
    raise SystemExit(max(found.growth_bytes) > MARGIN_BYTES)


if __name__ == "__main__":
    main()
