"""The testbed on this machine's kernel: namespaces, relay, cleanup. Checks structure and bytes, not speeds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import main
from launcher.testbed import bed as beds
from launcher.testbed import tun
from launcher.testbed.bed import NAMESPACES, Testbed
from launcher.testbed.control import Change
from launcher.testbed.measure import measure
from launcher.testbed.rights import missing_rights
from launcher.testbed.shaping import Access, Shape
from launcher.testbed.verdict import expect
from topology.errors import ConfigError

MISSING = missing_rights()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
USUAL = Shape(100e6 / 8, 0.020)
SHAPES = {(0, 1): USUAL, (1, 0): USUAL}
LONG_S = 10.0


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(("a", "b"), [Access(), Access()], SHAPES, label="tests") as bed:
        yield bed


@contextmanager
def connection(bed: Testbed) -> Iterator[tuple[socket.socket, socket.socket]]:
    with tun.inside(bed.path("b")):
        server = socket.create_server((bed.address("b"), 0))
    with tun.inside(bed.path("a")):
        here = socket.socket()
    with server, here:
        here.settimeout(LONG_S)
        server.settimeout(LONG_S)
        here.connect(server.getsockname())
        there, _ = server.accept()
        with there:
            there.settimeout(LONG_S)
            yield here, there


def both_ways(bed: Testbed, **fields: float) -> None:
    for source, target in (("a", "b"), ("b", "a")):
        bed.change(Change(source, target, fields))


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_links_keep_to_their_rate_and_round_trip(bed: Testbed) -> None:
    expected = expect(("a", "b"), USUAL, USUAL, Access(), Access())
    measured = measure(bed, expected, 0.5)
    assert measured.rtt_s >= 0.040
    assert 0 < measured.goodput_bytes_per_s <= USUAL.rate_bytes_per_s
    assert measured.mss_bytes == 1448


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_bytes_arrive_as_they_were_sent(bed: Testbed, loss: float) -> None:
    both_ways(bed, loss=loss)
    sent = os.urandom(1 << 20)
    with connection(bed) as (here, there):
        here.setblocking(False)
        received, rest = bytearray(), memoryview(sent)
        while len(received) < len(sent):
            if rest:
                with suppress(BlockingIOError):
                    rest = rest[here.send(rest) :]
            received += there.recv(1 << 16)
    both_ways(bed, loss=0.0)
    assert received == sent


def test_a_cut_link_carries_nothing_until_it_is_mended(bed: Testbed) -> None:
    with connection(bed) as (here, there):
        bed.change(Change("a", "b", {}, cut_s=60.0))
        here.send(b"x")
        there.settimeout(0.3)
        with pytest.raises(TimeoutError):
            there.recv(1)
        bed.change(Change("a", "b", {}, cut_s=0.0))
        there.settimeout(LONG_S)
        assert there.recv(1) == b"x"


def test_a_stalled_link_delivers_later(bed: Testbed) -> None:
    with connection(bed) as (here, there):
        start = time.monotonic()
        bed.change(Change("a", "b", {}, stall_s=0.5))
        here.send(b"x")
        assert there.recv(1) == b"x"
        assert time.monotonic() - start >= 0.5


def test_the_command_line_finds_a_running_testbed(bed: Testbed) -> None:
    answer = CliRunner().invoke(main, ["testbed", "shape", bed.owner.directory, "a<->b", "--rtt", "40 ms"])
    assert (answer.exit_code, answer.output) == (0, "")
    answer = CliRunner().invoke(main, ["testbed", "shape", "tests", "a->c", "--cut", "1"])
    assert answer.exit_code == 2
    assert "no running testbed has this name or topology" in answer.output


def test_the_relay_refuses_what_it_does_not_know(bed: Testbed) -> None:
    with pytest.raises(ConfigError, match="no DC 'c', there are: a, b"):
        bed.change(Change("a", "c", {}, cut_s=1.0))
    with pytest.raises(ConfigError, match="no link a -> a"):
        bed.change(Change("a", "a", {}, cut_s=1.0))


def hybridep(*words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "hybridep"), *words]


def test_a_command_runs_in_every_dc_and_its_failure_is_told() -> None:
    script = 'test "$(hostname)" = "$HYBRIDEP_DC" && test -s "$HYBRIDEP_TOPOLOGY" && echo here && test $HYBRIDEP_DC = a'
    line = hybridep("testbed", "exec", "preset:two-dc", "--", "sh", "-c", script)
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert sorted(done.stdout.split("\n")) == ["", "[a] here", "[b] here"]
    assert done.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path: Path, number: int) -> None:
    line = hybridep("testbed", "exec", "preset:two-dc", "--", "sh", "-c", f"touch {tmp_path}/$HYBRIDEP_DC; sleep 1000")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
            inside = processes_inside(process.pid)
            assert len(inside) >= 2
        finally:
            process.send_signal(number)
    if number == signal.SIGKILL:
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside))
        beds.sweep()
    assert not any(Path(f"/proc/{pid}").exists() for pid in inside)
    assert not list(NAMESPACES.glob(f"hep-{process.pid}-*"))
    assert not list(Path("/tmp").glob(f"hep-{process.pid}-*"))


def processes_inside(owner: int) -> list[int]:
    """Of all the DCs of a testbed."""
    words = [
        subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=True).stdout
        for path in NAMESPACES.glob(f"hep-{owner}-*")
    ]
    return [int(word) for word in " ".join(words).split()]


@pytest.mark.long
def test_a_job_runs_with_one_mpirun_per_site(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, hybridep_rt\nhybridep_rt.init()\nprint('hello', os.environ['HYBRIDEP_DC'])\n")
    line = hybridep("testbed", "run", "preset:two-dc", "--plan", "ep", "--", "python", str(script))
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    expected = ["[a/0] hello a", "[a/1] hello a", "[b/0] hello b", "[b/1] hello b"]
    assert sorted(done.stdout.splitlines()) == expected
