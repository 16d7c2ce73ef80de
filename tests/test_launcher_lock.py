"""One job per cluster, DC and user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridep_rt.errors import ConfigError
from launcher.lock import job_lock, runtime_directory


def test_a_second_job_is_told_who_runs(tmp_path: Path) -> None:
    with job_lock("c/1", ["a", "b"], "mark", tmp_path):
        message = rf'cluster "c/1" is already .* DC "b" .* pid {os.getpid()}'
        with pytest.raises(ConfigError, match=message), job_lock("c/1", ["b"], "mark", tmp_path):
            pass
        with job_lock("c/1", ["c"], "mark", tmp_path), job_lock("c/2", ["a"], "mark", tmp_path):
            pass
    with job_lock("c/1", ["b"], "mark", tmp_path):
        pass


def test_the_next_job_learns_whose_place_it_takes(tmp_path: Path) -> None:
    with job_lock("c", ["a", "b"], "first", tmp_path) as earlier:
        assert earlier == set()
    with job_lock("c", ["b"], "second", tmp_path) as earlier:
        assert earlier == {"first"}
        assert (tmp_path / "c+b.lock").read_text() == f"{os.getpid()} second\n"


@pytest.mark.parametrize("content", ["", "1", "1 *\n", "1 ../x\n", "x" * 1000])
def test_a_broken_lock_file_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "c+a.lock").write_text(content)
    with job_lock("c", ["a"], "mark", tmp_path) as earlier:
        assert earlier == set()


def test_the_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = runtime_directory()
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="only you can enter"):
        runtime_directory()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "c+a.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"c\+a\.lock"), job_lock("c", ["a"], "mark", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
