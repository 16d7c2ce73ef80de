"""`hybridep run` with real processes: what comes out, exit codes, and bad input told in one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import main
from tests.certificates import Authority
from tests.launched import TOKEN, Launch, Launched, launching

LINKS = "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
RUN = ("run", "two.yaml", "--timeout", "rendezvous=30s", "--")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    (tmp_path / "two.yaml").write_text(
        f"cluster: {tmp_path.name}\ndatacenters:\n  a: {{workers: 1}}\n  b: {{workers: 2}}\n" + LINKS
    )
    yield from launching(tmp_path)


def sites(folder: Path) -> tuple[int, int]:
    """Write a topology of two sites, which meet on free ports of this machine; returns the ports."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    (folder / "sites.yaml").write_text(
        f"cluster: {folder.name}\ninsecure: true\ndatacenters:\n"
        + "".join(f"  {dc}: {{workers: 1, wan: '127.0.0.1:{port}'}}\n" for dc, port in zip("ab", ports, strict=True))
        + LINKS
    )
    return ports


def own_lines(job: Launched) -> list[str]:
    return [line for line in job.lines if line.startswith("hybridep:")]


def test_output_is_tagged_and_logged_and_nothing_stays(launch: Launch, tmp_path: Path) -> None:
    job = launch(*RUN[:2], "--log-dir", "logs", "--", "python", "job.py", "end", "--", "-x")
    assert job.end(60) == 0
    assert sorted(job.lines) == [f"[{tag}] joined ['end', '--', '-x'] False" for tag in ("a/0", "b/0", "b/1")]
    assert (tmp_path / "logs" / "b-1.log").read_text() == "joined ['end', '--', '-x'] False\n"
    job.wait_until_gone()


def test_the_scripts_exit_code_is_the_jobs(launch: Launch) -> None:
    job = launch(*RUN, "job.py", "exit", "77")
    assert job.end(60) == 77
    (line,) = own_lines(job)
    assert line.endswith('worker 1 of DC "b": the training script ended with exit code 77')


def test_a_mistake_in_the_script_shows_its_traceback_and_no_frame_of_ours(launch: Launch) -> None:
    job = launch(*RUN, "python", "-m", "job", "raise")
    assert job.end(60) == 1
    assert "[b/1] ValueError: a mistake in the script" in job.lines
    assert "runpy" not in job.text
    assert "launcher" not in job.text


def test_a_typed_error_is_one_line(launch: Launch) -> None:
    job = launch(*RUN, "job.py", "typed")
    assert job.end(60) == 2
    (line,) = own_lines(job)
    assert line.endswith('worker 1 of DC "b": no such plan')


def test_one_mpirun_per_site(launch: Launch, tmp_path: Path) -> None:
    sites(tmp_path)
    jobs = [launch("run", "sites.yaml", "--site", dc, "--", "job.py", "end", HYBRIDEP_RUN_TOKEN=TOKEN) for dc in "ab"]
    assert [job.end(60) for job in jobs] == [0, 0]
    assert [job.lines for job in jobs] == [[f"[{dc}/0] joined ['end'] False"] for dc in "ab"]


def test_sites_with_different_tokens_refuse_each_other(launch: Launch, tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "token").write_text("cd" * 32)
    a = launch("run", "sites.yaml", "--site", "a", "--", "job.py", "end", HYBRIDEP_RUN_TOKEN=TOKEN)
    b = launch("run", "sites.yaml", "--site", "b", "--token-file", "token", "--", "job.py", "end")
    assert b.end(60) == 2
    assert own_lines(b) == ['hybridep: coordinator of DC "b": coordinator of DC "a": run token differs']
    a.process.terminate()
    assert a.end() != 0


def test_a_site_that_nobody_answers_says_whom_it_missed(launch: Launch, tmp_path: Path) -> None:
    sites(tmp_path)
    options = ("--site", "b", "--timeout", "rendezvous=4s")
    job = launch("run", "sites.yaml", *options, "--", "job.py", "end", HYBRIDEP_RUN_TOKEN=TOKEN)
    assert job.end() == 2
    (line,) = own_lines(job)
    assert 'DC "a": did not join within 4 s' in line
    assert "Connection refused" in line


