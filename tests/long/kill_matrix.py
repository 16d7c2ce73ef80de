"""Who is killed or stopped, and when, in a small real training job: does it end in time, and is the right one named?

    python -m tests.long.kill_matrix --json benchmarks/results/kill_matrix.json [--victim NAME] [--phase PHASE]

2 DCs of 2 workers train under `hybridep run`. In step 2 each worker says which phase it has reached; the victim (or
the last worker, if the victim is no worker) stays there, so that the signal hits in this phase and not somewhere later.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from benchmarks.report import report, write_report
from hybridep_rt.config import Timeouts
from tests.launched import Launched

PHASES = ("rendezvous", "forward", "backward", "optimizer", "shutdown")
WORKERS = ("worker 0 of a", "worker 1 of a", "worker 1 of b")
COORDINATORS = ("coordinator of a", "coordinator of b")
LAUNCHERS = ("mpirun", "launcher")
TIMEOUTS = Timeouts(
    rendezvous_s=90, handshake_s=5, heartbeat_s=0.5, silence_s=5, resume_s=6, operation_s=60, goodbye_s=3
)
START_S = 240.0
ATTEMPTS = 4
ENDING_S = 15.0
"""From the moment that a failure is noticed: so long may the job take to end."""

_TOPOLOGY = (
    "cluster: {cluster}\ndatacenters:\n  a: {{workers: 2}}\n  b: {{workers: 2}}\n"
    "links:\n  a <-> b: {{bandwidth: 1 Gbit/s, rtt: 1 ms}}\n"
)
_PROGRAM = """
import os, sys, time
from pathlib import Path

phase, stays = sys.argv[1], sys.argv[2]
me = f"worker {os.environ['HYBRIDEP_WORKER']} of {os.environ['HYBRIDEP_DC']}"

def reach(here):
    if here == phase:
        print("reached", me, "pid", os.getpid(), flush=True)
        while me == stays and not Path("go").exists():
            time.sleep(0.01)

reach("rendezvous")
import torch
from torch import nn
import hybridep_rt

class Watch(nn.Module):
    def forward(self, x):
        if step == 2:
            reach("forward")
            if x.requires_grad:
                x.register_hook(lambda grad: reach("backward"))
        return x

runtime = hybridep_rt.init()
layers = [hybridep_rt.MoELayer(16, ffn=32, num_experts=8, top_k=2) for _ in range(2)]
model = nn.Sequential(nn.Linear(16, 16), layers[0], Watch(), layers[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
runtime.attach(model, optimizer, tokens_per_step=64)
optimizer.register_step_pre_hook(lambda *_: reach("optimizer") if step == 2 else None)
for step in range(4):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(64, 16)), torch.zeros(64, 16)).backward()
    optimizer.step()
reach("shutdown")
runtime.shutdown()
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the job. `victim`: one of WORKERS, COORDINATORS, LAUNCHERS."""

    phase: str
    victim: str
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.signal.name} of {self.victim} in {self.phase}"

    @property
    def deadline_s(self) -> float:
        """From the signal to the end of the job."""
        if self.signal is signal.SIGKILL:
            return ENDING_S
        lost_s = TIMEOUTS.silence_s + TIMEOUTS.resume_s
        return (TIMEOUTS.rendezvous_s if self.phase == "rendezvous" else lost_s) + ENDING_S

    @property
    def name(self) -> str:
        """What the job has to say. Of a killed launcher nothing can be said."""
        role, _, dc = self.victim.partition(" of ")
        return {"mpirun": "mpirun died", "launcher": ""}.get(role, f'{role} of DC "{dc}"')


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended. `seconds`: from the signal to the end; `exit_code` None: it did not end in time."""

    phase: str
    victim: str
    signal: str
    seconds: float
    deadline_s: float
    exit_code: int | None
    named: bool
    orphans: bool
    said: list[str]

    @property
    def good(self) -> bool:
        """All that has to hold."""
        return self.exit_code not in (None, 0) and self.named and not self.orphans and self.seconds <= self.deadline_s


def cases() -> list[Case]:
    """The whole matrix: 60 runs."""
    stopped = [(victim, number) for victim in WORKERS + COORDINATORS for number in (signal.SIGKILL, signal.SIGSTOP)]
    ends = [*stopped, *((victim, signal.SIGKILL) for victim in LAUNCHERS)]
    return [Case(phase, victim, number) for phase in PHASES for victim, number in ends]


