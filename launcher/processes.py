"""No process survives its job: children die with their parent, and what is left is found and killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

JOB_VARIABLE = "HYBRIDEP_JOB"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process `parent`, dies, however that happens."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the kernel was told.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def clear_away(job: str, patience_s: float = 5.0) -> None:
    """Kill every process of this machine that carries the job's mark, and remove the folders that they left."""
    deadline = time.monotonic() + patience_s
    while (left := marked(job)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for path in Path(tempfile.gettempdir()).glob(f"hybridep-{job}-*"):
        shutil.rmtree(path, ignore_errors=True)


def marked(job: str) -> list[int]:
    """Processes of this machine that carry the job's mark, as far as this user may see them."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def job_directory(job: str) -> str:
    """A new private directory; its path is short, as those of Unix sockets must be."""
    return tempfile.mkdtemp(prefix=f"hybridep-{job}-")
