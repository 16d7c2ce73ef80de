"""What a process did when, as spans of time on lanes, and the file that Chrome and Perfetto draw from all of them.

Times are nanoseconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

SPANS_MAX = 100_000
LANES = ("compute", "wait", "encode", "decode", "send", "receive")
_NAME_MAX = 200


class Span(NamedTuple):
    """`key` names a message: its receiver's span begins when its sender handed it over."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    key: str = ""


class Recorder:
    """The latest spans of one process, at most `spans_max`; with 0 nothing is kept. Any thread."""

    def __init__(self, spans_max: int = 0) -> None:
        self._spans: deque[Span] = deque(maxlen=spans_max)
        self.is_on = spans_max > 0

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, key: str = "") -> None:
        """A span that is over."""
        if self.is_on:
            self._spans.append(Span(lane, name, start_ns, end_ns, key))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """The time inside the block."""
        if not self.is_on:
            yield
            return
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(lane, name, start_ns, time.monotonic_ns())

    def spans(self) -> list[Span]:
        """What is kept, oldest first."""
        return list(self._spans)


def read_spans(items: object) -> list[Span]:
    """Spans that another process sent. Raises ValueError for anything else."""
    if not isinstance(items, list) or len(items) > SPANS_MAX:
        raise ValueError("no list of spans")
    return [_read(item) for item in items]


def _read(item: object) -> Span:
    match item:
        case [str(lane), str(name), int(start_ns), int(end_ns), str(key)] if lane in LANES and start_ns <= end_ns:
            return Span(lane, name[:_NAME_MAX], start_ns, end_ns, key[:_NAME_MAX])
    raise ValueError("a span is a lane, a name, two times and a key")


def shifted(spans: Iterable[Span], offset_ns: int) -> list[Span]:
    """On a clock that shows `offset_ns` more."""
    return [each._replace(start_ns=each.start_ns + offset_ns, end_ns=each.end_ns + offset_ns) for each in spans]


def chrome(workers: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """The JSON of a trace: a process per worker, rows per lane. In a row spans nest or follow one another."""
    handed_over = {
        each.key: each.start_ns for spans in workers.values() for each in spans if each.lane == "send" and each.key
    }
    placed = {worker: [_in_flight(each, handed_over) for each in spans] for worker, spans in workers.items()}
    zero_ns = min((each.start_ns for spans in placed.values() for each in spans), default=0)
    events: list[dict[str, Any]] = []
    for pid, (worker, spans) in enumerate(placed.items()):
        events.append(_label("process_name", pid, 0, worker))
        row = 0
        for lane in LANES:
            for number, of_row in enumerate(rows([each for each in spans if each.lane == lane])):
                events.append(_label("thread_name", pid, row, lane if number == 0 else f"{lane} {number + 1}"))
                events.append(
                    {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": row, "args": {"sort_index": row}}
                )
                events += [_event(each, pid, row, zero_ns) for each in of_row]
                row += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans on as few rows as the first that is free gives, so that two of one row nest or don't touch."""
    found: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for each in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for row, ends in zip(found, open_ends, strict=True):
            while ends and ends[-1] <= each.start_ns:
                ends.pop()
            if not ends or each.end_ns <= ends[-1]:
                row.append(each)
                ends.append(each.end_ns)
                break
        else:
            found.append([each])
            open_ends.append([each.end_ns])
    return found


def _in_flight(span: Span, handed_over: Mapping[str, int]) -> Span:
    if span.lane != "receive" or span.key not in handed_over:
        return span
    return span._replace(start_ns=min(handed_over[span.key], span.end_ns))


def _label(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _event(span: Span, pid: int, tid: int, zero_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": (span.start_ns - zero_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
    }
