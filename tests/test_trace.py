"""Traces: spans that nest, one clock, a file that parses."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridep_rt
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.planner.makers import replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.runtime import tracing
from hybridep_rt.trace import LANES, Recorder, Span, chrome, read_spans, rows, shifted
from tests.fleet import run_fleet


def nest(spans: list[tuple[float, float]]) -> bool:
    """Whether any two, in order of their starts, are apart or one in the other."""
    ends: list[float] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            return False
        ends.append(end)
    return True


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=40))
def test_rows_nest_and_keep_all(drawn):
    spans = [Span("send", str(n), start, start + length) for n, (start, length) in enumerate(drawn)]
    found = rows(spans)
    assert sorted(each for row in found for each in row) == sorted(spans)
    for row in found:
        assert nest([(each.start_ns, each.end_ns) for each in row])


def test_only_the_latest_are_kept_and_nothing_where_it_is_off():
    recorder, off = Recorder(3), Recorder()
    for number in range(5):
        for each in (recorder, off):
            each.add("wait", str(number), number, number + 1)
    with off.span("compute", "x"):
        pass
    assert [each.name for each in recorder.spans()] == ["2", "3", "4"]
    assert off.spans() == []


def test_a_received_message_begins_when_it_was_sent():
    workers = {
        "one": [Span("send", "m", 1000, 1500, "k"), Span("compute", "c", 900, 2000)],
        "two": shifted([Span("receive", "m", 9000, 9000, "k"), Span("receive", "?", 9100, 9100, "lost")], -1000),
    }
    events = [event for event in chrome(workers)["traceEvents"] if event["ph"] == "X"]
    assert [(e["cat"], e["pid"], e["ts"], e["dur"]) for e in events] == [
        ("compute", 0, 0.0, 1.1),
        ("send", 0, 0.1, 0.5),
        ("receive", 1, 0.1, 7.0),
        ("receive", 1, 7.2, 0.0),
    ]


@pytest.mark.parametrize(
    "items", [None, {}, [1], [["compute", "x", 2, 1, ""]], [["moon", "x", 1, 2, ""]], [["wait", "x", 1.5, 2, ""]]]
)
def test_strange_spans_are_refused(items):
    with pytest.raises(ValueError, match="span"):
        read_spans(items)


def work(runtime):
    dense = nn.Linear(8, 12)
    model = nn.Sequential(dense, *(MoELayer(12, 20, 4, 2, runtime=runtime) for _ in range(2)))
    optimizer = hybridep_rt.AdamW(model.parameters())
    runtime.attach(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(6, 8)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("same_machine", [True, False])
def test_a_run_writes_one_file_with_all_workers_lanes(tmp_path, monkeypatch, same_machine):
    if not same_machine:
        monkeypatch.setattr(tracing, "_BOOT", tmp_path / "none")
        boots = iter(map(str, range(1000)))
        monkeypatch.setattr(tracing, "_boot", lambda: next(boots))
    layout, path = Layout((2, 1)), tmp_path / "trace.json"
    plan = Plan(0, layout, (replicate_all(layout, 4),) * 2, "test")
    run_fleet(plan, work, trace_path=str(path))
    found = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert len(names) == 3
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            by_row.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(nest([(round(a, 3), round(b, 3)) for a, b in spans]) for spans in by_row.values())
    for pid in range(3):
        lanes = {event["cat"] for event in found if event["ph"] == "X" and event["pid"] == pid}
        assert lanes == set(LANES)
    steps = [event for event in found if event["ph"] == "X" and re.fullmatch(r"step \d", event["name"])]
    assert len(steps) == 9
    if same_machine:
        for event in found:
            assert event["ph"] != "X" or event["cat"] != "compute" or event["dur"] < 60e6
