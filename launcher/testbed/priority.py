"""Scheduling of what keeps time or measures: ahead of the programs under test, which may keep every core busy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


def keep_time() -> None:
    """From now on run when something is to do, and wake up when asked. Does what this user may do of it."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """Run the block so; its child processes would too."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    keep_time()
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, *before)
