"""One job per cluster, DC and user on a machine. The kernel frees the lock with its process: it can't become stale."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from hybridep_rt.errors import ConfigError

_HOLDER = re.compile(rb"(\d+) ([0-9a-z]+)\n")


@contextlib.contextmanager
def job_lock(cluster: str, dcs: Sequence[str], mark: str, directory: Path | None = None) -> Iterator[set[str]]:
    """Hold the locks of these DCs; gives the marks of the jobs that held them before, which are over or were killed.

    Raises ConfigError, which names the cluster and the other job's pid.
    """
    where = runtime_directory() if directory is None else directory
    earlier = set()
    with contextlib.ExitStack() as held:
        for dc in dcs:
            lock = _take(where, cluster, dc)
            held.callback(os.close, lock)
            earlier.add(_read(lock)[1])
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {mark}\n".encode(), 0)
        yield earlier - {""}


def runtime_directory() -> Path:
    """This user's private directory. Raises ConfigError if somebody else owns it or can enter it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base, f"hybridep-user-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory that only you can enter: remove it")
    return path


def _take(directory: Path, cluster: str, dc: str) -> int:
    path = directory / f"{quote(cluster, safe='')}+{quote(dc, safe='')}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _ = _read(lock)
        os.close(lock)
        raise ConfigError(
            f'cluster "{cluster}" is already running on this machine: DC "{dc}" belongs to the job with pid {pid}'
        ) from None
    return lock


def _read(lock: int) -> tuple[str, str]:
    match = _HOLDER.fullmatch(os.pread(lock, 100, 0))
    return (match[1].decode(), match[2].decode()) if match else ("unknown", "")
