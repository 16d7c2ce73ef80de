"""One thread beside the training thread, for work that nobody waits for yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Background:
    """Runs jobs one after the other, in the order they were asked for. A job has to keep its own errors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")

    def soon(self, job: Callable[[], None]) -> None:
        """Run it after those before it; any thread. Nothing happens after `close`."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(job)

    def close(self) -> None:
        """Drop what has not begun. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
