"""The one mpirun command of a job: for each DC a coordinator and its workers, as an MPMD list of programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridep_rt.errors import ConfigError
from topology import Datacenter, Topology

_PYTHON = re.compile(r"(.*/)?python(3(\.\d+)?)?")
_COORDINATOR = "coordinator"
# Nothing waits in MPI but the start and the end of a job: there a rank should not burn the core that others compute on.
_IDLE = ("--mca", "mpi_yield_when_idle", "1", "--mca", "threads_pthreads_yield_strategy", "nanosleep")


@dataclass(frozen=True, slots=True)
class Rank:
    """Who an MPI rank is; `worker` None is the coordinator."""

    dc: str
    worker: int | None

    @property
    def tag(self) -> str:
        """`a/0` or `a/coordinator`: the prefix of its lines."""
        return f"{self.dc}/{_COORDINATOR if self.worker is None else self.worker}"

    def describe(self) -> str:
        """`worker 1 of DC "a"`."""
        role = _COORDINATOR if self.worker is None else f"worker {self.worker}"
        return f'{role} of DC "{self.dc}"'


@dataclass(frozen=True, slots=True)
class UserCommand:
    """What each worker runs: a script or (`is_module`) a module, and its arguments."""

    program: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """As the per-rank entry takes it."""
        return [*(["-m"] if self.is_module else []), self.program, *self.arguments]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the Python environment that mpirun starts in. `scratch`: a folder for MPI's own files."""

    mpirun: str
    python: str
    scratch: str
    is_root: bool


def parse_user_command(words: Sequence[str]) -> UserCommand:
    """`python train.py ARGS`, `train.py ARGS`, `python -m pkg.mod ARGS` or `-m pkg.mod ARGS`. Raises ConfigError."""
    rest = list(words)
    if rest and _PYTHON.fullmatch(rest[0]):
        del rest[0]
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest:
        raise ConfigError("say what to run after --, such as: -- python train.py")
    if rest[0].startswith("-"):
        raise ConfigError(f"{rest[0]}: options of Python itself can't be given, set PYTHON* variables instead")
    return UserCommand(rest[0], tuple(rest[1:]), is_module)


def started_dcs(topology: Topology, site: str | None) -> tuple[Datacenter, ...]:
    """The DCs whose processes this mpirun starts: all of them, or only `site`. Raises TopologyError."""
    return topology.datacenters if site is None else (topology.datacenters[topology.dc_index(site)],)


def ranks(dcs: Sequence[Datacenter]) -> list[Rank]:
    """Who each MPI rank is, in rank order."""
    return [Rank(dc.name, worker) for dc in dcs for worker in (None, *range(dc.workers))]


def mpirun_command(
    dcs: Sequence[Datacenter], topology_path: str, user: UserCommand, machine: Machine, exported: Sequence[str]
) -> list[str]:
    """The whole command. `exported`: names of the variables that ranks on other machines need; never their values."""
    spans_hosts = any(host.address is not None for dc in dcs for host in dc.hosts)
    words = [machine.mpirun, *_job_options(machine, spans_hosts)]
    if spans_hosts:
        words += [word for name in exported for word in ("-x", name)]
    for number, program in enumerate(_programs(dcs, topology_path, user, machine.python, spans_hosts)):
        words += [*([":"] if number else []), *program]
    return words


def _job_options(machine: Machine, spans_hosts: bool) -> list[str]:
    return [
        *(["--allow-run-as-root"] if machine.is_root else []),
        *("--oversubscribe", "--bind-to", "none", "--output", "tag"),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp" if spans_hosts else "self,sm"),
        *_IDLE,
        *([] if spans_hosts else _scratch_options(machine.scratch)),
    ]


def _scratch_options(folder: str) -> list[str]:
    # Where the files of a killed MPI don't pile up. Only one machine is sure to have the folder.
    return ["--mca", "btl_sm_backing_directory", folder, "--prtemca", "prte_tmpdir_base", folder]


def _programs(
    dcs: Sequence[Datacenter], topology_path: str, user: UserCommand, python: str, spans_hosts: bool
) -> Iterator[list[str]]:
    # -P: a folder `launcher` or `topology` where the user happens to be must not shadow ours.
    entry = [python, "-P", "-m", "mpi4py", "-m", "launcher.entry"]
    for dc in dcs:
        whoami = ["--topology", topology_path, "--dc", dc.name]
        hosts = [["-host", host.address or "localhost"] if spans_hosts else [] for host in dc.hosts]
        yield [*hosts[0], "-n", "1", *entry, "coordinator", *whoami]
        for where, host in zip(hosts, dc.hosts, strict=True):
            yield [*where, "-n", str(host.workers), *entry, "worker", *whoami, "--", *user.words]
