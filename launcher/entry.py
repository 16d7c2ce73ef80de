"""What each MPI rank runs: `python -m mpi4py -m launcher.entry ROLE --topology T --dc DC [-- train.py ARGS]`.

The ranks of one mpirun tell each other once who and where they are. Then a coordinator serves its DC, and a worker
becomes the user's program, with HYBRIDEP_* set. mpi4py's runner turns a non-zero exit of any rank into the job's end.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import secrets
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridep_rt.config import Limits
from hybridep_rt.errors import HybridEPError, PeerLost, TransportError
from hybridep_rt.runtime.environment import Settings
from launcher.cli import exit_code
from launcher.command import Rank, UserCommand, parse_user_command
from launcher.meeting import Record, check, endpoint, listen_address, peers, worker_index, workers_address
from launcher.processes import JOB_VARIABLE, die_with_parent, job_directory
from topology import Topology, load

if TYPE_CHECKING:
    from hybridep_rt.transport.listeners import Listeners
    from hybridep_rt.transport.tls import Tls

STATUS_SOCKET = "status"
"""In the coordinator's private folder: where it says how its links are."""
TRACEBACK_VARIABLE = "HYBRIDEP_TRACEBACK"
_SESSION = "hybridep_rt.runtime.start"
_MPI_START_S = 30.0
"""The start of MPI itself may take so long on a busy machine, however short the rendezvous is to be."""
_OTHERS_FIRST_S = 2.0
"""Who only lost others lets them end first: they know why, and their exit code is the job's. Coordinators wait half."""


def main(words: Sequence[str]) -> None:
    """Be one rank."""
    die_with_parent(os.getppid())
    arguments, user_words = _parse(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HYBRIDEP_TOPOLOGY"] = arguments.topology
    with _typed_errors(f'{arguments.role} of DC "{arguments.dc}"'):
        settings = Settings.read(os.environ)
        topology = load(settings.topology)
        dc = topology.dc_index(arguments.dc)
    if arguments.role == "coordinator":
        _coordinate(topology, dc, settings)
    else:
        _work(topology, dc, settings, user_words)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("launcher.entry", description="One rank of a job; see `hybridep run --dry-run`.")
    parser.add_argument("role", choices=["coordinator", "worker"])
    parser.add_argument("--topology", required=True)
    parser.add_argument("--dc", required=True)
    return parser.parse_args(words[:end]), list(words[end + 1 :])


def _coordinate(topology: Topology, dc: int, settings: Settings) -> None:
    from hybridep_rt.runtime.coordinator import CoordinatorConfig, run_coordinator

    if settings.congestion:
        topology = replace(topology, congestion=settings.congestion)
    folder = job_directory(os.environ.get(JOB_VARIABLE) or secrets.token_hex(6))
    try:
        with _typed_errors(Rank(topology.dc_names[dc], None).describe()):
            listeners, records = _listen_and_meet(topology, dc, settings, folder)
            others = peers(records, topology, dc)
            config = CoordinatorConfig(
                topology,
                dc,
                settings.run_token,
                settings.epoch,
                settings.timeouts,
                Limits(),
                _tls(topology, dc, settings),
                f"{folder}/{STATUS_SOCKET}",
            )
        run_coordinator(config, listeners, others)
    except HybridEPError as error:  # the coordinator has said what happened
        if isinstance(error, PeerLost):
            time.sleep(_OTHERS_FIRST_S / 2)
        sys.exit(exit_code(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tls(topology: Topology, dc: int, settings: Settings) -> Tls | None:
    """This DC's certificate and key; a folder that the topology's file names is relative to that file."""
    from hybridep_rt.transport.tls import Tls

    folder = settings.tls_folder
    if not folder and topology.tls_folder is not None:
        folder = str(Path(topology.source).parent / topology.tls_folder)
    return Tls.in_folder(folder, topology.dc_names[dc]) if folder else None


def _listen_and_meet(topology: Topology, dc: int, settings: Settings, folder: str) -> tuple[Listeners, list[Record]]:
    from hybridep_rt.transport.listeners import open_listeners

    with _start_alarm(settings):
        import mpi4py.MPI  # noqa: F401 - from here on our failure ends the whole mpirun

        listeners = open_listeners(f"{folder}/workers", listen_address(topology, dc), workers_address(topology, dc))
        mine = Record(
            dc=dc,
            is_coordinator=True,
            machine=_this_machine(),
            digest=topology.digest(),
            unix_path=listeners.unix_path,
            workers_address=listeners.workers_address,
            wan_address=listeners.wan_address,
        )
        return listeners, _meet(topology, mine)


def _work(topology: Topology, dc: int, settings: Settings, user_words: Sequence[str]) -> None:
    name = topology.dc_names[dc]
    with _typed_errors(f'a worker of DC "{name}"'):
        user = parse_user_command(user_words)
        with _start_alarm(settings):
            from hybridep_rt.transport import mpi

            mine = Record(dc=dc, is_coordinator=False, machine=_this_machine(), digest=topology.digest())
            records = _meet(topology, mine)
        me = Rank(name, worker_index(records, mpi.rank()))
        told = settings.for_worker(name, worker_index(records, mpi.rank()), endpoint(records, mpi.rank()))
    os.environ.update(told.write())
    _be_user_program(user, me)


def _show_log() -> None:
    """The runtime's own messages appear; how the user's program logs is its own business."""
    log = logging.getLogger("hybridep_rt")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False


def _meet(topology: Topology, mine: Record) -> list[Record]:
    from hybridep_rt.transport import mpi

    records = [Record.unpack(fields) for fields in mpi.exchange(mine.pack())]
    check(records, topology)
    return records


def _be_user_program(user: UserCommand, me: Rank) -> None:
    _show_log()
    try:
        if user.is_module:
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = [user.program, *user.arguments]
            runpy.run_module(user.program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(user.program).resolve().parent))
            sys.argv[:] = [user.program, *user.arguments]
            runpy.run_path(user.program, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            _tell_coordinator(f"the training script ended with exit code {error.code}")
        raise
    except HybridEPError as error:
        if isinstance(error, (PeerLost, TransportError)):
            time.sleep(_OTHERS_FIRST_S)
        if os.environ.get(TRACEBACK_VARIABLE):
            _print_traceback(error)
        _say(me.describe(), error)
        _tell_coordinator(_one_line(error))
        sys.exit(exit_code(error))
    except BaseException as error:
        _print_traceback(error)
        _tell_coordinator(f"{type(error).__name__}: {_one_line(error)}")
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _tell_coordinator(reason: str) -> None:
    # A script that never joined the job has nobody to tell.
    session = sys.modules.get(_SESSION)
    if session is not None:
        session.fail(reason)


def _print_traceback(error: BaseException) -> None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


@contextmanager
def _typed_errors(who: str) -> Iterator[None]:
    """Ends the process with one line where a typed error gets out."""
    try:
        yield
    except HybridEPError as error:
        _say(who, error)
        sys.exit(exit_code(error))


def _say(who: str, error: HybridEPError) -> None:
    print(f"hybridep: {who}: {_one_line(error)}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def _start_alarm(settings: Settings) -> Iterator[None]:
    """The kernel ends the process if MPI's start hangs: no Python runs inside it that could watch the time."""
    signal.setitimer(signal.ITIMER_REAL, max(settings.timeouts.rendezvous_s, _MPI_START_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} ({boot.read_text().strip() if boot.exists() else 'unknown boot'})"


if __name__ == "__main__":
    main(sys.argv[1:])
