"""Human units, for files and the screen only: text -> SI and back. Inside, everything is SI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from topology.errors import TopologyError, shown

# No exponents and few digits: every accepted number is finite and cheap to convert exactly.
_PATTERN = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-zµ%][^0-9]*)?", re.ASCII)
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Quantity:
    """One kind of quantity: its units, each with its size in SI, and an example for error messages."""

    example: str
    units: Mapping[str, Fraction]

    def parse(self, text: str) -> float:
        """Text such as "200 Mbit/s" -> SI. Raises TopologyError naming what was found and the units allowed."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise TopologyError(f"found {shown(text)}, allowed: a number with a unit ({self._allowed()})")
        number, unit = match.groups()
        if unit is None:
            raise TopologyError(f"found {shown(text)} without a unit, allowed: {self._allowed()}")
        if unit not in self.units:
            raise TopologyError(f"found {shown(text)}, whose unit {shown(unit)} is unknown, allowed: {self._allowed()}")
        return float(Fraction(number) * self.units[unit])

    def _allowed(self) -> str:
        return f"{', '.join(self.units)}; as in {self.example!r}"


RATE = Quantity(
    "200 Mbit/s",
    {f"{prefix}bit/s": Fraction(size, 8) for prefix, size in _DECIMAL.items()}
    | {f"{prefix}B/s": Fraction(size) for prefix, size in (_DECIMAL | _BINARY).items()},
)
TIME = Quantity(
    "40 ms",
    {
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
    },
)
SIZE = Quantity("64 KiB", {f"{prefix}B": Fraction(size) for prefix, size in (_DECIMAL | _BINARY).items()})
FLOPS = Quantity("50 TFLOP/s", {f"{prefix}FLOP/s": Fraction(size) for prefix, size in _DECIMAL.items()})
SHARE = Quantity("0.1 %", {"%": Fraction(1, 100)})


def format_bit_rate(bytes_per_s: float) -> str:
    """Bytes per second -> text in bits per second, as WAN links are sold."""
    return f"{_scaled(bytes_per_s * 8)}bit/s"


def format_byte_rate(bytes_per_s: float) -> str:
    """Bytes per second -> text in bytes per second, as links inside a datacenter are sold."""
    return f"{_scaled(bytes_per_s)}B/s"


def format_flops(flops_per_s: float) -> str:
    """Floating-point operations per second -> text."""
    return f"{_scaled(flops_per_s)}FLOP/s"


def format_size(size_bytes: float) -> str:
    """Bytes -> text, with a binary prefix where that is a whole number."""
    for prefix, size in reversed(_BINARY.items()):
        if size_bytes and size_bytes % size == 0:
            return f"{size_bytes / size:.10g} {prefix}B"
    return f"{_scaled(size_bytes)}B"


def format_time(seconds: float) -> str:
    """Seconds -> text in s, ms, us or ns."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if seconds else "0 ms"


def format_share(share: float) -> str:
    """A share of 1 -> text in percent."""
    return f"{share * 100:.4g} %"


def _scaled(value: float) -> str:
    prefix = max((p for p in _DECIMAL if value >= _DECIMAL[p]), key=_DECIMAL.__getitem__, default="")
    return f"{value / _DECIMAL[prefix]:.4g} {prefix}"
