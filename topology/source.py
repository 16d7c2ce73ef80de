"""Where a topology comes from: a file, or a preset of the package."""

from __future__ import annotations

from pathlib import Path

from topology.document import FILE_BYTES_MAX
from topology.errors import TopologyError
from topology.model import Topology
from topology.presets import preset
from topology.read import parse

PRESET = "preset:"


def load(path: str | Path) -> Topology:
    """Read a topology file; "preset:NAME" names a preset.

    Raises TopologyError: one line with file, line, key path, what was found and what is allowed.
    """
    if isinstance(path, str) and path.startswith(PRESET):
        return preset(path.removeprefix(PRESET))
    return parse(_text(path), str(path))


def _text(path: str | Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path}: can't read the file: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > FILE_BYTES_MAX:
        raise TopologyError(f"{path}: the file is larger than {FILE_BYTES_MAX >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path}: not UTF-8 text at byte {error.start}") from None
