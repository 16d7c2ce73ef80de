"""Which pairs of DCs measure their links at the same time, how much they send, and what the arrivals say. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MESSAGES = 24
_RAMP = 4
"""Messages at the start that don't count: TCP has to find its rate."""
_WINDOW = 12
"""Messages over whose arrival a rate is taken: long enough that a receiver that wakes up late changes it little."""
_LEAST_BYTES = 4096
_SEND_S = 1.2
"""So long a link would be busy at the rate that the topology gives."""

Pair = tuple[int, int]


def rounds(dcs: int) -> list[list[Pair]]:
    """Every pair once, (lower, higher); within a round each DC takes part at most once. The circle method."""
    places: list[int | None] = [*range(dcs), *([None] if dcs % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(sorted((min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in found if pairs]


def message_bytes(bandwidth_bytes_per_s: float, budget_bytes: float, dcs: int) -> int:
    """Size of each of `MESSAGES` messages on a directed link, so that all links together keep to the budget."""
    share = budget_bytes / (dcs * (dcs - 1))
    return max(_LEAST_BYTES, int(min(bandwidth_bytes_per_s * _SEND_S, share) / MESSAGES))


def goodputs(arrived_s: Sequence[float], size: int) -> list[float]:
    """Bytes per second over every window of `_WINDOW` messages, from when each of them had arrived."""
    spans = zip(arrived_s[_RAMP:], arrived_s[_RAMP + _WINDOW :], strict=False)
    return [_WINDOW * size / max(last - first, 1e-9) for first, last in spans]
