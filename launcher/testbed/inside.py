"""The topology file that the sites read inside a testbed. A thin shell."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from launcher.testbed.derive import text_inside
from topology import Topology, parse
from topology.source import PRESET


def write_topology(topology: Topology, directory: Path, *, one_mpirun: bool = False) -> Path:
    """Write it into the testbed's directory. Raises TopologyError if the source has changed and is no longer one."""
    text = text_inside(_source_text(topology.source), topology.dc_names, one_mpirun=one_mpirun)
    path = directory / "topology.yaml"
    parse(text, topology.source)
    path.write_text(text)
    return path


def _source_text(source: str) -> str:
    if source.startswith(PRESET):
        file = resources.files("topology") / "presets" / f"{source.removeprefix(PRESET)}.yaml"
        return file.read_text("utf-8")
    return Path(source).read_text("utf-8")