def run_case(case: Case, folder: Path) -> Outcome:
    """Start a job in the empty `folder`, send the signal, and see what happens. Leaves no process.

    A job that ends before it gets to the phase, as on a machine where others leave it no time, is started again.
    Raises RuntimeError where none gets there.
    """
    for attempt in range(ATTEMPTS):
        place = folder / str(attempt)
        place.mkdir()
        (place / "two.yaml").write_text(_TOPOLOGY.format(cluster=f"kill-{os.getpid()}-{attempt}"))
        (place / "job.py").write_text(_PROGRAM)
        with _launched(place, case) as job:
            try:
                job.until("reached", 4, patience_s=START_S)
            except (AssertionError, queue.Empty):
                continue
            return _strike(case, job, place)
    raise RuntimeError(f"{case}: the job never got there in {ATTEMPTS} attempts")


def _strike(case: Case, job: Launched, folder: Path) -> Outcome:
    os.kill(_pid(job, case.victim), case.signal)
    start = time.monotonic()
    (folder / "go").touch()
    code = _end(job, case.deadline_s)
    seconds = time.monotonic() - start
    said = [line for line in job.lines if line.startswith("hybridep:")]
    return Outcome(
        phase=case.phase,
        victim=case.victim,
        signal=case.signal.name,
        seconds=round(seconds, 2),
        deadline_s=case.deadline_s,
        exit_code=code,
        named=any(case.name in line for line in said) or not case.name,
        orphans=_leaves_orphans(job),
        said=said[:6],
    )


@contextlib.contextmanager
def _launched(folder: Path, case: Case) -> Iterator[Launched]:
    stays = case.victim if case.victim in WORKERS else WORKERS[-1]
    # Where the rendezvous isn't what is struck, it may take as long as a busy machine needs.
    used = TIMEOUTS if case.phase == "rendezvous" else replace(TIMEOUTS, rendezvous_s=START_S)
    timeouts = [
        word
        for name in Timeouts.__dataclass_fields__
        for word in ("--timeout", f"{name.removesuffix('_s')}={getattr(used, name):g}s")
    ]
    words = ["run", "two.yaml", "--plan", "ep", *timeouts, "--", "python", "job.py", case.phase, stays]
    job = Launched(words, folder, {})
    try:
        yield job
    finally:
        job.close()


def _pid(job: Launched, victim: str) -> int:
    if victim == "launcher":
        return job.process.pid
    if victim == "mpirun":
        return next(pid for pid in job.pids("prterun") if pid != job.process.pid)
    if victim in COORDINATORS:
        dc = victim.rpartition(" ")[2]
        # mpirun's command line has all of this too, but doesn't end with it.
        coordinators = job.pids("launcher.entry coordinator")
        [pid] = [pid for pid in coordinators if _command_line(pid).strip().endswith(f"--dc {dc}")]
        return pid
    [line] = [line for line in job.lines if f"reached {victim} pid" in line]
    return int(line.rpartition(" ")[2])


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _end(job: Launched, deadline_s: float) -> int | None:
    """The exit code; None if it is not over twice as long as it may take."""
    try:
        return job.end(2 * deadline_s)
    except Exception:  # whatever ran out of patience
        return None


def _leaves_orphans(job: Launched) -> bool:
    try:
        job.wait_until_gone()
    except AssertionError:
        return True
    return False


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all outcomes here.")
@click.option("--victim", "victims", multiple=True, type=click.Choice(WORKERS + COORDINATORS + LAUNCHERS))
@click.option("--phase", "phases", multiple=True, type=click.Choice(PHASES))
def main(json_path: Path | None, victims: Sequence[str], phases: Sequence[str]) -> None:
    """Run the matrix, or the chosen part of it; the exit code is 1 where a case fails, or never gets there."""
    chosen = [
        each for each in cases() if each.victim in (victims or (each.victim,)) and each.phase in (phases or PHASES)
    ]
    outcomes = []
    for case in chosen:
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcome = run_case(case, Path(folder))
        except RuntimeError as error:
            click.echo(f"none        {error}")
            continue
        outcomes.append(outcome)
        click.echo(f"{'good' if outcome.good else 'BAD '} {outcome.seconds:5.1f} s  {case}: {outcome.said[:1]}")
        if json_path is not None:
            settings = {
                "timeouts": asdict(TIMEOUTS),
                "good": sum(each.good for each in outcomes),
                "runs": len(outcomes),
            }
            write_report(json_path, report("kill_matrix", settings, [asdict(each) for each in outcomes]))
    raise SystemExit(sum(each.good for each in outcomes) < len(chosen))


if __name__ == "__main__":
    main()
