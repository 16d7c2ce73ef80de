"""How long a token message takes on a link where experts are queued: does it pass them?

    python -m benchmarks.priority --json benchmarks/results/priority.json [--quick]

The coordinators emulate a link of 100 Mbit/s and 40 ms. 256 MB of experts wait at one end; now and then a message of
64 KiB of tokens is sent after them. From send to receive it may take the one-way delay and 4 chunk times, at p99.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import pair
from benchmarks.report import report, write_report
from hybridep_rt.config import Limits
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.transport.worker_link import WorkerLink
from topology import Link

LINK = Link(12.5e6, 0.04)
TOKEN_BYTES = 64 << 10
EXPERT_BYTES = 4_000_000
ALLOWED_CHUNKS = 4
_EVERY_S = 0.15
_STAMP = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Delays:
    """Of token messages behind so many bytes of experts, in seconds; 0 bytes: the link was idle."""

    queued_bytes: int
    messages: int
    p50_s: float
    p99_s: float
    worst_s: float

    @classmethod
    def of(cls, queued_bytes: int, delays_s: Sequence[float]) -> Delays:
        """Raises ValueError without delays."""
        if not delays_s:
            raise ValueError("no message was measured")
        p50_s, p99_s = np.quantile(np.asarray(delays_s), [0.5, 0.99]).tolist()
        return cls(queued_bytes, len(delays_s), p50_s, p99_s, max(delays_s))


def allowed_s(link: Link = LINK) -> float:
    """The one-way delay and 4 chunk times."""
    chunk_s = Limits().chunk_bytes(link.bandwidth_bytes_per_s) / link.bandwidth_bytes_per_s
    return link.rtt_s / 2 + ALLOWED_CHUNKS * chunk_s


def send_tokens(link: WorkerLink, told: Connection) -> None:
    """The sending worker: experts first, then tokens that carry the time at which they were sent."""
    experts = bytes(EXPERT_BYTES)
    while (task := told.recv()) is not None:
        expert_messages, token_messages = task
        for _ in range(expert_messages):
            link.send(pair.THERE, "experts", pair.AT, [experts], traffic=Traffic.EXPERTS)
        for _ in range(token_messages):
            time.sleep(_EVERY_S)
            body = _STAMP.pack(time.monotonic()) + bytes(TOKEN_BYTES - _STAMP.size)
            link.send(pair.THERE, "tokens", pair.AT, [body], traffic=Traffic.TOKENS)


def receive_tokens(link: WorkerLink, told: Connection) -> None:
    """The receiving worker: answers with the delays of the tokens, and whether experts were still under way then."""
    while (task := told.recv()) is not None:
        expert_messages, token_messages = task
        delays_s = []
        for _ in range(token_messages):
            message = link.receive(pair.HERE, "tokens", pair.AT)
            # One machine, one clock.
            delays_s.append(time.monotonic() - _STAMP.unpack_from(message.payload)[0])
        last_token = time.monotonic()
        for _ in range(expert_messages):
            link.receive(pair.HERE, "experts", pair.AT)
        told.send((delays_s, time.monotonic() - last_token))


def measure(expert_messages: int, token_messages: int) -> list[Delays]:
    """On an idle link, then behind experts. Raises RuntimeError if the experts were through before the last token."""
    found = []
    with pair.running(pair.two_sites(LINK, emulate=True), send_tokens, receive_tokens) as running:
        for queued in (0, expert_messages):
            running.there.send((queued, token_messages))
            running.here.send((queued, token_messages))
            delays_s, rest_s = pair.ask(running.there)
            if queued and rest_s < LINK.rtt_s:
                raise RuntimeError("the experts were through before the last token was sent")
            found.append(Delays.of(queued * EXPERT_BYTES, delays_s))
    return found


def table(found: Sequence[Delays]) -> Table:
    """One line per queue."""
    title = (
        f"Delay of {TOKEN_BYTES >> 10} KiB of tokens on 100 Mbit/s, 40 ms (allowed at p99: {allowed_s() * 1e3:.0f} ms)"
    )
    shown = Table(title=title)
    for column in ("experts before it", "messages", "p50", "p99", "worst"):
        shown.add_column(column, justify="right")
    for each in found:
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (each.p50_s, each.p99_s, each.worst_s))
        shown.add_row(f"{each.queued_bytes / 1e6:.0f} MB", str(each.messages), *times)
    return shown


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="A tenth of the experts and few tokens: to see that it works.")
def main(json_path: Path | None, quick: bool) -> None:
    """Send tokens behind queued experts, and see how long they take."""
    found = measure(8, 10) if quick else measure(64, 100)
    Console(width=120).print(table(found))
    if json_path is not None:
        settings = {"quick": quick, "link": asdict(LINK), "token_bytes": TOKEN_BYTES, "allowed_s": allowed_s()}
        write_report(json_path, report("priority", settings, [asdict(each) for each in found]))


if __name__ == "__main__":
    main()
