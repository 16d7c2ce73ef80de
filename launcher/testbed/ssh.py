"""SSH daemons inside the DCs, so that one mpirun can span them. A thin shell."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from launcher.testbed import tun
from launcher.testbed.bed import Testbed
from launcher.testbed.sites import Program, in_background
from launcher.testbed.ssh_text import PORT, agent_script, daemon_config
from topology.errors import ConfigError

_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
_START_S = 10.0
_LOOK_S = 0.02
# The daemon insists on this directory: it gets one of its own, on a /run that only it sees.
_DAEMON = 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$0" -D -e -f "$1"'


@contextmanager
def daemons(bed: Testbed, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A daemon in every DC but the first, where mpirun runs; yields the variables that have mpirun use them.

    `environment` is set for what they start. Raises ConfigError where OpenSSH is missing or does not start.
    """
    where = {name: _find(name) for name in _PROGRAMS}
    directory = bed.directory / "ssh"
    directory.mkdir(mode=0o700)
    for key in ("host_key", "user_key"):
        words = [where["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=_START_S)
    agent = directory / "agent"
    agent.write_text(agent_script(str(directory)))
    agent.chmod(0o700)
    programs = [_daemon(bed, name, directory, where["sshd"], environment) for name in bed.names[1:]]
    with in_background(programs):
        for name in bed.names[1:]:
            _await(bed, name)
        network = "198.18.0.0/15"
        yield {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "PRTE_MCA_prte_if_include": network,
            "OMPI_MCA_btl_tcp_if_include": network,
        }


def _daemon(bed: Testbed, name: str, directory: Path, sshd: str, environment: Mapping[str, str]) -> Program:
    config = directory / f"{name}.conf"
    config.write_text(daemon_config(str(directory), bed.address(name), environment))
    return Program(name, f"[{name}/sshd] ", bed.command(name, ["sh", "-c", _DAEMON, sshd, str(config)]), {})


def _await(bed: Testbed, name: str) -> None:
    """Until a DC's daemon answers, from the first DC."""
    deadline = monotonic() + _START_S
    while True:
        try:
            with tun.inside(bed.path(bed.names[0])):
                socket.create_connection((bed.address(name), PORT), timeout=max(deadline - monotonic(), 0.1)).close()
                return
        except OSError as error:
            if monotonic() > deadline:
                raise ConfigError(f"sshd in DC {name!r} did not answer within {_START_S:g} s: {error}") from None
        sleep(_LOOK_S)


def _find(program: str) -> str:
    """Path of a program, also where only root's PATH leads."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise ConfigError(f"--single-mpirun needs {program!r} (package {_PROGRAMS[program]})")
    return path
