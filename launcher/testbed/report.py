"""Verdicts on the screen, and as JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Column, Table

from launcher.testbed.verdict import TOLERANCE, TOLERANCE_S, Verdict
from topology.units import format_bit_rate, format_share, format_time

_COLUMNS = ("link", "rate", "measured", "off", "RTT", "added", "CPU", "")


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """One row per directed pair."""
    caption = (
        "Rates count IP bytes, headers included: TCP's goodput is 3.5 % less. "
        f"Passes within {format_share(TOLERANCE)} (RTT: or {format_time(TOLERANCE_S)}). "
        "CPU: what the relay takes of one core."
    )
    table = Table(*(Column(name, no_wrap=True) for name in _COLUMNS), box=None, padding=(0, 2, 0, 0), caption=caption)
    for verdict in verdicts:
        table.add_row(*_row(verdict))
    return table


def json_of(verdicts: Sequence[Verdict]) -> str:
    """All numbers, in SI."""
    return json.dumps(
        [asdict(verdict) | {"added_rtt_s": verdict.added_rtt_s, "passed": verdict.passed} for verdict in verdicts],
        indent=2,
    )


def _row(verdict: Verdict) -> tuple[str, ...]:
    expected = verdict.expected
    off = verdict.rate_bytes_per_s / expected.rate_bytes_per_s - 1
    added_s = verdict.added_rtt_s
    return (
        f"{expected.source} -> {expected.target}",
        format_bit_rate(expected.rate_bytes_per_s),
        format_bit_rate(verdict.rate_bytes_per_s),
        _judged(f"{off * 100:+.1f} %", verdict.rate_ok),
        format_time(expected.rtt_s),
        _judged(f"{added_s * 1e3:+.2f} ms", verdict.rtt_ok),
        f"{verdict.measured.relay_cpu * 100:.0f} %",
        "[green]pass[/]" if verdict.passed else "[red]FAIL[/]",
    )


def _judged(text: str, good: bool) -> str:
    return text if good else f"[red]{text}[/]"
