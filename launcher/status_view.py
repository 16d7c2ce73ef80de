"""`hybridep status`: how the links of this user's running coordinators on this machine are, as a live table."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hybridep_rt.errors import ConnectFailed
from hybridep_rt.metrics import LinkStatus
from hybridep_rt.runtime.status import Status, ask
from topology.units import format_time

_NUMBERS = ("sent", "received", "RTT", "sent again", "reconnects", "unacked", "queued", "credit", "stalls")
_NOBODY = "hybridep: no coordinator of yours runs on this machine"


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in SI units once, and end.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 60.0), default=1.0, show_default=True, help="Seconds.")
def status(as_json: bool, every_s: float) -> None:
    """Show the links of the jobs that run on this machine, until they end or Ctrl-C. Exit code 1: none runs."""
    found = ask_all(status_sockets(Path(tempfile.gettempdir())))
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
    elif found:
        _show(found, every_s)
    if not found:
        click.echo(_NOBODY, err=True)
        raise click.exceptions.Exit(1)


def status_sockets(base: Path) -> list[Path]:
    """The sockets where coordinators answer, in the job folders of this user below `base`."""
    return [path for path in sorted(base.glob("hybridep-*-*/status")) if _is_our_socket(path)]


def ask_all(paths: Iterable[Path]) -> list[Status]:
    """What the coordinators say. Who has just ended, or was killed and left its socket, is left out."""
    answers = []
    for path in paths:
        try:
            answers.append(ask(str(path)))
        except ConnectFailed:
            continue
    return sorted(answers, key=lambda answer: (answer.who, answer.pid))


def view(found: Sequence[Status]) -> RenderableType:
    """One table per coordinator, one line per link."""
    return Group(*(_table(each) for each in found))


def _show(found: Sequence[Status], every_s: float) -> None:
    """On a terminal again and again, else once."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(view(found))
        return
    try:
        with Live(view(found), console=console, auto_refresh=False) as live:
            while found:
                live.update(view(found), refresh=True)
                time.sleep(every_s)
                found = ask_all(status_sockets(Path(tempfile.gettempdir())))
    except KeyboardInterrupt:
        return


def _is_our_socket(path: Path) -> bool:
    """Anyone may make such a folder in the common one for temporary files."""
    try:
        found, folder = path.lstat(), path.parent.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == folder.st_uid == os.getuid() and not folder.st_mode & 0o077


def _table(status: Status) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
    table.title = Text(f"{status.who}  (pid {status.pid})")
    table.add_column("link to", overflow="fold")
    for name in _NUMBERS:
        table.add_column(name, justify="left" if name == "queued" else "right", overflow="fold")
    for peer, link in sorted(status.links.items()):
        table.add_row(_peer(peer, link), *_cells(link))
    return table


def _peer(name: str, link: LinkStatus) -> Text:
    mark = ("● ", "green") if link.is_up else ("○ ", "bold red")
    failure = "" if link.is_up or not link.last_failure else f"\n  {link.last_failure}"
    return Text.assemble(mark, name, (failure, "red"))


def _cells(link: LinkStatus) -> tuple[str, ...]:
    return (
        f"{_size(link.sent_bytes_per_s)}/s",
        f"{_size(link.received_bytes_per_s)}/s",
        "–" if link.rtt_s is None else format_time(link.rtt_s),
        _size(link.retransmitted_bytes),
        str(link.reconnects),
        _size(link.unacked_bytes),
        ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in link.queued_bytes.items() if nbytes) or "–",
        _share(link.window_bytes - link.peer_holds_bytes, link.window_bytes),
        str(link.credit_stalls),
    )


def _share(left: int, window: int) -> str:
    """How much of the window is left: at 0 % the link waits for its peer to deal with what it has."""
    return f"{max(0, left) / window:.0%}" if window else "–"


def _size(nbytes: float) -> str:
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {prefix}B"
    return f"{nbytes:.0f} B"
