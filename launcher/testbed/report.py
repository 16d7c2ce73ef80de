"""Verdicts on the screen, and as JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from launcher.testbed.verdict import TOLERANCE, TOLERANCE_S, Verdict
from topology.units import format_bit_rate, format_share, format_time

_COLUMNS = ("link", "rate", "measured", "off", "goodput", "RTT", "measured", "added", "relay CPU", "")


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """One row per directed pair."""
    table = Table(
        *_COLUMNS,
        caption=(
            "Rates count IP bytes, headers included; goodput is what one TCP connection delivers of them. "
            f"Passes within {format_share(TOLERANCE)} (RTT: or {format_time(TOLERANCE_S)}). CPU: share of one core."
        ),
    )
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
    expected, measured = verdict.expected, verdict.measured
    off = verdict.rate_bytes_per_s / expected.rate_bytes_per_s - 1
    added_s = verdict.added_rtt_s
    return (
        f"{expected.source} -> {expected.target}",
        format_bit_rate(expected.rate_bytes_per_s),
        _judged(format_bit_rate(verdict.rate_bytes_per_s), verdict.rate_ok),
        f"{off * 100:+.1f} %",
        format_bit_rate(measured.goodput_bytes_per_s),
        format_time(expected.rtt_s),
        _judged(format_time(measured.rtt_s), verdict.rtt_ok),
        f"{'-' if added_s < 0 else '+'}{format_time(abs(added_s))}",
        format_share(measured.relay_cpu),
        "[green]pass[/]" if verdict.passed else "[red]FAIL[/]",
    )


def _judged(text: str, good: bool) -> str:
    return text if good else f"[red]{text}[/]"
