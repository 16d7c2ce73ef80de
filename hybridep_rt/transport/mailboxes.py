"""Received messages, waiting for the thread that wants them. Shared by the real worker link and the in-memory one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hybridep_rt.errors import DeadlineExceeded, HybridEPError, PeerLost, PositionMismatch
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position


class _Wait(NamedTuple):
    """One call of `receive`."""

    source: Address
    channel: str
    position: Position
    started: float
    deadline: float


class Mailboxes:
    """One first-in-first-out queue per (source, channel). A failure wakes every waiter and stays.

    A peer that said goodbye may still have messages here; only a wait that nothing can end raises.
    """

    def __init__(
        self,
        address: Address,
        dc_names: tuple[str, ...],
        operation_s: float,
        metrics: Metrics,
        taken: Callable[[int], None] = lambda message_id: None,
    ) -> None:
        """`taken` is told the number of each message that a program takes."""
        self._address = address
        self._dc_names = dc_names
        self._operation_s = operation_s
        self._metrics = metrics
        self._changed = threading.Condition()
        self._taken = taken
        self._queues: defaultdict[tuple[Address, str], deque[tuple[Message, int]]] = defaultdict(deque)
        self._departed: dict[Address, str] = {}
        self._failure: HybridEPError | None = None
        self._wakers: set[Callable[[], None]] = set()

    def deliver(self, message: Message, message_id: int = 0) -> None:
        """Append a message to its queue. Any thread."""
        with self._changed:
            self._queues[message.source, message.channel].append((message, message_id))
            self._notify()

    def depart(self, peer: Address, where: str) -> None:
        """`peer` ended in good order, at the place `where`: waits for more from it can't succeed."""
        with self._changed:
            self._departed[peer] = where
            self._notify()

    def fail(self, error: HybridEPError) -> None:
        """The job is broken: every present and future wait raises `error`. The first failure is kept."""
        with self._changed:
            self._failure = self._failure or error
            self._notify()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def receive(self, source: Address, channel: str, position: Position, timeout_s: float | None = None) -> Message:
        """The next message of the queue, which has to carry `position`; see `WanPort.receive`."""
        wait = self._wait(source, channel, position, timeout_s)
        with self._changed:
            while (message := self._take(wait)) is None:
                self._changed.wait(wait.deadline - time.monotonic())
        return self._accept(wait, message)

    async def receive_async(
        self, source: Address, channel: str, position: Position, timeout_s: float | None = None
    ) -> Message:
        """`receive` for a caller that runs an event loop; cancelling it loses no message."""
        wait = self._wait(source, channel, position, timeout_s)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(changed.set)

        try:
            while True:
                changed.clear()
                with self._changed:
                    self._wakers.add(wake)
                    message = self._take(wait)
                if message is not None:
                    return self._accept(wait, message)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), wait.deadline - time.monotonic())
        finally:
            with self._changed:
                self._wakers.discard(wake)

    def expect(self, peers: Iterable[Address], position: Position) -> None:
        """Raise what ended the job, or PositionMismatch where one of `peers`, who are needed now, has ended."""
        with self._changed:
            self.check()
            for peer in peers:
                if peer in self._departed:
                    raise self._left(peer, "an exchange", position)

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

    def _wait(self, source: Address, channel: str, position: Position, timeout_s: float | None) -> _Wait:
        now = time.monotonic()
        return _Wait(source, channel, position, now, now + (self._operation_s if timeout_s is None else timeout_s))

    def _take(self, wait: _Wait) -> Message | None:
        """The next message, or None while one can still come; raises what ends the wait. Holds the lock."""
        queue = self._queues[wait.source, wait.channel]
        if queue:
            message, message_id = queue.popleft()
            self._taken(message_id)
            return message
        self.check()
        if wait.source in self._departed:
            raise self._left(wait.source, wait.channel, wait.position)
        if time.monotonic() >= wait.deadline:
            raise DeadlineExceeded(
                peer=wait.source.describe(self._dc_names),
                operation=f"{wait.channel} at {wait.position.describe()}",
                layer=wait.position.layer if wait.position.layer >= 0 else None,
                waited_s=time.monotonic() - wait.started,
            )
        return None

    def _accept(self, wait: _Wait, message: Message) -> Message:
        waited_s = time.monotonic() - wait.started
        self._metrics.waited(wait.position.layer, wait.source.dc, wait.channel, waited_s)
        if message.position != wait.position:
            raise PositionMismatch(
                mine=wait.position.describe(),
                peer=wait.source.describe(self._dc_names),
                theirs=message.position.describe(),
            )
        return message

    def _left(self, source: Address, channel: str, position: Position) -> HybridEPError:
        peer, where = source.describe(self._dc_names), self._departed[source]
        if position.phase is Phase.MAILBOX:
            return PeerLost(peer, f"ended (after {where}) while {channel} waits for its next message")
        return PositionMismatch(mine=position.describe(), peer=peer, theirs=f"its end (after {where})")
