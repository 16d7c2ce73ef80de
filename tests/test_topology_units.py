"""Human units in, SI out, and back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology import TopologyError
from topology.units import (
    RATE,
    SHARE,
    SIZE,
    TIME,
    Quantity,
    format_bit_rate,
    format_byte_rate,
    format_share,
    format_size,
    format_time,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (RATE, "200 Mbit/s", 25e6),
        (RATE, "200Mbit/s", 25e6),
        (RATE, "  1.5   Gbit/s ", 187.5e6),
        (RATE, "10 GB/s", 10e9),
        (RATE, "1 KiB/s", 1024.0),
        (RATE, "8 bit/s", 1.0),
        (TIME, "40 ms", 0.04),
        (TIME, "20 us", 20e-6),
        (TIME, "20 µs", 20e-6),
        (TIME, "0 s", 0.0),
        (SIZE, "64 KiB", 65536.0),
        (SIZE, "64 kB", 64000.0),
        (SHARE, "0.1 %", 0.001),
    ],
)
def test_parse(kind: Quantity, text: str, value: float) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    "text", ["", "fast", "-1 ms", "1e3 ms", "nan s", "inf s", "1,5 s", ".5 s", "1. s", "9" * 16 + " s"]
)
def test_not_a_number(text: str) -> None:
    with pytest.raises(TopologyError, match="allowed: a number with a unit"):
        TIME.parse(text)


def test_a_bare_number_says_which_units_are_allowed() -> None:
    with pytest.raises(TopologyError, match=r"found '200' without a unit, allowed: bit/s, kbit/s, .*'200 Mbit/s'"):
        RATE.parse("200")


@pytest.mark.parametrize("text", ["200 Mb/s", "200 Mbps", "200 mbit/s", "200 Mbit", "200 ms"])
def test_unknown_units(text: str) -> None:
    with pytest.raises(TopologyError, match="is unknown, allowed: bit/s"):
        RATE.parse(text)


@given(st.text(max_size=20))
def test_any_text_is_a_finite_number_or_a_typed_error(text: str) -> None:
    with suppress(TopologyError):
        assert 0 <= RATE.parse(text) < 1e30


def test_format() -> None:
    assert format_bit_rate(12.5e6) == "100 Mbit/s"
    assert format_byte_rate(300e9) == "300 GB/s"
    assert format_byte_rate(0.5) == "0.5 B/s"
    assert format_size(65536) == "64 KiB"
    assert format_size(3 << 20) == "3 MiB"
    assert format_size(1_500_000) == "1.5 MB"
    assert format_size(0) == "0 B"
    assert format_time(0.04) == "40 ms"
    assert format_time(2.0) == "2 s"
    assert format_time(5e-9) == "5 ns"
    assert format_time(0.0) == "0 ms"
    assert format_share(0.001) == "0.1 %"


@given(st.integers(1, 999), st.sampled_from(list(RATE.units)))
def test_what_is_printed_can_be_read(number: int, unit: str) -> None:
    value = RATE.parse(f"{number} {unit}")
    assert RATE.parse(format_bit_rate(value)) == pytest.approx(value, rel=1e-3)
    assert RATE.parse(format_byte_rate(value)) == pytest.approx(value, rel=1e-3)
