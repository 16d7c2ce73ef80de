"""`hybridep testbed`: a WAN on this machine. A thin shell."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from launcher.testbed import bed as beds
from launcher.testbed.bed import Testbed
from launcher.testbed.control import Change
from launcher.testbed.derive import access_of, shapes_of
from launcher.testbed.inside import write_topology
from launcher.testbed.measure import measure
from launcher.testbed.report import json_of, table_of
from launcher.testbed.rights import obtain_rights
from launcher.testbed.shapes_text import changes_of
from launcher.testbed.shaping import Access, Shape
from launcher.testbed.sites import Program, run_all
from launcher.testbed.ssh import daemons
from launcher.testbed.verdict import Verdict, expect, judge
from topology import Topology, load
from topology.errors import ConfigError
from topology.source import PRESET

_MATRIX_BITS_PER_S = (25e6, 100e6, 1e9)
_MATRIX_RTT_S = (0.0, 0.040, 0.200)
# gloo and NCCL stay inside a DC, which is one host here.
_INSIDE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class _BeforeAndAfter(click.Command):
    """A command whose own arguments end at the first `--`; what follows is the program to run, untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["program"] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND"]


@click.group()
def testbed() -> None:
    """A WAN on this machine: a network namespace per DC, joined by a relay that keeps to the topology's links.

    Needs /dev/net/tun, iproute2, util-linux, and root or user namespaces. Traffic stays on this machine, at
    addresses of 198.18.0.0/15.
    """


