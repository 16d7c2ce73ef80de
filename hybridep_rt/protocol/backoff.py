"""How long to wait before the next attempt: longer each time, and not all at once. Sans-I/O."""

from __future__ import annotations

from random import Random


class Backoff:
    """Waits of `first_s`, doubled up to `longest_s`, each shortened by up to half at random."""

    def __init__(self, random: Random, first_s: float, longest_s: float) -> None:
        self._random = random
        self._first_s = first_s
        self._longest_s = longest_s
        self._wait_s = first_s

    def next_s(self) -> float:
        """An attempt failed: seconds until the next one."""
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, self._longest_s)
        return wait_s * (1 - self._random.random() / 2)

    def reset(self) -> None:
        """An attempt succeeded."""
        self._wait_s = self._first_s
