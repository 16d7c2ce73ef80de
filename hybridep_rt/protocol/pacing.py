"""Emulated link rates and delays, in virtual time. Sans-I/O.

A chunk starts when its link and its DC's uplink are free, occupies each for its own serialisation time, and is released
to the real socket when its last byte would arrive: start + bytes / slowest rate + delay. Starts are computed from the
ideal times, not from when the process woke up, so that late timers don't lower the rate.

An uplink shared by several links serves them one chunk each in the order in which they asked (round robin), whatever
the class of traffic: priorities hold within a link.
"""

from __future__ import annotations

import math
from collections import deque

LATENESS_S = 0.02
"""How far in the past a chunk may start: a process that slept longer lost that time."""

TURN_S = 0.001
"""How soon to ask again while another link, whose turn it is at the uplink, has not woken up yet."""


class Uplink:
    """What all links of one DC share on their way out. `math.inf`: no limit."""

    def __init__(self, rate_bytes_per_s: float = math.inf) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.free_at = 0.0
        self.asking: deque[LinkPacer] = deque()


class LinkPacer:
    """One directed link: when may the next chunk start, and when does it arrive."""

    def __init__(self, rate_bytes_per_s: float, delay_s: float, uplink: Uplink) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._delay_s = delay_s
        self._uplink = uplink
        self._free_at = 0.0
        self._wanted_at: float | None = None

    def ask(self, now: float) -> float:
        """A chunk waits. Returns `now` if it may start, else when to ask again."""
        if self._wanted_at is None:
            self._wanted_at = now
        if self._free_at > now:
            return self._free_at
        asking = self._uplink.asking
        if self not in asking:
            asking.append(self)
        if self._uplink.free_at > now:
            return self._uplink.free_at
        return now if asking[0] is self else now + TURN_S

    def start(self, nbytes: int, now: float) -> float:
        """A chunk starts, as `ask` allowed just now; returns when its last byte arrives."""
        self._uplink.asking.popleft()
        wanted_at = now if self._wanted_at is None else self._wanted_at
        start = max(wanted_at, self._free_at, self._uplink.free_at, now - LATENESS_S)
        self._free_at = start + nbytes / self._rate_bytes_per_s
        self._uplink.free_at = start + nbytes / self._uplink.rate_bytes_per_s
        return max(self._free_at, self._uplink.free_at) + self._delay_s

    def idle(self) -> None:
        """Nothing waits on this link any more."""
        self._wanted_at = None
        if self in self._uplink.asking:
            self._uplink.asking.remove(self)


class Downlink:
    """What all links of one DC share on their way in."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._done_at = 0.0

    def receive(self, nbytes: int, now: float) -> float:
        """Bytes arrived; returns when they would have come through. Bytes of a free downlink came as they were sent."""
        self._done_at = max(now, self._done_at + nbytes / self._rate_bytes_per_s)
        return self._done_at