@testbed.command(cls=_BeforeAndAfter, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("topology")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of loss and jitter.")
@click.option("--single-mpirun", is_flag=True, help="One mpirun over all DCs, by SSH between them.")
@click.pass_context
def run(ctx: click.Context, topology: str, seed: int, single_mpirun: bool) -> None:
    """Train over the testbed: `hybridep run` with one mpirun per site, each inside its DC.

    After TOPOLOGY, all options of `hybridep run` may follow too: --plan, --codec, --log-dir and so on.
    """
    words = [*ctx.args, "--", *_program(ctx)]
    layout = load(topology)
    with _testbed(layout, seed) as bed:
        inside = write_topology(layout, bed.directory, one_mpirun=single_mpirun)
        start = _run_spanning if single_mpirun else _run_per_site
        status = start(bed, inside, words)
    ctx.exit(status)


def _run_per_site(bed: Testbed, topology: Path, words: list[str]) -> int:
    token = bed.directory / "token"
    token.write_text(secrets.token_hex(32))
    programs = []
    for number, name in enumerate(bed.names):
        line = [_hybridep(), "run", str(topology), "--site", name, "--token-file", str(token), *words]
        programs.append(Program(name, "", bed.command(name, line), _INSIDE | _scratch(bed, f"site{number}")))
    return run_all(programs)


def _run_spanning(bed: Testbed, topology: Path, words: list[str]) -> int:
    first = bed.names[0]
    inside = _INSIDE | _scratch(bed, "scratch")
    with daemons(bed, {**inside, "PATH": os.environ.get("PATH", os.defpath)}) as variables:
        line = bed.command(first, [_hybridep(), "run", str(topology), *words])
        return run_all([Program(first, "", line, inside | variables)])


def _scratch(bed: Testbed, name: str) -> dict[str, str]:
    """A directory for temporary files that goes with the testbed."""
    path = bed.directory / name
    path.mkdir()
    return {"TMPDIR": str(path), "XDG_RUNTIME_DIR": str(path)}


@testbed.command("exec", cls=_BeforeAndAfter)
@click.argument("topology")
@click.option("--dc", "only", multiple=True, help="Only in this DC; may be repeated.")
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Write each DC's output to a file.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of loss and jitter.")
@click.pass_context
def execute(ctx: click.Context, topology: str, only: Sequence[str], log_dir: Path | None, seed: int) -> None:
    """Run any command in every DC.

    HYBRIDEP_DC names the DC, HYBRIDEP_TOPOLOGY the topology with the testbed's WAN addresses, and
    HYBRIDEP_TESTBED_ADDRESSES lists them: a=198.18.0.1,b=198.18.0.2.
    """
    program = _program(ctx)
    layout = load(topology)
    for name in only:
        layout.dc_index(name)
    with _testbed(layout, seed) as bed:
        shared = {
            "HYBRIDEP_TOPOLOGY": str(write_topology(layout, bed.directory)),
            "HYBRIDEP_TESTBED_ADDRESSES": ",".join(f"{name}={bed.address(name)}" for name in bed.names),
        }
        names = [name for name in bed.names if not only or name in only]
        programs = [
            Program(name, f"[{name}] ", bed.command(name, program), shared | {"HYBRIDEP_DC": name}) for name in names
        ]
        status = run_all(programs, log_dir)
    ctx.exit(status)


@testbed.command()
@click.argument("where", metavar="TOPOLOGY|TESTBED")
@click.argument("pair")
@click.option("--rate", help="Such as '100 Mbit/s'.")
@click.option("--rtt", help="Half of it each way, such as '40 ms'.")
@click.option("--jitter", help="Up to so much more delay, such as '2 ms'.")
@click.option("--loss", help="Such as '0.1 %'.")
@click.option("--queue", help="Limit of the queue, such as '64 KiB'.")
@click.option("--cut", type=click.FloatRange(0, 86400), metavar="SECONDS", help="Drop everything for so long.")
@click.option("--stall", type=click.FloatRange(0, 86400), metavar="SECONDS", help="Hold everything for so long.")
def shape(where: str, pair: str, cut: float | None, stall: float | None, **words: str | None) -> None:
    """Change a link of a running testbed. PAIR is 'a->b' or 'a<->b'."""
    changes = changes_of(pair, words, cut, stall)
    directory = _find(where)
    for change in changes:
        beds.send_change(directory, change)


@testbed.command()
@click.argument("topology", required=False)
@click.option("--seconds", type=click.FloatRange(1, 600), default=4, show_default=True, help="Of sending, per link.")
@click.option("--json", "as_json", is_flag=True, help="All numbers in SI, as JSON.")
@click.pass_context
def verify(ctx: click.Context, topology: str | None, seconds: float, as_json: bool) -> None:
    """Measure rate and RTT of every directed link against the topology; exit status 1 if one is off by over 5 %.

    Without TOPOLOGY: two DCs at 25 Mbit/s, 100 Mbit/s and 1 Gbit/s, each at 0, 40 and 200 ms; about two minutes.
    """
    verdicts = _verify_matrix(seconds) if topology is None else _verify_topology(load(topology), seconds)
    if as_json:
        click.echo(json_of(verdicts))
    else:
        Console().print(table_of(verdicts))
    ctx.exit(0 if all(verdict.passed for verdict in verdicts) else 1)


def _verify_topology(layout: Topology, seconds: float) -> list[Verdict]:
    access, shapes = access_of(layout), shapes_of(layout)
    with _testbed(layout, seed=0) as bed:
        return [_verdict(bed, pair, access, shapes, seconds) for pair in shapes]


def _verify_matrix(seconds: float) -> list[Verdict]:
    obtain_rights()
    access = [Access(), Access()]
    usual = Shape(_MATRIX_BITS_PER_S[0] / 8)
    shapes = {(0, 1): usual, (1, 0): usual}
    verdicts = []
    with _orderly_end(), Testbed(("a", "b"), access, shapes, label="verify") as bed:
        for bits_per_s in _MATRIX_BITS_PER_S:
            for rtt_s in _MATRIX_RTT_S:
                now = replace(usual, rate_bytes_per_s=bits_per_s / 8, delay_s=rtt_s / 2)
                for here, there in (("a", "b"), ("b", "a")):
                    values = {"rate_bytes_per_s": now.rate_bytes_per_s, "delay_s": now.delay_s}
                    bed.change(Change(here, there, values))
                shapes = dict.fromkeys(shapes, now)
                verdicts += [_verdict(bed, pair, access, shapes, seconds) for pair in shapes]
    return verdicts


def _verdict(
    bed: Testbed,
    pair: tuple[int, int],
    access: Sequence[Access],
    shapes: dict[tuple[int, int], Shape],
    seconds: float,
) -> Verdict:
    source, target = pair
    names = (bed.names[source], bed.names[target])
    expected = expect(names, shapes[pair], shapes[target, source], access[source], access[target])
    return judge(expected, measure(bed, expected, seconds))


@contextmanager
def _testbed(layout: Topology, seed: int) -> Iterator[Testbed]:
    obtain_rights()
    bed = Testbed(layout.dc_names, access_of(layout), shapes_of(layout), label=_label(layout.source), seed=seed)
    with _orderly_end(), bed:
        yield bed


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as an exception does: with everything cleaned up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # nohup has SIGHUP ignored, and means it.
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hybridep() -> str:
    """The command itself, of the Python environment that this runs in."""
    return str(Path(sys.executable).parent / "hybridep")


def _program(ctx: click.Context) -> list[str]:
    program: list[str] = ctx.meta.get("program", [])
    if not program:
        raise click.UsageError("the command to run is missing: ... -- COMMAND", ctx)
    return program


def _label(source: str) -> str:
    return source if source.startswith(PRESET) else str(Path(source).resolve())


def _find(where: str) -> Path:
    """The directory of the one running testbed of that name or topology. Raises ConfigError."""
    known = beds.running()
    found = [each for each in known if where == each.name or _label(where) == each.label]
    if len(found) == 1:
        return found[0].directory
    names = ", ".join(f"{each.name} ({each.label})" for each in (found or known)) or "none"
    problem = "more than one testbed runs on it" if found else "no running testbed has this name or topology"
    raise ConfigError(f"{where}: {problem}; running: {names}")