def test_a_used_wan_port_is_one_line(launch: Launch, tmp_path: Path) -> None:
    _, port = sites(tmp_path)
    with socket.create_server(("127.0.0.1", port)):
        job = launch("run", "sites.yaml", "--", "job.py", "end")
        assert job.end(60) == 2
    (line,) = own_lines(job)
    assert line.startswith('hybridep: coordinator of DC "b": ')
    assert f"127.0.0.1:{port}: Address already in use" in line


def test_a_second_job_of_the_cluster_is_told_of_the_first(launch: Launch, tmp_path: Path) -> None:
    first = launch(*RUN, "job.py", "wait")
    first.until("joined", 3)
    second = launch(*RUN, "job.py", "end")
    assert second.end() == 2
    assert len(second.lines) == 1
    assert f'cluster "{tmp_path.name}"' in second.text
    assert f"pid {first.process.pid}" in second.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run two.yaml -- python train.py", "train.py: no such file"),
        ("run two.yaml -- python -m no_such_module", "no_such_module: no such module"),
        ("run two.yaml", "say what to run after --"),
        ("run nowhere.yaml -- job.py", "nowhere.yaml: can't read the file"),
        ("run broken.yaml -- job.py", "broken.yaml:2"),
        ("run unknown.yaml -- job.py", "unknown key 'colour'"),
        ("run two.yaml --plan domains:3 -- job.py", "domain size 3"),
        ("run two.yaml --plan best -- job.py", "plan 'best' is not known"),
        ("run two.yaml --plan none.yaml -- job.py", "none.yaml: no such file"),
        ("run two.yaml --codec colours=bf16 -- job.py", "--codec"),
        ("run two.yaml --codec fast -- job.py", "choose one of exact, safe, default, lean, extreme"),
        ("run coded.yaml -- job.py", 'coded.yaml: codec: no codec "zip"'),
        ("run two.yaml --timeout operation=soon -- job.py", "--timeout"),
        ("run two.yaml --chunks 0 -- job.py", "--chunks"),
        ("run two.yaml --sight a -- job.py", "--sight"),
        ("run two.yaml --site a -- job.py", 'DC "a" has no wan'),
        ("run two.yaml --site c -- job.py", "no DC 'c', there are: a, b"),
        ("run sites.yaml --site a -- job.py", "to make one: python3 -c"),
        ("run two.yaml --token-file none -- job.py", "--token-file: none"),
        ("run two.yaml --token-file two.yaml -- job.py", "hexadecimal"),
        ("start two.yaml", "No such command 'start'"),
    ],
)
def test_bad_input_is_one_line(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    sites(tmp_path)
    (tmp_path / "broken.yaml").write_text("cluster: x\n  datacenters: [\n")
    (tmp_path / "coded.yaml").write_text((tmp_path / "two.yaml").read_text() + "codec: weights=zip\n")
    (tmp_path / "unknown.yaml").write_text("cluster: x\ncolour: red\ndatacenters:\n  a: {workers: 1}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYBRIDEP_RUN_TOKEN", raising=False)
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith("hybridep: ")
    assert message in result.output
    assert result.output.count("\n") == 1


def test_a_dry_run_shows_the_command_without_the_token(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRIDEP_RUN_TOKEN", TOKEN)
    result = CliRunner().invoke(main, ["run", "two.yaml", "--dry-run", "--codec", "weights=bf16", "--", "job.py"])
    assert result.exit_code == 0
    assert result.stdout.startswith("env HYBRIDEP_TOPOLOGY=")
    assert "HYBRIDEP_CODECS=weights=bf16" in result.stdout
    assert "launcher.entry worker" in result.stdout
    assert TOKEN not in result.output


def test_a_coordinator_needs_no_torch() -> None:
    load = "import sys, launcher.entry, hybridep_rt.runtime.coordinator, hybridep_rt.transport.mpi"
    code = f"{load}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-m", "mpi4py", "-c", code], timeout=60).returncode == 0


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, "hybridep, version 0.1.0\n")


def test_a_job_over_tls(launch: Launch, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certs", tmp_path.name)
    authority.issue("a")
    authority.issue("b")
    with (tmp_path / "two.yaml").open("a") as file:
        file.write("tls: {folder: certs}\n")
    assert launch(*RUN, "python", "job.py", "end").end(60) == 0
    (tmp_path / "certs" / "b.key").chmod(0o644)
    job = launch(*RUN, "python", "job.py", "end")
    assert job.end(60) == 2
    assert any("b.key: others than its owner may use it" in line for line in own_lines(job))
