"""The supervisor with a program in mpirun's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hybridep_rt.errors import ConfigError
from launcher import supervise as module
from launcher.command import Rank
from launcher.processes import JOB_VARIABLE, job_directory, marked
from launcher.supervise import Job, supervise

RANKS = (Rank("a", None), Rank("a", 0))
NOTICE = f"{'-' * 74}\\nprocess rank 1 with PID 7 on node vm exited on signal 9 (Killed).\\n{'-' * 74}"


def job(code: str, mark: str, log_dir: Path | None = None) -> Job:
    environment = {**os.environ, JOB_VARIABLE: mark}
    return Job(
        [sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{code}"], environment, RANKS, mark, log_dir
    )


def test_lines_go_to_their_streams_and_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "print('[1,1]<stdout>: out'); print('[1,0]<stderr>: err', file=sys.stderr); print('odd', end='')"
    assert supervise(job(code, "t1", tmp_path / "logs")) == 0
    out, err = capfd.readouterr()
    assert out == "[a/0] out\n"
    assert sorted(err.splitlines()) == ["[a/coordinator] err", "mpirun: odd"]
    assert (tmp_path / "logs" / "a-0.log").read_text() == "out\n"
    assert (tmp_path / "logs" / "a-coordinator.log").read_text() == "err\n"


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--log-dir"):
        supervise(job("", "t2", tmp_path / "file" / "logs"))


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 15)", 128 + 15)])
def test_exit_codes(code: str, expected: int) -> None:
    assert supervise(job(code, "t3")) == expected


def test_an_mpirun_that_does_not_end_after_a_death_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_ENDING_S", 0.1)
    assert supervise(job(f"print('''{NOTICE}''', file=sys.stderr, flush=True); time.sleep(600)", "t4")) == 128 + 9
    assert capfd.readouterr().err == 'hybridep: worker 0 of DC "a" died (signal 9)\n'


def test_a_signal_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    listening = "int(open(f'/proc/{os.getppid()}/status').read().split('SigCgt:')[1].split()[0], 16) & 1 << 14"
    ask = f"while not {listening}: pass\nos.kill(os.getppid(), 15)"
    code = f"signal.signal(15, lambda *_: sys.exit(3))\n{ask}\ntime.sleep(600)"
    assert supervise(job(code, "t5")) == 128 + 15
    assert capfd.readouterr().err == "hybridep: ended by SIGTERM\n"


def test_processes_and_folders_that_stayed_are_removed() -> None:
    folder = job_directory("t6")
    code = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
    assert supervise(job(code, "t6")) == 0
    assert marked("t6") == []
    assert not Path(folder).exists()


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_LINE_BYTES_MAX", 10)
    assert supervise(job("print('x' * 200000)", "t7")) == 0
    assert capfd.readouterr().err.replace("mpirun: ", "").replace("\n", "") == "x" * 200000
