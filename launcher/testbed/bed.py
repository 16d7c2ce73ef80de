"""A running testbed: namespaces, relay, directory. A thin shell over ip(8); leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launcher.testbed import control, tun
from launcher.testbed.names import Owner, address_of, owner_of, started_in
from launcher.testbed.shaping import Access, Shape
from topology.errors import ConfigError

NAMESPACES = Path("/run/netns")
_READY_S = 20.0
_COMMAND_S = 20.0
_ANSWER_S = 5.0
# Long fat pipes need large windows, also after a pause; and no connection may inherit what an earlier one met on a link
# since changed.
_SYSCTLS = {
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
}
# A burst must find room until the relay's next turn.
_QUEUE_PACKETS = 20000


class Testbed:
    """Context manager: the namespaces exist and are joined inside the block. Raises ConfigError where ip(8) fails."""

    __test__ = False

    def __init__(
        self,
        names: Sequence[str],
        access: Sequence[Access],
        shapes: Mapping[tuple[int, int], Shape],
        *,
        label: str,
        seed: int = 0,
    ) -> None:
        """`names` per DC; `label` says on which topology it is, for those who look for it."""
        self.names = tuple(names)
        self._access, self._shapes, self._seed, self._label = access, shapes, seed, label
        self.owner = Owner(os.getpid(), started_in(Path("/proc/self/stat").read_text()))
        self.directory = Path(tempfile.gettempdir()) / self.owner.directory
        self.relay: subprocess.Popen[bytes] | None = None
        self._made: list[str] = []

    def __enter__(self) -> Testbed:
        sweep()
        self.directory.mkdir(mode=0o700)
        try:
            (self.directory / "testbed.json").write_text(json.dumps({"label": self._label, "names": self.names}))
            for name in self.names:
                self._made.append(self.namespace(name))
                _ip(f"netns add {self.namespace(name)}")
            self._start_relay()
            for index, name in enumerate(self.names):
                self._configure(index, name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the relay, remove the namespaces and the directory. May be called twice."""
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
            if self.relay.stdout is not None:
                self.relay.stdout.close()
        while self._made:
            _remove_namespace(self._made.pop())
        shutil.rmtree(self.directory, ignore_errors=True)

    def namespace(self, name: str) -> str:
        """Name of a DC's network namespace."""
        return self.owner.namespace(name)

    def path(self, name: str) -> Path:
        """Path of a DC's network namespace."""
        return NAMESPACES / self.namespace(name)

    def address(self, name: str) -> str:
        """A DC's WAN address."""
        return address_of(self.names.index(name))

    def change(self, change: control.Change) -> None:
        """Change a running link."""
        send_change(self.directory, change)

    def relay_cpu_s(self) -> float:
        """Processor time that the relay has used so far."""
        assert self.relay is not None
        fields = Path(f"/proc/{self.relay.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command inside a DC: its network, its host name, its own processes.

        All of them end when this process ends: the first dies with it, and takes the PID namespace along.
        """
        inside = 'hostname "$0" && "$@"; exit $?'
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace(name)]
        return [*enter, *unshare, "sh", "-c", inside, name, *command]

    def _start_relay(self) -> None:
        sites = [
            control.Site(name, str(self.path(name)), address_of(index), self._access[index])
            for index, name in enumerate(self.names)
        ]
        wiring = control.Wiring(sites, self._shapes, str(self.directory / "control"), self._seed)
        self.relay = subprocess.Popen(
            [sys.executable, "-m", "launcher.testbed.relay", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.relay.stdin is not None
        assert self.relay.stdout is not None
        self.relay.stdin.write(control.pack_wiring(wiring))
        self.relay.stdin.close()
        ready, _, _ = select.select([self.relay.stdout], (), (), _READY_S)
        if not ready or self.relay.stdout.readline() != b"ready\n":
            raise ConfigError(f"the testbed's relay did not start within {_READY_S:g} s")

    def _configure(self, index: int, name: str) -> None:
        namespace = self.namespace(name)
        _ip(
            "link set lo up",
            f"addr add {address_of(index)}/15 dev {tun.DEVICE}",
            f"link set {tun.DEVICE} txqueuelen {_QUEUE_PACKETS} up",
            namespace=namespace,
        )
        with tun.inside(self.path(name)):
            for key, value in _SYSCTLS.items():
                path = Path("/proc/sys") / key
                if path.exists():
                    path.write_text(value)


@dataclass(frozen=True, slots=True)
class Running:
    """A testbed of any process on this machine."""

    name: str
    directory: Path
    label: str
    names: tuple[str, ...]


def running() -> list[Running]:
    """All testbeds on this machine whose owner lives and that this user may use."""
    found = []
    for directory, owner in _directories():
        if is_alive(owner):
            try:
                about = json.loads((directory / "testbed.json").read_bytes()[: control.MESSAGE_BYTES_MAX])
                found.append(Running(directory.name, directory, str(about["label"]), tuple(map(str, about["names"]))))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return found


def send_change(directory: Path, change: control.Change) -> None:
    """Tell a testbed's relay to change a link. Raises ConfigError if it refuses or doesn't answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        caller.settimeout(_ANSWER_S)
        # An empty name has the kernel choose an abstract one: nothing to clean up.
        caller.bind("")
        try:
            caller.connect(str(directory / "control"))
            caller.send(control.pack_change(change))
            answer = caller.recv(control.MESSAGE_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"testbed {directory.name}: the relay doesn't answer: {error}") from None
    if answer:
        raise ConfigError(answer.decode(errors="replace"))


def sweep() -> None:
    """Remove what testbeds left behind whose owner is dead."""
    if NAMESPACES.is_dir():
        for path in NAMESPACES.iterdir():
            owner = owner_of(path.name)
            if owner is not None and not is_alive(owner):
                _remove_namespace(path.name)
    for directory, owner in _directories():
        if not is_alive(owner):
            shutil.rmtree(directory, ignore_errors=True)


def is_alive(owner: Owner) -> bool:
    """Whether a testbed's owner still runs."""
    try:
        text = Path(f"/proc/{owner.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started_in(text) == owner.started and text.rpartition(")")[2].split()[0] not in ("Z", "X")


def _directories() -> list[tuple[Path, Owner]]:
    """The testbed directories of this user; never another's, nor a symbolic link."""
    found = []
    for path in Path(tempfile.gettempdir()).glob("hep-*"):
        owner = owner_of(path.name)
        try:
            about = path.lstat()
        except OSError:
            continue
        if owner is not None and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
            found.append((path, owner))
    return found


def _ip(*commands: str, namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    _checked(["ip", *where, "-batch", "-"], "\n".join(commands))


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S, check=False)


def _checked(command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{text}: {done.stderr.strip()}")
