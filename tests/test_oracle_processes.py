"""The oracle over real processes: mpirun, coordinators, sockets between DCs, gloo inside them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridep_rt.planner.plan import Layout
from tests.oracle import Result, compare
from tests.oracle_worker import cases

LAYOUTS = {"symmetric": (2, 2), "uneven": (2, 1, 1)}
TOKEN = "5e" * 32


def topology(folder: Path, name: str) -> Path:
    """Two or three DCs that meet on loopback."""
    lines = [f"cluster: oracle-{name}-{os.getpid()}", "insecure: true", "datacenters:"]
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in LAYOUTS[name]]
    for dc, workers, server in zip("abc", LAYOUTS[name], with_ports, strict=False):
        lines.append(f'  {dc}: {{workers: {workers}, wan: "127.0.0.1:{server.getsockname()[1]}"}}')
        server.close()
    lines += ["defaults:", "  link: {bandwidth: 1 Gbit/s, rtt: 1 ms}"]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def start(path: Path, results: Path, *options: str) -> subprocess.Popen[str]:
    results.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "launcher.cli", "run", str(path), *options, "--timeout", "operation=60s"]
    command += ["--", "python", "-m", "tests.oracle_worker", str(results)]
    environment = {**os.environ, "HYBRIDEP_RUN_TOKEN": TOKEN, "HYBRIDEP_TRACEBACK": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(*jobs: subprocess.Popen[str]) -> None:
    for job in jobs:
        try:
            output, _ = job.communicate(timeout=200)
        finally:
            job.kill()
        assert job.returncode == 0, output


def read(results: Path, number: int, workers: int) -> list[Result]:
    return [Result(**torch.load(results / f"{number}-{worker}.pt", weights_only=True)) for worker in range(workers)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oracle")


def results_of_one_mpirun(folder: Path, name: str) -> Path:
    """What a layout's job wrote; it runs for the first test that asks."""
    if not (folder / name).exists():
        finish(start(topology(folder, name), folder / name))
    return folder / name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_case_equals_one_dense_process(folder, name):
    results = results_of_one_mpirun(folder, name)
    layout = Layout(LAYOUTS[name])
    for number, ((plan, *_), case) in enumerate(cases(layout, (2, 2) if name == "symmetric" else None)):
        compare(case, plan, read(results, number, layout.workers))


@pytest.mark.timeout(240)
def test_two_mpiruns_give_the_same_bits_as_one(folder):
    results = results_of_one_mpirun(folder, "symmetric")
    path = topology(folder, "symmetric")
    finish(*(start(path, folder / "sites", "--site", dc) for dc in "ab"))
    layout = Layout(LAYOUTS["symmetric"])
    for number in range(len(cases(layout, (2, 2)))):
        one = read(results, number, layout.workers)
        two = read(folder / "sites", number, layout.workers)
        for mine, theirs in zip(one, two, strict=True):
            for name, parameter in mine.parameters.items():
                assert torch.equal(parameter, theirs.parameters[name]), (number, name)
            for output, other in zip(mine.outputs, theirs.outputs, strict=True):
                assert torch.equal(output, other), number
