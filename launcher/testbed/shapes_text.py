"""The words of `hybridep testbed shape` -> changes of links. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from launcher.testbed.control import Change
from topology.errors import ConfigError
from topology.units import RATE, SHARE, SIZE, TIME

_PAIR = re.compile(r"\s*(\S+?)\s*(<->|->)\s*(\S+?)\s*")
# Option -> (field of a Shape, what its text means in SI). A way's delay is half the round trip.
_FIELDS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "rate": ("rate_bytes_per_s", RATE.parse),
    "rtt": ("delay_s", lambda text: TIME.parse(text) / 2),
    "jitter": ("jitter_s", TIME.parse),
    "loss": ("loss", SHARE.parse),
    "queue": ("queue_bytes", SIZE.parse),
}


def changes_of(pair: str, words: Mapping[str, str | None], cut_s: float | None, stall_s: float | None) -> list[Change]:
    """`a->b` or `a<->b` and the options given -> one change per direction. Raises ConfigError."""
    match = _PAIR.fullmatch(pair)
    if match is None:
        raise ConfigError(f"found {pair!r}, allowed: a pair of DCs such as 'a->b' or 'a<->b'")
    source, arrow, target = match.groups()
    shape = {}
    for option, text in words.items():
        if text is not None:
            field, parse = _FIELDS[option]
            shape[field] = _parsed(option, text, parse)
    if not shape and cut_s is None and stall_s is None:
        raise ConfigError("nothing to change: give --rate, --rtt, --jitter, --loss, --queue, --cut or --stall")
    ways = [(source, target), (target, source)] if arrow == "<->" else [(source, target)]
    return [Change(here, there, shape, cut_s, stall_s) for here, there in ways]


def _parsed(option: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"--{option}: {error}") from None
