"""Plans as text files, to be written, read, edited by hand and read back.

    workers_per_dc: [2, 2]
    scaling: [2, 2]            # optional: SF per level, needed by domains inside a DC
    reason: two sites, small batch
    layers:
      - {plan: "domains:2", experts: 8, repeat: 3}      # three equal layers by a maker's name
      - home: [0, 1, 2, 3]                              # or by hand; holders, route and serve may be left out
        holders: [[0, 2], [1], [2], [3]]

Files are YAML (`.yaml`, `.yml`) or JSON (`.json`), of at most 1 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from hybridep_rt.errors import PlanError, TopologyError
from hybridep_rt.planner.makers import divisors, domains, plain_ep, replicate_all, subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout, Plan
from hybridep_rt.planner.plan_spec import PLAN_SUFFIXES, make_layer, parse_plan_spec
from topology.document import FILE_BYTES_MAX, Item, read

MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_TABLE = 1 << 24
"""Entries of one layer's `serve` table, experts times workers, which a short file can ask for."""

Table = tuple[tuple[int, ...], ...]


def from_file(path: str | Path, layout: Layout | None = None) -> Plan:
    """Read a plan; with `layout`, the file's DCs must be those.

    Raises PlanError naming the file, the line and key, what was found and what is allowed.
    """
    return parse_plan(_text(Path(path)), str(path), layout)


def to_file(plan: Plan, path: str | Path) -> None:
    """Write a plan in its shortest form. Raises PlanError where `from_file` couldn't read it back."""
    path = Path(path)
    _check_suffix(path)
    content = dump(plan, as_json=path.suffix == ".json").encode()
    if len(content) > FILE_BYTES_MAX:
        raise PlanError(f"{path}: this plan takes {len(content)} bytes; allowed: {FILE_BYTES_MAX}")
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PlanError(f"{path}: can't be written: {error.strerror}") from None


def dump(plan: Plan, *, as_json: bool = False) -> str:
    """The file's text: equal layers together, makers by name, tables only where they can't be derived."""
    layers = []
    for layer, equal in groupby(plan.layers):
        entry = _describe(layer, plan.layout)
        repeat = sum(1 for _ in equal)
        layers.append(entry | {"repeat": repeat} if repeat > 1 else entry)
    content: dict[str, Any] = {"epoch": plan.epoch, "workers_per_dc": list(plan.layout.workers_per_dc)}
    content |= {"reason": plan.reason} if plan.reason else {}
    content["layers"] = layers
    if as_json:
        return json.dumps(content, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))


def parse_plan(text: str, source: str, layout: Layout | None = None) -> Plan:
    """The plan in a file's text; `source` names the file in errors. Raises PlanError."""
    try:
        return _plan(read(text, source), layout)
    except TopologyError as error:
        raise PlanError(str(error)) from None


def _plan(root: Item, layout: Layout | None) -> Plan:
    known = ("epoch", "workers_per_dc", "scaling", "reason", "layers")
    fields = root.fields(known, required=("workers_per_dc", "layers"))
    found = Layout(_integers(fields["workers_per_dc"], 1, MAX_EXPERTS))
    if layout is not None and found != layout:
        raise fields["workers_per_dc"].error(
            f"found {found.workers_per_dc}, allowed: the topology's {layout.workers_per_dc}"
        )
    scaling = _integers(fields["scaling"], 1, MAX_EXPERTS) if "scaling" in fields else None
    return Plan(
        epoch=fields["epoch"].whole(0, 10**14) if "epoch" in fields else 0,
        layout=found,
        layers=_layers(fields["layers"], found, scaling),
        reason=fields["reason"].text("text") if "reason" in fields else "",
    )


