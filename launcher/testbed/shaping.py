"""What a WAN does to packets: rate, queue, delay, jitter, loss, cuts and stalls. A machine without I/O.

    host -> uplink of its DC -> line of the directed pair -> delay, jitter -> downlink of the other DC -> host

Uplink, line and downlink each pass bytes at their rate, first come first served: pairs that share an uplink or a
downlink get shares of it in the proportion of what they offer. Rates count IP bytes (headers included). The three
work on a packet at the same time (cut-through): alone on its way, a packet takes its size over the slowest rate, plus
the delay. Packets of one pair never overtake each other. A packet that the queue's limit has no room for is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from launcher.testbed.packets import parse, without

Pair = tuple[int, int]
QUEUE_BYTES_MIN = 64 << 10
# A shorter queue can't hold two of TCP's super-packets, or the bursts of one turn of the relay: TCP couldn't fill a
# short link.
QUEUE_S_MIN = 0.010


@dataclass(frozen=True, slots=True)
class Shape:
    """One directed link. `delay_s` is one way; jitter adds 0 to `jitter_s` to it, uniformly; `loss` is a share of 1.

    `queue_bytes` None: one bandwidth-delay product, at least 64 KiB and at least 10 ms of the rate.
    """

    rate_bytes_per_s: float = inf
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int | None = None

    @property
    def queue_limit_bytes(self) -> float:
        """The queue's limit, set or derived."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(QUEUE_BYTES_MIN, self.rate_bytes_per_s * max(2 * self.delay_s, QUEUE_S_MIN))


class Server:
    """A first-come-first-served line of some rate, as the time at which it will have worked off all it took."""

    __slots__ = ("free_s", "held_until_s", "queue_bytes", "rate")

    def __init__(self, rate_bytes_per_s: float, queue_bytes: float) -> None:
        self.rate = rate_bytes_per_s
        self.queue_bytes = queue_bytes
        self.free_s = 0.0
        self.held_until_s = 0.0

    def backlog_bytes(self, at_s: float) -> float:
        """Bytes still to be worked off at a time."""
        waiting_s = self.free_s - max(at_s, self.held_until_s)
        return waiting_s * self.rate if waiting_s > 0 else 0.0

    def take(self, first_s: float, size_bytes: int) -> bool:
        """Queue a packet whose first bit arrives at `first_s`; False if the queue is full."""
        backlog = self.backlog_bytes(first_s)
        if backlog and backlog + size_bytes > self.queue_bytes:
            return False
        self.free_s = max(first_s, self.free_s) + size_bytes / self.rate
        return True

    def change(self, now: float, rate_bytes_per_s: float, queue_bytes: float) -> None:
        """Change rate and limit; what waits takes its time at the new rate."""
        backlog = self.backlog_bytes(now)
        self.rate, self.queue_bytes = rate_bytes_per_s, queue_bytes
        self.free_s = max(now, self.held_until_s) + backlog / rate_bytes_per_s

    def hold(self, now: float, seconds: float) -> None:
        """Work on nothing for so long."""
        self.held_until_s = max(now, self.held_until_s) + seconds
        self.free_s = max(now, self.free_s) + seconds


@dataclass(slots=True)
class Dropped:
    """What one directed link dropped, and why. A super-packet counts as one, but lost are single segments."""

    lost: int = 0
    full: int = 0
    cut: int = 0


class Line:
    """The state of one directed link."""

    __slots__ = ("cut_until_s", "dropped", "last_arrival_s", "pair", "server", "shape")

    def __init__(self, pair: Pair, shape: Shape) -> None:
        self.pair = pair
        self.shape = shape
        self.server = Server(shape.rate_bytes_per_s, shape.queue_limit_bytes)
        self.dropped = Dropped()
        self.last_arrival_s = 0.0
        self.cut_until_s = 0.0


@dataclass(frozen=True, slots=True)
class Access:
    """Rates of one DC's uplink and downlink in bytes per second."""

    uplink_bytes_per_s: float = inf
    downlink_bytes_per_s: float = inf


