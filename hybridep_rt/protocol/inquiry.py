"""Who is late? A wait that runs out names whom it waited for; but that one may itself wait for somebody. Sans-I/O.

The report of a wait that ran out goes to the coordinator of the one who is waited for. It asks that worker, whose link
answers whatever its program does: one that waits too, and has for at least half as long, is excused, and the report
goes on to whom it waits for. One that doesn't wait, or doesn't answer, or would be asked a second time, is late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hybridep_rt.errors import DeadlineExceeded, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import pack_fields
from hybridep_rt.protocol.link import read_address, read_int, read_reason

ANSWER_S = 1.0
VERDICT_S = 5.0
"""A wait that ran out goes on so long, so that who is late can be found."""

_ASKED_MOST = 32
_SHARE = 0.5
_SECONDS_END = 1 << 40
_BYTES_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Late:
    """A wait for `peer`. `layer` None: outside a layer. `bytes_outstanding` None: nothing of the message is here.

    `asked`: who is excused. `channel`: the message's, which `operation` puts in words.
    """

    peer: Address
    operation: str
    layer: int | None
    waited_s: float
    bytes_outstanding: int | None = None
    asked: tuple[Address, ...] = ()
    channel: str = ""

    def pack(self) -> bytes:
        """The fields of LATE, and of an EXCUSE that names somebody."""
        return pack_fields(**self.fields())

    def fields(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {
            "dc": self.peer.dc,
            "worker": self.peer.worker,
            "reason": self.operation,
            "layer": self.layer,
            "waited": self.waited_s,
            "bytes": self.bytes_outstanding,
            "asked": self.asked,
            "channel": self.channel,
        }

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Late:
        """The inverse of `pack`. Raises RemoteProtocolError."""
        layer, nbytes, asked, waited_s = (fields.get(name) for name in ("layer", "bytes", "asked", "waited"))
        if not isinstance(asked, tuple) or len(asked) > _ASKED_MOST:
            raise RemoteProtocolError(f"asked must name up to {_ASKED_MOST}")
        if type(waited_s) is not float or not 0 <= waited_s < _SECONDS_END:
            raise RemoteProtocolError("waited must be a number of seconds")
        return cls(
            read_address(fields),
            read_reason(fields, "reason"),
            None if layer is None else read_int(fields, "layer", 0, _BYTES_END),
            waited_s,
            None if nbytes is None else read_int(fields, "bytes", 0, _BYTES_END),
            tuple(_read_pair(each) for each in asked),
            read_reason(fields, "channel"),
        )

    def error(self, dc_names: tuple[str, ...]) -> DeadlineExceeded:
        """What every worker raises."""
        return DeadlineExceeded(
            peer=self.peer.describe(dc_names),
            operation=self.operation,
            layer=self.layer,
            waited_s=self.waited_s,
            bytes_outstanding=self.bytes_outstanding,
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """Give the report to the coordinator of that DC."""

    dc: int
    report: Late


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a worker of this DC whom it waits for."""

    worker: Address
    report: Late


@dataclass(frozen=True, slots=True)
class Verdict:
    """`late.peer` is late: the run ends."""

    late: Late


Command: TypeAlias = Forward | Ask | Verdict


class Inquiry:
    """One coordinator's part. `is_up`: can the coordinator of that DC be reached now?"""

    def __init__(self, dc: int, is_up: Callable[[int], bool]) -> None:
        self._dc = dc
        self._is_up = is_up
        self._open: dict[Address, tuple[Late, float]] = {}

    def report(self, late: Late, now: float) -> list[Command]:
        """Somebody has waited in vain."""
        peer = late.peer
        if peer.dc != self._dc:
            if self._is_up(peer.dc):
                return [Forward(peer.dc, late)]
            return [Verdict(replace(late, peer=Address(peer.dc, COORDINATOR)))]
        if peer in late.asked or len(late.asked) >= _ASKED_MOST:
            return [Verdict(late)]
        if peer in self._open:
            return []
        self._open[peer] = (late, now + ANSWER_S)
        return [Ask(peer, late)]

    def answer(self, worker: Address, excuse: Late | None, now: float) -> list[Command]:
        """A worker says that it waits too, or doesn't."""
        late, _ = self._open.pop(worker, (None, 0.0))
        if late is None:
            return []
        if excuse is None or excuse.waited_s < _SHARE * late.waited_s:
            return [Verdict(late)]
        return self.report(replace(excuse, asked=(*late.asked, worker)), now)

    def get_timer(self) -> float | None:
        """When `handle_timer` has to be called next."""
        return min((deadline for _, deadline in self._open.values()), default=None)

    def handle_timer(self, now: float) -> list[Command]:
        """Time passed: who has not answered is late."""
        silent = [late for late, deadline in self._open.values() if deadline <= now]
        for late in silent:
            del self._open[late.peer]
        return [Verdict(late) for late in silent]


def _read_pair(value: Any) -> Address:
    if not isinstance(value, tuple) or len(value) != 2:
        raise RemoteProtocolError("an address must have 2 entries")
    return read_address({"dc": value[0], "worker": value[1]})