def _layers(item: Item, layout: Layout, scaling: tuple[int, ...] | None) -> tuple[LayerPlan, ...]:
    layers: list[LayerPlan] = []
    for entry in item.items("a list of layers"):
        fields = entry.fields(("plan", "experts", "home", "holders", "route", "serve", "repeat"))
        repeat = fields.pop("repeat").whole(1, MAX_LAYERS) if "repeat" in fields else 1
        try:
            layer = _made(entry, layout, scaling) if "plan" in fields else _explicit(entry, layout)
        except PlanError as error:
            raise entry.error(error.reason) from None
        layers += [layer] * repeat
        if len(layers) > MAX_LAYERS:
            raise entry.error(f"found {len(layers)} layers up to here, allowed: {MAX_LAYERS}")
    return tuple(layers)


def _made(entry: Item, layout: Layout, scaling: tuple[int, ...] | None) -> LayerPlan:
    fields = entry.fields(("plan", "experts", "repeat"), required=("plan", "experts"))
    most = max(1, min(MAX_EXPERTS, MAX_TABLE // layout.workers))
    spec = parse_plan_spec(fields["plan"].text("a plan's name"))
    return make_layer(spec, layout, fields["experts"].whole(1, most), scaling)


def _explicit(entry: Item, layout: Layout) -> LayerPlan:
    fields = entry.fields(("home", "holders", "route", "serve", "repeat"), required=("home",))
    home = _integers(fields["home"], 0, layout.workers - 1)
    if len(home) * layout.workers > MAX_TABLE:
        raise fields["home"].error(f"found {len(home)} experts, allowed: {MAX_TABLE} entries of experts times workers")
    holders: Table = tuple((owner,) for owner in home)
    if "holders" in fields:
        holders = _table(fields["holders"], len(home), None, layout.workers)
    layer = subscribe(layout, home, holders)
    if "route" in fields:
        layer = replace(layer, route=_table(fields["route"], layout.dcs, len(home), layout.dcs))
    if "serve" in fields:
        layer = replace(layer, serve=_table(fields["serve"], layout.workers, len(home), layout.workers))
    layer.check(layout)
    return layer


def _table(item: Item, rows: int, width: int | None, bound: int) -> Table:
    """A list of `rows` lists of whole numbers below `bound`, or -1; `width` None lets their lengths differ."""
    found = item.items(f"a list of {rows} lists")
    if len(found) != rows:
        raise item.error(f"found {len(found)} lists, allowed: {rows}")
    table = tuple(_integers(row, -1, bound - 1) for row in found)
    for row, values in zip(found, table, strict=True):
        if width is not None and len(values) != width:
            raise row.error(f"found {len(values)} numbers, allowed: {width}")
    return table


def _integers(item: Item, least: int, most: int) -> tuple[int, ...]:
    allowed = f"a list of whole numbers from {least} to {most}"
    return tuple(
        -1 if least < 0 and entry.text(allowed) == "-1" else entry.whole(max(least, 0), most)
        for entry in item.items(allowed)
    )


def _describe(layer: LayerPlan, layout: Layout) -> dict[str, Any]:
    """The shortest entry that reads back as this layer."""
    experts = layer.num_experts
    names = {"ep": plain_ep(layout, experts), "replicate": replicate_all(layout, experts)}
    names |= {f"domains:{size}": domains(layout, experts, (size,)) for size in divisors(layout.dcs)[1:]}
    for name, made in names.items():
        if layer == made:
            return {"plan": name, "experts": experts}
    derived = subscribe(layout, layer.home, layer.holders)
    entry: dict[str, Any] = {"home": list(layer.home), "holders": _lists(layer.holders)}
    if layer.route != derived.route:
        entry["route"] = _lists(layer.route)
    if layer.serve != derived.serve:
        entry["serve"] = _lists(layer.serve)
    return entry


def _lists(table: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in table]


def _text(path: Path) -> str:
    _check_suffix(path)
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode()
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is not UTF-8 text") from None
    if not text.strip():
        raise PlanError(f"{path}: the file is empty, allowed: a mapping with workers_per_dc and layers")
    return text


def _check_suffix(path: Path) -> None:
    if path.suffix not in PLAN_SUFFIXES:
        raise PlanError(f"{path}: found suffix {path.suffix!r}, allowed: {', '.join(PLAN_SUFFIXES)}")
