"""Received messages, waiting for the thread that wants them. Shared by the real worker link and the in-memory one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hybridep_rt.errors import DeadlineExceeded, HybridEPError, PeerLost, PositionMismatch
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.inquiry import VERDICT_S
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position


@dataclass(slots=True, eq=False)
class Wait:
    """One call of `receive`. `bounded_by_user`: its time is the caller's own, not the run's."""

    source: Address
    channel: str
    position: Position
    started: float
    deadline: float
    bounded_by_user: bool
    is_told: bool = False

    @property
    def operation(self) -> str:
        """What it is for."""
        return f"{self.channel} at {self.position.describe()}"

    @property
    def layer(self) -> int | None:
        """The layer it is for, if it is inside one."""
        return self.position.layer if self.position.layer >= 0 else None


def span_name(to: Address, channel: str, position: Position) -> str:
    """A message in a trace."""
    return f"{channel} to {to.describe()}: {position.describe()}"


def span_key(source: Address, name: str) -> str:
    """What tells a message from all others in a trace."""
    return f"{source.describe()} {name}"


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
        ran_out: Callable[[Wait], None] | None = None,
    ) -> None:
        """`taken` is told the number of each message that a program takes.

        `ran_out` is told of a wait of the run's own that has run out: it finds out who is late and says `fail`. The
        wait goes on for `VERDICT_S` until then.
        """
        self._address = address
        self._dc_names = dc_names
        self._operation_s = operation_s
        self._metrics = metrics
        self._changed = threading.Condition()
        self._taken = taken
        self._ran_out = ran_out
        self._waits: list[Wait] = []
        self._queues: defaultdict[tuple[Address, str], deque[tuple[Message, int]]] = defaultdict(deque)
        self._departed: dict[Address, str] = {}
        self._failure: HybridEPError | None = None
        self._wakers: set[Callable[[], None]] = set()
        self._watchers: dict[str, Callable[[], None]] = {}

    def deliver(self, message: Message, message_id: int = 0) -> None:
        """Append a message to its queue. Any thread."""
        with self._changed:
            self._queues[message.source, message.channel].append((message, message_id))
            self._notify()
            watcher = self._watchers.get(message.channel)
        if watcher is not None:
            watcher()

    def watch(self, channel: str, notify: Callable[[], None]) -> None:
        """See `WanPort.watch`. A later watcher of a channel takes the place of an earlier one."""
        with self._changed:
            self._watchers[channel] = notify

    def take(self, source: Address, channel: str, position: Position) -> Message | None:
        """See `WanPort.take`."""
        with self._changed:
            queue = self._queues[source, channel]
            if not queue:
                return None
            message, message_id = queue.popleft()
            self._taken(message_id)
        self._check_position(message, position)
        return message

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

    def longest_wait(self) -> Wait | None:
        """What a program has waited for longest, if one waits."""
        with self._changed:
            return min(self._waits, key=lambda wait: wait.started, default=None)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    def receive(self, source: Address, channel: str, position: Position, timeout_s: float | None = None) -> Message:
        """The next message of the queue, which has to carry `position`; see `WanPort.receive`."""
        wait = self._wait(source, channel, position, timeout_s)
        with self._changed:
            self._waits.append(wait)
            try:
                while (message := self._take(wait)) is None:
                    self._changed.wait(wait.deadline - time.monotonic())
            finally:
                self._waits.remove(wait)
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

        with self._changed:
            self._waits.append(wait)
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
                self._waits.remove(wait)

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

    def _wait(self, source: Address, channel: str, position: Position, timeout_s: float | None) -> Wait:
        now, patience_s = time.monotonic(), self._operation_s if timeout_s is None else timeout_s
        return Wait(source, channel, position, now, now + patience_s, timeout_s is not None)

    def _take(self, wait: Wait) -> Message | None:
        """The next message, or None while one can still come; raises what ends the wait. Holds the lock."""
        queue = self._queues[wait.source, wait.channel]
        if queue:
            message, message_id = queue.popleft()
            self._taken(message_id)
            return message
        self.check()
        if wait.source in self._departed:
            raise self._left(wait.source, wait.channel, wait.position)
        now = time.monotonic()
        if now < wait.deadline:
            return None
        if self._ran_out is not None and not wait.is_told and not wait.bounded_by_user:
            wait.is_told = True
            wait.deadline = now + VERDICT_S
            self._ran_out(wait)
            return None
        raise DeadlineExceeded(
            peer=wait.source.describe(self._dc_names),
            operation=wait.operation,
            layer=wait.layer,
            waited_s=now - wait.started,
        )

    def _accept(self, wait: Wait, message: Message) -> Message:
        waited_s = time.monotonic() - wait.started
        self._metrics.waited(wait.position.layer, wait.source.dc, wait.channel, waited_s)
        self._check_position(message, wait.position)
        return message

    def _check_position(self, message: Message, position: Position) -> None:
        if message.position != position:
            raise PositionMismatch(
                mine=position.describe(),
                peer=message.source.describe(self._dc_names),
                theirs=message.position.describe(),
            )

    def _left(self, source: Address, channel: str, position: Position) -> HybridEPError:
        peer, where = source.describe(self._dc_names), self._departed[source]
        if position.phase is Phase.MAILBOX:
            return PeerLost(peer, f"ended (after {where}) while {channel} waits for its next message")
        return PositionMismatch(mine=position.describe(), peer=peer, theirs=f"its end (after {where})")
