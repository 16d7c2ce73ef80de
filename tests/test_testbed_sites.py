"""Several commands as one: output, exit status, and an end for all of them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.testbed import sites
from launcher.testbed.sites import Program, in_background, run_all
from launcher.testbed.ssh_text import agent_script, daemon_config


def shell(site: str, script: str) -> Program:
    return Program(site, f"[{site}] ", ["sh", "-c", script], {"WHO": site})


def test_lines_carry_the_name_of_their_site(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run_all([shell("a", "echo 1; echo $WHO >&2"), shell("b", "printf end")]) == 0
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"[a] 1", b"[a] a", b"[b] end"]


def test_output_goes_to_a_file_per_site(tmp_path: Path) -> None:
    assert run_all([shell("a", "echo 1"), shell("b", "echo 2")], tmp_path / "logs") == 0
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {"a.log": "1\n", "b.log": "2\n"}


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_status_of_the_site_that_failed_counts(script: str, status: int) -> None:
    assert run_all([shell("a", "true"), shell("b", script)]) == status


def test_others_are_ended_when_their_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "GRACE_S", 0.0)
    assert run_all([shell("a", "exit 4"), shell("b", "sleep 1000")]) == 4


def test_who_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sites, "_TERMINATE_S", 0.2)
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    with in_background([shell("a", f"trap '' TERM; echo > {ready}; sleep 1000")]) as running:
        ready.read_text()
    assert running[0].returncode == -9


def test_nothing_keeps_running_when_one_cannot_start() -> None:
    with pytest.raises(FileNotFoundError), in_background([shell("a", "sleep 1000"), Program("b", "", ["/none"], {})]):
        pass


def test_a_daemon_admits_only_its_own_key() -> None:
    lines = daemon_config("/d", "198.18.0.2", {"PATH": "/bin", "X": "1"}).splitlines()
    assert {"ListenAddress 198.18.0.2:22", "AuthorizedKeysFile /d/user_key.pub", 'SetEnv "PATH=/bin" "X=1"'} <= {*lines}
    assert {"PasswordAuthentication no", "KbdInteractiveAuthentication no", "UsePAM no"} <= {*lines}


def test_the_agent_is_a_shell_script_with_its_key(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ssh.chmod(0o755)
    agent = tmp_path / "agent"
    agent.write_text(agent_script("/with space"))
    line = f"PATH={shlex.quote(str(tmp_path))}:$PATH sh {shlex.quote(str(agent))} host 'two words'"
    words = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:4] == ["-F", "/dev/null", "-i", "/with space/user_key"]
    assert words[-2:] == ["host", "two words"]
