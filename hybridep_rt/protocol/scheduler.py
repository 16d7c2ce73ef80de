"""What goes next on a link: one priority queue of messages, cut into chunks. Sans-I/O.

Order: control frames; then by class of traffic; within a class by urgency, then first come, first served. Messages of
one flow (source, destination, channel) never overtake each other: only a flow's oldest message competes. Between two
chunks of a message a more urgent one may pass.

No class starves: a waiting class gets a chunk after `GUARANTEE` chunks' worth of bytes of more urgent classes, so each
has at least about 1/(GUARANTEE + 1) of the link.

A message that may not begin yet, because too much waits at the receiver, steps aside until a receipt comes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.credits import Credits, Flow
from hybridep_rt.protocol.frames import FIRST, HEADER_BYTES, LAST, Frame, Kind, control_frame
from hybridep_rt.protocol.messages import Traffic

GUARANTEE = 32


@dataclass(slots=True)
class Outgoing:
    """A message to be sent: its envelope's bytes and the buffers of its payload (bytes, contiguous).

    `origin`: where a message that is passed on came from, and its number there; that side waits for a receipt.
    """

    flow: Flow
    traffic: Traffic
    urgency: int
    metadata: bytes
    payload: tuple[memoryview, ...]
    origin: tuple[Address, int] | None = None

    @property
    def payload_bytes(self) -> int:
        """Size of the payload."""
        return sum(len(buffer) for buffer in self.payload)


class _Queued:
    """An outgoing message and how much of it is sent."""

    __slots__ = ("arrival", "buffers", "key", "outgoing", "remaining", "started", "total")

    def __init__(self, outgoing: Outgoing, arrival: int) -> None:
        self.outgoing = outgoing
        self.arrival = arrival
        self.key = (outgoing.traffic, outgoing.urgency, arrival)
        self.buffers = deque(buffer for buffer in outgoing.payload if len(buffer))
        self.total = self.remaining = outgoing.payload_bytes
        self.started = False

    def take(self, nbytes: int) -> tuple[memoryview, ...]:
        """The next `nbytes` of the payload, without a copy."""
        self.remaining -= nbytes
        pieces = []
        while nbytes:
            buffer = self.buffers.popleft()
            pieces.append(buffer[:nbytes])
            if len(buffer) > nbytes:
                self.buffers.appendleft(buffer[nbytes:])
            nbytes -= len(pieces[-1])
        return tuple(pieces)


class SendScheduler:
    """The send queue of one link. `chunk_bytes`: payload of one frame at most. `credits`: what waits at the receiver.

    `queued_bytes`: payload of each class that waits here. `stalls`: how often a message had to step aside.
    """

    def __init__(self, chunk_bytes: int, open_messages: int, credits: Credits) -> None:
        self.chunk_bytes = chunk_bytes
        self.credits = credits
        self.stalls = 0
        self._open_messages = open_messages
        self._control: deque[Frame] = deque()
        self._last: deque[Frame] = deque()
        self._flows: dict[Flow, deque[_Queued]] = {}
        self._heads: dict[Traffic, list[tuple[int, int, _Queued]]] = {traffic: [] for traffic in Traffic}
        self._passed_bytes: Counter[Traffic] = Counter()
        self._open: dict[int, _Queued] = {}
        self._ends: defaultdict[Address, list[Frame]] = defaultdict(list)
        self._waiting: Counter[Address] = Counter()
        self._aside: list[_Queued] = []
        self._arrivals = 0
        self.queued_bytes = dict.fromkeys(Traffic, 0)

    def push(self, outgoing: Outgoing) -> None:
        """Queue a message."""
        queued = _Queued(outgoing, self._arrivals)
        self._arrivals += 1
        self.queued_bytes[outgoing.traffic] += queued.total
        self._waiting[outgoing.flow[0]] += 1
        flow = self._flows.setdefault(outgoing.flow, deque())
        flow.append(queued)
        if len(flow) == 1:
            self._enter(queued)

    def push_control(self, kind: Kind, metadata: bytes) -> None:
        """Queue a frame without payload, before all messages."""
        self._control.append(control_frame(kind, metadata))

    def push_after(self, source: Address, kind: Kind, metadata: bytes) -> None:
        """Queue a frame without payload that goes once the messages queued here from `source` are sent."""
        if self._waiting[source]:
            self._ends[source].append(control_frame(kind, metadata))
        else:
            self.push_control(kind, metadata)

    def push_last(self, kind: Kind, metadata: bytes) -> None:
        """Queue a frame without payload that goes once nothing else is left."""
        self._last.append(control_frame(kind, metadata))

    def drop_messages(self) -> list[Outgoing]:
        """Forget all messages and return them; frames without payload stay."""
        dropped = [queued.outgoing for flow in self._flows.values() for queued in flow]
        self._flows.clear()
        self._open.clear()
        self._aside.clear()
        self._waiting.clear()
        for heads in self._heads.values():
            heads.clear()
        for frames in self._ends.values():
            self._control.extend(frames)
        self._ends.clear()
        self.queued_bytes = dict.fromkeys(Traffic, 0)
        return dropped

    def done(self, message_ids: Iterable[int]) -> None:
        """The receiver has dealt with these messages. Raises RemoteProtocolError where one was not sent."""
        for message_id in message_ids:
            self.credits.done(message_id)
        aside, self._aside = self._aside, []
        for queued in aside:
            self._enter(queued)

    def __bool__(self) -> bool:
        return bool(self._control or self._flows or self._last)

    @property
    def has_control(self) -> bool:
        """Does a frame without payload go next?"""
        return bool(self._control)

    def ready(self) -> bool:
        """Is there a frame that may be sent now?"""
        if self._control:
            return True
        for heads in self._heads.values():
            while heads and not self._may_go(heads[0][2]):
                self._aside.append(heapq.heappop(heads)[2])
                self.stalls += 1
        return any(self._heads.values()) or bool(self._last and not self._flows)

    def next_frame(self) -> tuple[Frame, Outgoing | None] | None:
        """The frame to send now, and the message that is complete with it; None if nothing waits, or may go."""
        if not self.ready():
            return None
        if self._control:
            return self._control.popleft(), None
        if self._flows:
            return self._next_chunk(self._select())
        return self._last.popleft(), None

    def _may_go(self, queued: _Queued) -> bool:
        return queued.started or self.credits.may_begin(queued.outgoing.flow, queued.total)

    def _enter(self, queued: _Queued) -> None:
        outgoing = queued.outgoing
        heapq.heappush(self._heads[outgoing.traffic], (outgoing.urgency, queued.arrival, queued))

    def _select(self) -> _Queued:
        waiting = [traffic for traffic, heads in self._heads.items() if heads]
        share_bytes = GUARANTEE * self.chunk_bytes
        due = [traffic for traffic in waiting if self._passed_bytes[traffic] >= share_bytes]
        queued = self._heads[(due or waiting)[0]][0][2]
        starts_open = queued.arrival not in self._open and queued.remaining > self.chunk_bytes
        if starts_open and len(self._open) >= self._open_messages:
            return min(self._open.values(), key=lambda candidate: candidate.key)
        return queued

    def _next_chunk(self, queued: _Queued) -> tuple[Frame, Outgoing | None]:
        first, queued.started = not queued.started, True
        nbytes = min(queued.remaining, self.chunk_bytes)
        pieces = queued.take(nbytes)
        outgoing = queued.outgoing
        self.queued_bytes[outgoing.traffic] -= nbytes
        if first:
            self.credits.begin(queued.arrival, outgoing.flow, queued.total)
        metadata = outgoing.metadata if first else b""
        self._account(outgoing.traffic, HEADER_BYTES + len(metadata) + nbytes)
        flags = (FIRST if first else 0) | (LAST if queued.remaining == 0 else 0)
        frame = Frame(Kind.MESSAGE, outgoing.traffic, flags, queued.arrival, metadata, pieces, nbytes, queued.total)
        if queued.remaining:
            self._open[queued.arrival] = queued
            return frame, None
        self._complete(queued)
        return frame, outgoing

    def _account(self, served: Traffic, nbytes: int) -> None:
        self._passed_bytes[served] = 0
        for traffic, heads in self._heads.items():
            if heads and traffic > served:
                self._passed_bytes[traffic] += nbytes

    def _complete(self, queued: _Queued) -> None:
        outgoing = queued.outgoing
        self._open.pop(queued.arrival, None)
        self._leave(queued)
        flow = self._flows[outgoing.flow]
        flow.popleft()
        if flow:
            self._enter(flow[0])
        else:
            del self._flows[outgoing.flow]
        source = outgoing.flow[0]
        self._waiting[source] -= 1
        if not self._waiting[source]:
            del self._waiting[source]
            self._control.extend(self._ends.pop(source, ()))

    def _leave(self, queued: _Queued) -> None:
        heads = self._heads[queued.outgoing.traffic]
        if heads[0][2] is queued:
            heapq.heappop(heads)
        else:
            heads.remove((queued.outgoing.urgency, queued.arrival, queued))
            heapq.heapify(heads)
