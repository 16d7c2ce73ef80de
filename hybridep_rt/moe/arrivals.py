"""Weights that enter a DC through this worker: taken in the background as they come, waited for by who needs them.

Nothing is taken of a version before the training thread has opened it, by ending the step that used the one before.
So a forward pass never meets half a copy, and copies need no second buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.background import Background
from hybridep_rt.transport.ports import WanPort


class Arrivals:
    """The stream of versions of one layer's experts. `take_in(version, expert, payload)` is called once for each.

    It is called by the background thread or by the training thread, by one of them at a time, and for each expert in
    the order of the versions.
    """

    def __init__(
        self,
        layer: int,
        wan: WanPort,
        background: Background,
        take_in: Callable[[int, int, memoryview], None],
    ) -> None:
        self._layer = layer
        self._homes: Mapping[int, Address] = {}
        self._wan = wan
        self._background = background
        self._take_in = take_in
        self._channel = f"experts/{layer}"
        self._lock = threading.Lock()
        self._expected: dict[Address, deque[tuple[int, int]]] = {}
        self._opened = 0
        self._error: BaseException | None = None
        wan.watch(self._channel, self._wake)

    def rebind(self, homes: Mapping[int, Address]) -> None:
        """From the next version on, these experts come from these homes. All that was opened has been finished."""
        with self._lock:
            self._homes = homes
            self._expected = {home: deque() for home in homes.values()}

    def open(self, version: int) -> None:
        """This version, and those before it, may be taken from now on. Does not wait."""
        with self._lock:
            for number in range(self._opened + 1, version + 1):
                for expert, home in self._homes.items():
                    self._expected[home].append((number, expert))
            self._opened = max(self._opened, version)
        if self._homes:
            self._wake()

    def finish(self, version: int) -> None:
        """Wait until all of this version, and of those before it, has been taken. For the training thread.

        Raises what the background met, and as `WanPort.receive`.
        """
        self.open(version)
        with self._lock:
            if self._error is not None:
                raise self._error
            for home, expected in self._expected.items():
                while expected and expected[0][0] <= version:
                    self._accept(home, self._wan.receive(home, self._channel, self._at(*expected[0])))
            is_more = any(self._expected.values())
        if is_more:
            self._wake()

    def _wake(self) -> None:
        self._background.soon(self._take_what_is_here)

    def _take_what_is_here(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the training thread takes all it needs itself
        try:
            for home, expected in self._expected.items():
                while self._error is None and expected:
                    message = self._wan.take(home, self._channel, self._at(*expected[0]))
                    if message is None:
                        break
                    self._accept(home, message)
        except BaseException as error:
            self._error = error
        finally:
            self._lock.release()

    def _accept(self, home: Address, message: Message) -> None:
        version, expert = self._expected[home].popleft()
        self._take_in(version, expert, message.payload)

    def _at(self, version: int, expert: int) -> Position:
        return Position(version, 0, self._layer, Phase.EXPERTS, expert)
