"""Kernels are compiled before the first step, by one process of a machine; the others load what it left on disk."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 60.0
_POLL_S = 0.05
_done: set[str] = set()


def compile_kernels(specs: Iterable[str], *, with_adamw: bool) -> None:
    """Have all kernels ready that these codecs use, with the optimizer's if it is ours. Does nothing the second time.

    Processes of one user on one machine take turns; whoever waits for more than a minute goes on alone.
    """
    wanted = dict.fromkeys(specs, False) | ({"adamw": True} if with_adamw else {})
    missing = [spec for spec in wanted if spec not in _done and spec not in ("exact", "fp32", "bf16")]
    if not missing:
        return
    with _turn():
        from hybridep_rt.codecs.warm_up import warm_up, warm_up_adamw

        warm_up(spec for spec in missing if not wanted[spec])
        if "adamw" in missing:
            warm_up_adamw()
    _done.update(missing)


@contextmanager
def _turn() -> Iterator[None]:
    path = os.path.join(tempfile.gettempdir(), f"hybridep-{os.getuid()}-kernels.lock")
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # no such folder, or not ours: compile without
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _locked(lock) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
