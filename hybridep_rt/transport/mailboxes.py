"""Received messages, waiting for the thread that wants them. Shared by the real worker link and the in-memory one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from hybridep_rt.errors import DeadlineExceeded, HybridEPError, PeerLost, PositionMismatch
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position


class Mailboxes:
    """One first-in-first-out queue per (source, channel). A failure wakes every waiter and stays.

    A peer that said goodbye may still have messages here; only a wait that nothing can end raises.
    """

    def __init__(self, address: Address, dc_names: tuple[str, ...], operation_s: float, metrics: Metrics) -> None:
        self._address = address
        self._dc_names = dc_names
        self._operation_s = operation_s
        self._metrics = metrics
        self._changed = threading.Condition()
        self._queues: defaultdict[tuple[Address, str], deque[Message]] = defaultdict(deque)
        self._departed: dict[Address, str] = {}
        self._failure: HybridEPError | None = None

    def deliver(self, message: Message) -> None:
        """Append a message to its queue. Any thread."""
        with self._changed:
            self._queues[message.source, message.channel].append(message)
            self._changed.notify_all()

    def depart(self, peer: Address, where: str) -> None:
        """`peer` ended in good order, at the place `where`: waits for more from it can't succeed."""
        with self._changed:
            self._departed[peer] = where
            self._changed.notify_all()

    def fail(self, error: HybridEPError) -> None:
        """The job is broken: every present and future wait raises `error`. The first failure is kept."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def receive(self, source: Address, channel: str, position: Position, timeout_s: float | None = None) -> Message:
        """The next message of the queue, which has to carry `position`; see `WanPort.receive`."""
        started = time.monotonic()
        deadline = started + (self._operation_s if timeout_s is None else timeout_s)
        queue = self._queues[source, channel]
        with self._changed:
            while not queue:
                self.check()
                if source in self._departed:
                    raise self._left(source, channel, position)
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise DeadlineExceeded(
                        peer=source.describe(self._dc_names),
                        operation=f"{channel} at {position.describe()}",
                        layer=position.layer if position.layer >= 0 else None,
                        waited_s=time.monotonic() - started,
                    )
                self._changed.wait(remaining_s)
            message = queue.popleft()
        self._metrics.waited(position.layer, source.dc, channel, time.monotonic() - started)
        if message.position != position:
            raise PositionMismatch(
                mine=position.describe(),
                peer=source.describe(self._dc_names),
                theirs=message.position.describe(),
            )
        return message

    def _left(self, source: Address, channel: str, position: Position) -> HybridEPError:
        peer, where = source.describe(self._dc_names), self._departed[source]
        if position.phase is Phase.MAILBOX:
            return PeerLost(peer, f"ended (after {where}) while {channel} waits for its next message")
        return PositionMismatch(mine=position.describe(), peer=peer, theirs=f"its end (after {where})")
