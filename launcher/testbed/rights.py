"""What a testbed needs of the machine, and root in a user namespace for those who are not root. A thin shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from launcher.testbed.tun import TUN_PATH
from topology.errors import ConfigError

_TOOLS = {"ip": "iproute2", "setpriv": "util-linux", "unshare": "util-linux"}
_AS_ROOT = ("unshare", "--user", "--map-root-user", "--mount", "--net")
# ip(8) keeps namespaces under /run/netns: there, or else at /run, this user gets a place that only this job sees.
_OWN_RUN = '{ mount -t tmpfs none /run/netns 2>/dev/null || mount -t tmpfs none /run; } && exec "$@"'
_TRY_S = 10.0


def missing_rights() -> str | None:
    """One line that says what this machine or user lacks for a testbed; None if nothing."""
    if os.geteuid() != 0:
        return "a testbed needs root: it makes network namespaces and TUN devices"
    return _missing_on_machine()


def obtain_rights() -> None:
    """Return if this process may make a testbed; else start it anew as root of a user namespace.

    Raises ConfigError: one line that says what is missing.
    """
    missing = _missing_on_machine()
    if missing is None and os.geteuid() != 0:
        tried = subprocess.run([*_AS_ROOT, "true"], capture_output=True, text=True, timeout=_TRY_S, check=False)
        if tried.returncode == 0:
            os.execvp(_AS_ROOT[0], [*_AS_ROOT, "sh", "-c", _OWN_RUN, "sh", *sys.orig_argv])
        missing = f"a testbed needs root, or user namespaces: {tried.stderr.strip()}"
    if missing is not None:
        raise ConfigError(missing)


def _missing_on_machine() -> str | None:
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"a testbed needs the program {tool!r} (package {package})"
    try:
        os.close(os.open(TUN_PATH, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"a testbed needs {TUN_PATH} (kernel module tun): {error.strerror}"
    return None
