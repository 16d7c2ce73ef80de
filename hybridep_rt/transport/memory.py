"""In-memory doubles of both ports: a whole run over many DCs in one process, one thread per worker.

Messages between DCs are delivered by a postman thread that picks the next mailbox at random, so that every run sees
another legal order of arrival: first in first out per (source, destination, channel), arbitrary otherwise.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hybridep_rt.errors import DeadlineExceeded, HybridEPError, LocalProtocolError, PeerLost, PositionMismatch
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message, Payload, Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.transport.mailboxes import Mailboxes, span_key, span_name

if TYPE_CHECKING:
    import torch

    from hybridep_rt.transport.ports import Parcel


class MemoryWan:
    """All workers of all DCs. `port(address)` gives one worker's WanPort."""

    def __init__(
        self,
        workers_per_dc: Sequence[int],
        *,
        dc_names: tuple[str, ...] = (),
        seed: int = 0,
        operation_s: float = 20.0,
    ) -> None:
        self._random = random.Random(seed)
        self._pending: dict[tuple[Address, Address, str], deque[Message]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.dc_names = names = dc_names or tuple(str(dc) for dc in range(len(workers_per_dc)))
        addresses = [Address(dc, worker) for dc, count in enumerate(workers_per_dc) for worker in range(count)]
        self.metrics = {address: Metrics() for address in addresses}
        self.mailboxes = {
            address: Mailboxes(address, names, operation_s, self.metrics[address]) for address in addresses
        }
        self._postman = threading.Thread(target=self._deliver, name="postman", daemon=True)
        self._postman.start()

    def port(self, address: Address) -> MemoryPort:
        """The port of one worker."""
        return MemoryPort(self, address)

    def post(self, message: Message) -> None:
        """Queue a message for delivery."""
        with self._changed:
            self._pending.setdefault((message.source, message.to, message.channel), deque()).append(message)
            self._changed.notify_all()

    def fail(self, error: HybridEPError) -> None:
        """End every wait of every worker with `error`."""
        for mailboxes in self.mailboxes.values():
            mailboxes.fail(error)

    def depart(self, address: Address, where: str) -> None:
        """Deliver what `address` sent, then tell everyone that it ended."""
        with self._changed:
            self._changed.wait_for(lambda: not any(key[0] == address for key in self._pending) or self._closed)
        for mailboxes in self.mailboxes.values():
            mailboxes.depart(address, where)

    def close(self) -> None:
        """Stop the postman."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._postman.join(5)

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                key = self._random.choice(sorted(self._pending))
                message = self._pending[key].popleft()
                if not self._pending[key]:
                    del self._pending[key]
                self._changed.notify_all()
            name, now_ns = span_name(message.to, message.channel, message.position), time.monotonic_ns()
            self.metrics[message.to].trace.add("receive", name, now_ns, now_ns, span_key(message.source, name))
            self.mailboxes[message.to].deliver(message)


class MemoryPort:
    """One worker's end of a `MemoryWan`."""

    def __init__(self, wan: MemoryWan, address: Address) -> None:
        self._wan = wan
        self.mailboxes = wan.mailboxes[address]
        self.address = address
        self._last = "its start"
        self._is_closed = False

    def send(
        self,
        to: Address,
        channel: str,
        position: Position,
        payload: Payload,
        *,
        traffic: Traffic,
        counts: Sequence[int] = (),
        urgency: int = 0,
    ) -> None:
        """See `WanPort.send`. The urgency has no meaning here: any order that the port allows may happen."""
        del urgency
        self.check()
        if self._is_closed:
            raise LocalProtocolError("send after close")
        buffer = bytearray().join(memoryview(part).cast("B") for part in payload)
        if to.dc != self.address.dc:
            self._wan.metrics[self.address].sent(to.dc, traffic, len(buffer))
        self._last = position.describe()
        name, now_ns = span_name(to, channel, position), time.monotonic_ns()
        self._wan.metrics[self.address].trace.add("send", name, now_ns, now_ns, span_key(self.address, name))
        self._wan.post(Message(self.address, to, channel, position, memoryview(buffer), tuple(counts)))

    def receive(self, source: Address, channel: str, position: Position, *, timeout_s: float | None = None) -> Message:
        """See `WanPort.receive`."""
        return self.mailboxes.receive(source, channel, position, timeout_s)

    def take(self, source: Address, channel: str, position: Position) -> Message | None:
        """See `WanPort.take`."""
        return self._wan.mailboxes[self.address].take(source, channel, position)

    def watch(self, channel: str, notify: Callable[[], None]) -> None:
        """See `WanPort.watch`."""
        self._wan.mailboxes[self.address].watch(channel, notify)

    def check(self) -> None:
        """Raise what ended the job, if anything did."""
        self.mailboxes.check()

    def expect(self, peers: Iterable[Address], position: Position) -> None:
        """See `WanPort.expect`."""
        self.mailboxes.expect(peers, position)

    def fail(self, reason: str) -> None:
        """End every wait of every worker."""
        self._wan.fail(PeerLost(self.address.describe(self._wan.dc_names), reason))

    def close(self) -> None:
        """Say goodbye to all."""
        if not self._is_closed:
            self._is_closed = True
            self._wan.depart(self.address, self._last)


class MemorySite:
    """The workers of one DC as threads. `member(index)` gives one worker's SiteGroup."""

    def __init__(self, size: int, *, operation_s: float = 20.0) -> None:
        self.size = size
        self.operation_s = operation_s
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, tuple[Position, Sequence[Parcel]]]] = {}
        self.failure: HybridEPError | None = None

    def member(self, index: int) -> MemorySiteMember:
        """The group as worker `index` sees it."""
        return MemorySiteMember(self, index)

    def fail(self, error: HybridEPError) -> None:
        """End every wait with `error`."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()


class MemorySiteMember:
    """One worker's end of a `MemorySite`."""

    def __init__(self, site: MemorySite, index: int) -> None:
        self._site = site
        self.index = index
        self.size = site.size
        self._round = 0

    def exchange(
        self, position: Position, parcels: Sequence[Parcel], rows_from: Sequence[Sequence[int]] | None = None
    ) -> list[list[torch.Tensor]]:
        """See `SiteGroup.exchange`."""
        site, number = self._site, self._round
        self._round += 1
        with site.changed:
            entries = site.rounds.setdefault(number, {})
            entries[self.index] = (position, parcels)
            site.changed.notify_all()
            done = site.changed.wait_for(lambda: len(entries) == self.size or site.failure, site.operation_s)
            if site.failure and len(entries) < self.size:
                raise site.failure
            site.rounds.pop(number, None)
        if not done:
            absent = [worker for worker in range(self.size) if worker not in entries]
            raise DeadlineExceeded(
                peer=f"workers {absent} of this DC",
                operation=position.describe(),
                layer=position.layer if position.layer >= 0 else None,
                waited_s=site.operation_s,
            )
        for worker in range(self.size):
            if entries[worker][0] != position:
                raise PositionMismatch(
                    mine=position.describe(),
                    peer=f"worker {worker} of this DC",
                    theirs=entries[worker][0].describe(),
                )
        sizes = [[len(t) for t in entries[worker][1][self.index]] for worker in range(self.size)]
        assert rows_from is None or sizes == [list(rows) for rows in rows_from], (position, sizes, rows_from)
        return [
            [tensor if worker == self.index else tensor.clone() for tensor in entries[worker][1][self.index]]
            for worker in range(self.size)
        ]

    def close(self) -> None:
        """Nothing to free."""
