"""`hybridep status`: finds coordinators by their sockets, shows their links, and believes no stranger's."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.metrics import LinkStatus
from hybridep_rt.runtime.status import Status
from launcher.cli import main
from launcher.status_view import ask_all, status_sockets, view

LINK = LinkStatus(
    is_up=True,
    reconnects=2,
    rtt_s=0.0412,
    sent_bytes=5_000_000_000,
    received_bytes=1_000,
    sent_bytes_per_s=12_400_000.0,
    received_bytes_per_s=0.0,
    retransmitted_bytes=125_000,
    unacked_bytes=2_000_000,
    queued_bytes={"tokens": 65_536, "experts": 256_000_000, "gradients": 0},
    peer_holds_bytes=64 << 20,
    window_bytes=256 << 20,
    credit_stalls=7,
    last_failure="its connection ended",
)
STATUS = Status('coordinator of DC "a"', 42, {'coordinator of DC "b"': LINK})


def text(*found: Status) -> list[str]:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(view(found))
    return console.export_text().splitlines()


class Answering:
    """A job folder with a coordinator's socket, which answers as long as it is open."""

    def __init__(self, base: Path, job: str, answer: bytes) -> None:
        self.folder = base / f"hybridep-{job}-x"
        self.folder.mkdir(mode=0o700)
        self.path = self.folder / "status"
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            with sock:
                sock.sendall(self._answer)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    made = Answering(tmp_path, "abc", STATUS.pack())
    yield made
    made.close()


def run(base: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setattr("tempfile.tempdir", str(base))
    return CliRunner(env={"COLUMNS": "140"}).invoke(main, ["status", *arguments])


def test_a_link_in_one_line() -> None:
    lines = text(STATUS)
    assert lines[0].strip() == 'coordinator of DC "a"  (pid 42)'
    [line] = [line for line in lines if 'DC "b"' in line]
    assert " ".join(line.split()) == (
        '● coordinator of DC "b" 12.4 MB/s 0 B/s 41.2 ms 125 kB 2 2 MB tokens 65.5 kB, experts 256 MB 75% 7'
    )


def test_a_link_that_is_down_says_why() -> None:
    down = replace(LINK, is_up=False, rtt_s=None, queued_bytes={}, window_bytes=0)
    shown = "\n".join(text(replace(STATUS, links={"worker [red]0[/red]": down})))
    assert "○ worker [red]0[/red]" in shown
    assert "its connection ended" in shown
    assert "its connection ended" not in "\n".join(text(STATUS))


def test_the_command(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(answering.folder.parent, monkeypatch)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "12.4 MB/s" in result.output
    [found] = json.loads(run(answering.folder.parent, monkeypatch, "--json").output)
    assert found["links"]['coordinator of DC "b"']["credit_stalls"] == 7


def test_nobody_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])
    assert result.stderr == "hybridep: no coordinator of yours runs on this machine\n"


def test_who_was_killed_or_is_none_of_ours_is_left_out(answering: Answering, tmp_path: Path) -> None:
    dead = Answering(tmp_path, "dead", b"")
    dead.close()
    open_to_all = Answering(tmp_path, "open", STATUS.pack())
    open_to_all.folder.chmod(0o755)
    (tmp_path / "hybridep-file-x").mkdir(mode=0o700)
    (tmp_path / "hybridep-file-x" / "status").write_text("not a socket")
    found = status_sockets(tmp_path)
    open_to_all.close()
    assert found == [answering.path, dead.path]
    assert ask_all(found) == [STATUS]


def test_nonsense_is_an_error(tmp_path: Path) -> None:
    broken = Answering(tmp_path, "broken", b"[[[[")
    with pytest.raises(RemoteProtocolError):
        ask_all([broken.path])
    broken.close()
