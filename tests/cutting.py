"""Training over a WAN link that is cut or frozen: the parameters have to come out bit by bit as without."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import torch

from tests.launched import START_S, TOKEN, Launch
from tests.proxy import Proxy

JOB = Path(__file__).with_name("cut_job.py")


def train(launch: Launch, folder: Path, name: str, plan: str, steps: int, proxy: Proxy, stall_s: float = 0.0) -> None:
    """One job of two sites; site b reaches a through the proxy only. Leaves its parameters in `folder / name`."""
    (folder / name).mkdir()
    host, port = proxy.address
    real = proxy.target[1]
    (folder / f"{name}.yaml").write_text(
        f"cluster: {folder.name}-{name}\ndatacenters:\n"
        f"  a: {{workers: 1, wan: '{host}:{port}', listen: '127.0.0.1:{real}'}}\n"
        "  b: {workers: 1, reachable: false}\n"
        "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
    )
    words = ["run", f"{name}.yaml", "--plan", plan, "--chunks", "2"]
    command = ["--", str(JOB), str(folder / name), str(steps)]
    jobs = [launch(*words, "--site", dc, *command, HYBRIDEP_RUN_TOKEN=TOKEN) for dc in "ab"]
    if stall_s:
        jobs[0].until(f"step {steps // 2}", patience_s=2 * START_S)
        connections = proxy.connections
        proxy.freeze()
        threading.Timer(stall_s, proxy.thaw).start()
    for job in jobs:
        assert job.end(2 * START_S + steps) == 0, job.text
    assert not stall_s or proxy.connections == connections, "the link was given up though it only stood still"


def same_bits(folder: Path, one: str, other: str) -> None:
    """Assert that two jobs ended with the same parameters."""
    for rank in range(2):
        mine, theirs = (torch.load(folder / name / f"{rank}.pt", weights_only=True) for name in (one, other))
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (rank, key)


def free_port() -> tuple[str, int]:
    """A port of this machine that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: tuple[str, int] = server.getsockname()
        return address
