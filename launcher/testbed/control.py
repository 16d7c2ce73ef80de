"""What the relay is told, as JSON: the whole network once at its start, then changes, one a datagram. Pure functions.

Everything read is checked: sizes, keys, types and ranges; ConfigError says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from launcher.testbed.shaping import Access, Shape
from topology.errors import ConfigError

MESSAGE_BYTES_MAX = 4096
NETWORK_BYTES_MAX = 4 << 20
SECONDS_MAX = 86400.0
_BOUNDS = {
    "rate_bytes_per_s": (100.0, inf),
    "delay_s": (0.0, 60.0),
    "jitter_s": (0.0, 60.0),
    "loss": (0.0, 1.0),
    "queue_bytes": (0.0, float(1 << 40)),
    "cut_s": (0.0, SECONDS_MAX),
    "stall_s": (0.0, SECONDS_MAX),
}
_SHAPE_KEYS = tuple(Shape.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one directed link, by DC names: new values of a Shape's fields, and a cut or a stall."""

    source: str
    target: str
    shape: Mapping[str, float]
    cut_s: float | None = None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """One DC as the relay sees it: the path of its network namespace, its address there, its access rates."""

    name: str
    namespace: str
    address: str
    access: Access


@dataclass(frozen=True, slots=True)
class Wiring:
    """Everything the relay needs to start. `shapes` are the links in order of (source, target) pairs."""

    sites: Sequence[Site]
    shapes: Mapping[tuple[int, int], Shape]
    control: str
    seed: int = 0


def pack_change(change: Change) -> bytes:
    """A change as a datagram."""
    fields: dict[str, Any] = {"source": change.source, "target": change.target, **change.shape}
    fields |= {key: value for key in ("cut_s", "stall_s") if (value := getattr(change, key)) is not None}
    return json.dumps(fields).encode()


def unpack_change(data: bytes) -> Change:
    """A datagram as a change. Raises ConfigError."""
    fields = _mapping(_load(data, MESSAGE_BYTES_MAX), {"source", "target", *_BOUNDS})
    source, target = (_text(fields.pop(key, None), key) for key in ("source", "target"))
    numbers = {key: _number(key, value) for key, value in fields.items()}
    shape = {key: value for key, value in numbers.items() if key in _SHAPE_KEYS}
    return Change(source, target, shape, numbers.get("cut_s"), numbers.get("stall_s"))


def changed(shape: Shape, change: Change) -> Shape:
    """The shape after a change. A queue limit that was derived is derived anew."""
    return _shape({key: getattr(shape, key) for key in _SHAPE_KEYS} | dict(change.shape))


def pack_wiring(wiring: Wiring) -> bytes:
    """The network as one JSON text."""
    sites = [
        [site.name, site.namespace, site.address, *(_finite(rate) for rate in _rates(site.access))]
        for site in wiring.sites
    ]
    shapes = [
        [*pair, {key: _finite(value) for key in _SHAPE_KEYS if (value := getattr(shape, key)) is not None}]
        for pair, shape in wiring.shapes.items()
    ]
    return json.dumps({"sites": sites, "shapes": shapes, "control": wiring.control, "seed": wiring.seed}).encode()


def unpack_wiring(data: bytes) -> Wiring:
    """Inverse of pack_wiring. Raises ConfigError."""
    fields = _mapping(_load(data, NETWORK_BYTES_MAX), {"sites", "shapes", "control", "seed"})
    try:
        sites = [
            Site(name, namespace, address, Access(*(inf if rate is None else float(rate) for rate in (up, down))))
            for name, namespace, address, up, down in fields["sites"]
        ]
        shapes = {
            (int(source), int(target)): _shape({key: _unbounded(value) for key, value in shape.items()})
            for source, target, shape in fields["shapes"]
        }
        return Wiring(sites, shapes, _text(fields["control"], "control"), int(fields["seed"]))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the relay's network is malformed: {error}") from None


def _shape(values: Mapping[str, Any]) -> Shape:
    queue = values.get("queue_bytes")
    return Shape(**{**values, "queue_bytes": None if queue is None else int(queue)})


def _rates(access: Access) -> tuple[float, float]:
    return access.uplink_bytes_per_s, access.downlink_bytes_per_s


def _finite(value: float) -> float | None:
    return None if value == inf else value


def _unbounded(value: float | None) -> float:
    return inf if value is None else value


def _load(data: bytes, most: int) -> object:
    if len(data) > most:
        raise ConfigError(f"a message of {len(data)} bytes; at most {most} are allowed")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None


def _mapping(value: object, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"found a {type(value).__name__}, allowed: a mapping")
    unknown = value.keys() - known
    if unknown:
        raise ConfigError(f"unknown key {sorted(unknown)[0]!r:.60}, allowed: {', '.join(sorted(known))}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: a name is needed")
    return value


def _number(key: str, value: object) -> float:
    least, most = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f"{key}: found {value!r:.60}, allowed: {least:g} to {most:g}")
    return value
