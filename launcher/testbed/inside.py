"""What the sites read inside a testbed: the topology file and certificates. A thin shell."""

from __future__ import annotations

from datetime import timedelta
from importlib import resources
from pathlib import Path

from launcher.certs import write_certificates
from launcher.testbed.derive import CERTIFICATES, text_inside
from topology import Topology, parse
from topology.source import PRESET

_VALID = timedelta(days=365)


def write_topology(topology: Topology, directory: Path, *, one_mpirun: bool = False) -> Path:
    """Write it into the testbed's directory, with certificates beside it unless the topology is insecure.

    Raises TopologyError if the source has changed and is no longer one, ConfigError.
    """
    source, insecure = _source_text(topology.source), topology.insecure
    text = text_inside(source, topology.dc_names, insecure=insecure, one_mpirun=one_mpirun)
    path = directory / "topology.yaml"
    inside = parse(text, topology.source)
    path.write_text(text)
    if not insecure:
        write_certificates(directory / CERTIFICATES, inside, _VALID)
    return path


def _source_text(source: str) -> str:
    if source.startswith(PRESET):
        file = resources.files("topology") / "presets" / f"{source.removeprefix(PRESET)}.yaml"
        return file.read_text("utf-8")
    return Path(source).read_text("utf-8")
