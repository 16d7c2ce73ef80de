"""Whoever dies, the job ends with a non-zero code, says who it was, and leaves no process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.processes import clear_away
from tests.launched import TOKEN, Launch, Launched, launching
from tests.test_launcher_run import sites

WORKERS = 3


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    (tmp_path / "two.yaml").write_text(
        f"cluster: {tmp_path.name}\ndatacenters:\n  a: {{workers: 1}}\n  b: {{workers: 2}}\n"
        "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
    )
    yield from launching(tmp_path)


def waiting_job(launch: Launch) -> Launched:
    job = launch("run", "two.yaml", "--", "python", "job.py", "wait")
    job.until("joined", WORKERS)
    return job


@pytest.mark.parametrize(("role", "name"), [("worker", "worker 1"), ("coordinator", "coordinator")])
def test_a_killed_rank_ends_the_job_and_is_named(launch: Launch, role: str, name: str) -> None:
    job = waiting_job(launch)
    os.kill(job.pids(f"launcher.entry {role} ")[-1], signal.SIGKILL)
    assert job.end() not in (0, 2)
    assert f'{name} of DC "b"' in job.text
    job.wait_until_gone()


def test_a_killed_mpirun_ends_the_job(launch: Launch) -> None:
    job = waiting_job(launch)
    mpirun = next(pid for pid in job.pids("prterun") if pid != job.process.pid)
    os.kill(mpirun, signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL
    assert "hybridep: mpirun died (signal 9)" in job.text
    assert 'worker 1 of DC "b"' in job.text
    job.wait_until_gone()


@pytest.mark.parametrize(("victim", "survivor"), ["ab", "ba"])
@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_a_killed_rank_of_one_site_ends_the_other_site_too(
    launch: Launch, tmp_path: Path, role: str, victim: str, survivor: str
) -> None:
    sites(tmp_path)
    jobs = {
        dc: launch("run", "sites.yaml", "--site", dc, "--", "job.py", "wait", HYBRIDEP_RUN_TOKEN=TOKEN) for dc in "ab"
    }
    for job in jobs.values():
        job.until("joined")
    os.kill(jobs[victim].pids(f"launcher.entry {role} ")[-1], signal.SIGKILL)
    for job in jobs.values():
        assert job.end() not in (0, 2)
        job.wait_until_gone()
    assert f'{role}{" 0" if role == "worker" else ""} of DC "{victim}"' in jobs[survivor].text


def test_a_killed_launcher_leaves_nothing(launch: Launch) -> None:
    job = waiting_job(launch)
    mark = job.mark_of_ranks()
    job.process.kill()
    assert job.end() == -signal.SIGKILL
    job.wait_until_gone()
    clear_away(mark)  # what the cluster's next job would do


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_job(launch: Launch, number: signal.Signals) -> None:
    job = waiting_job(launch)
    job.process.send_signal(number)
    assert job.end() == 128 + number
    assert f"hybridep: ended by {number.name}" in job.text
    job.wait_until_gone()
