"""Topologies that come with the package: examples for the planner, for demos and for tests."""

from __future__ import annotations

import difflib
from importlib import resources

from topology.errors import TopologyError
from topology.model import Topology
from topology.read import parse

_FOLDER = resources.files("topology") / "presets"


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    files = [file.name for file in _FOLDER.iterdir() if file.name.endswith(".yaml")]
    return tuple(sorted(name.removesuffix(".yaml") for name in files))


def preset(name: str) -> Topology:
    """The preset of that name. Raises TopologyError, which lists the names."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TopologyError(f"no preset {name!r}{hint}, allowed: {', '.join(names)}")
    return parse((_FOLDER / f"{name}.yaml").read_text("utf-8"), f"preset:{name}")
