"""A timer that keeps microseconds. The event loop's own counts in milliseconds, too coarse for emulated links."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """Calls `callback` once, at the time last `set`. Linux: a timerfd; elsewhere the event loop's timer."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._coarse: asyncio.TimerHandle | None = None
        self._fd = _open()
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._fire)

    def set(self, when: float) -> None:
        """Call at `when`, as `time.monotonic()`, instead of when it was set before."""
        if self._fd >= 0:
            whole_s = int(when)
            value = _Timespec(whole_s, max(1, int((when - whole_s) * 1e9)))
            _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(_Itimerspec(_Timespec(0, 0), value)), None)
            return
        if self._coarse is not None:
            self._coarse.cancel()
        self._coarse = self._loop.call_later(max(0.0, when - time.monotonic()), self._callback)

    def close(self) -> None:
        """Never call again; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._coarse is not None:
            self._coarse.cancel()

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set again after it had expired
            os.read(self._fd, 8)
            self._callback()


_libc = ctypes.CDLL(None, use_errno=True)


def _open() -> int:
    """A new timerfd, or -1 where the system has none."""
    try:
        return int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return -1