class Network:
    """All links. Packets go in with `send`, come out of `due`; `next_due_s` says when to ask again."""

    def __init__(self, access: Sequence[Access], shapes: Mapping[Pair, Shape], seed: int = 0) -> None:
        """`access` per DC; `shapes` per ordered pair of DC numbers, for every pair that may talk."""
        self.lines = {pair: Line(pair, shape) for pair, shape in shapes.items()}
        self._up = [Server(dc.uplink_bytes_per_s, _access_queue(dc.uplink_bytes_per_s, shapes)) for dc in access]
        self._down = [Server(dc.downlink_bytes_per_s, _access_queue(dc.downlink_bytes_per_s, shapes)) for dc in access]
        self._random = random.Random(seed)
        self._order = count()
        # (when, order, time on the line or None if only delivery is left, line, size, packet)
        self._waiting: list[tuple[float, int, float | None, Line, int, bytes]] = []

    @property
    def next_due_s(self) -> float:
        """When something happens next; infinite if nothing is on its way."""
        return self._waiting[0][0] if self._waiting else inf

    def send(self, now: float, pair: Pair, size_bytes: int, packet: bytes, segments: int = 1) -> None:
        """A host of DC pair[0] sends to DC pair[1] a packet of so many IP bytes in all its segments."""
        line = self.lines[pair]
        if now < line.cut_until_s:
            line.dropped.cut += 1
            return
        uplink, server, shape = self._up[pair[0]], line.server, line.shape
        first_s = max(now, uplink.free_s)
        if not uplink.take(now, size_bytes) or not server.take(first_s, size_bytes):
            line.dropped.full += 1
            return
        left_s = max(uplink.free_s, server.free_s)
        arrival_s = left_s + shape.delay_s
        if shape.jitter_s:
            arrival_s += self._random.random() * shape.jitter_s
        line.last_arrival_s = arrival_s = max(arrival_s, line.last_arrival_s)
        on_line_s = size_bytes / min(uplink.rate, server.rate)
        pieces = self._survivors(line, size_bytes, packet, segments) if shape.loss else [(size_bytes, packet)]
        for size, piece in pieces:
            heappush(self._waiting, (arrival_s, next(self._order), on_line_s, line, size, piece))

    def _survivors(self, line: Line, size_bytes: int, packet: bytes, segments: int) -> list[tuple[int, bytes]]:
        """What the line's loss leaves of a packet, with the IP bytes of each piece. All of it has used the line."""
        lost = [number for number in range(segments) if self._random.random() < line.shape.loss]
        line.dropped.lost += len(lost)
        if not lost:
            return [(size_bytes, packet)]
        pieces = without(packet, segments, lost) if len(lost) < segments else []
        return [(parsed.size_bytes, piece) for piece in pieces if (parsed := parse(piece)) is not None]

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Everything that reaches its DC by now: (DC number, packet), in order."""
        out = []
        waiting = self._waiting
        while waiting and waiting[0][0] <= now:
            when, _, on_line_s, line, size, packet = heappop(waiting)
            if now < line.cut_until_s:
                line.dropped.cut += 1
            elif on_line_s is None or self._passes_downlink(when, on_line_s, line, size, packet):
                out.append((line.pair[1], packet))
        return out

    def _passes_downlink(self, when: float, on_line_s: float, line: Line, size: int, packet: bytes) -> bool:
        """Whether the downlink adds no wait; else the packet is queued there, or dropped."""
        downlink = self._down[line.pair[1]]
        if not downlink.take(when - on_line_s, size):
            line.dropped.full += 1
            return False
        if downlink.free_s <= when:
            return True
        heappush(self._waiting, (downlink.free_s, next(self._order), None, line, size, packet))
        return False

    def reshape(self, now: float, pair: Pair, shape: Shape) -> None:
        """Change a link. What is already on its way keeps its times."""
        line = self.lines[pair]
        line.shape = shape
        line.server.change(now, shape.rate_bytes_per_s, shape.queue_limit_bytes)

    def cut(self, now: float, pair: Pair, seconds: float) -> None:
        """Drop all that enters or would leave the link for so long; 0 ends a cut."""
        self.lines[pair].cut_until_s = now + seconds

    def stall(self, now: float, pair: Pair, seconds: float) -> None:
        """Stop the link's clock for so long: all that is on it comes that much later; the queue's limit holds."""
        line = self.lines[pair]
        line.server.hold(now, seconds)
        line.last_arrival_s += seconds
        for index, entry in enumerate(self._waiting):
            if entry[3] is line and entry[2] is not None:
                self._waiting[index] = (entry[0] + seconds, *entry[1:])
        heapify(self._waiting)


def _access_queue(rate_bytes_per_s: float, shapes: Mapping[Pair, Shape]) -> float:
    """Limit of an uplink's or downlink's queue: what a link of that rate and the longest delay would have."""
    longest_s = max((shape.delay_s for shape in shapes.values()), default=0.0)
    return Shape(rate_bytes_per_s, longest_s).queue_limit_bytes
