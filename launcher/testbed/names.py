"""Names that say whose testbed a namespace or directory belongs to, so that a later start can tell what is left over.

    hep-PID-STARTED          the directory, and with -DC a network namespace

STARTED is the owner's start time in clock ticks since boot: with it a reused PID is not taken for the owner.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"hep-([1-9][0-9]{0,9})-([0-9]{1,19})(?:-([A-Za-z0-9][A-Za-z0-9_-]{0,62}))?", re.ASCII)
_STARTED_FIELD = 22


class Owner(NamedTuple):
    """A process, unmistakably."""

    pid: int
    started: int

    @property
    def directory(self) -> str:
        """Name of its testbed's directory; also the testbed's name on the command line."""
        return f"hep-{self.pid}-{self.started}"

    def namespace(self, dc: str) -> str:
        """Name of the network namespace of one of its DCs."""
        return f"{self.directory}-{dc}"


def owner_of(name: str) -> Owner | None:
    """Who made the directory or namespace of that name; None if it is none of a testbed's."""
    match = _NAME.fullmatch(name)
    return None if match is None else Owner(int(match[1]), int(match[2]))


def started_in(stat: str) -> int:
    """A process's start time from the text of /proc/PID/stat, whose second field may hold anything in parentheses."""
    return int(stat.rpartition(")")[2].split()[_STARTED_FIELD - 3])


def address_of(index: int) -> str:
    """WAN address of a DC by number, in 198.18.0.0/15 (reserved for testbeds by RFC 2544)."""
    number = index + 1
    return f"198.{18 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
