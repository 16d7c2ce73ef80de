"""The files of an SSH daemon inside a DC of a testbed, and of the agent that mpirun calls. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

PORT = 22


def daemon_config(directory: str, address: str, environment: Mapping[str, str]) -> str:
    """sshd_config: this testbed's key and no other may enter, from inside the testbed only."""
    lines = {
        "ListenAddress": f"{address}:{PORT}",
        "HostKey": f"{directory}/host_key",
        "AuthorizedKeysFile": f"{directory}/user_key.pub",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "MaxStartups": "100",
        "LogLevel": "FATAL",
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in environment.items()),
    }
    return "".join(f"{key} {value}\n" for key, value in lines.items())


def agent_script(directory: str) -> str:
    """What mpirun calls in the place of ssh. Host keys are not checked: these hosts are minutes old and local."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "20",
        "IdentitiesOnly": "yes",
        "LogLevel": "ERROR",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
    }
    words = ["ssh", "-F", "/dev/null", "-i", f"{directory}/user_key"]
    words += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
