"""Text as bytes: the documentation and sources that every Python installation carries, or a file.

Which windows a worker trains on depends on (seed, step, micro-batch, worker) alone: a run can be repeated, and the plan
changes nothing in it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from hybridep_rt.errors import ConfigError

LIBRARY_BYTES = 4 << 20
FILE_BYTES = 256 << 20
HELD_OUT_SHARE = 0.1
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings"}


@dataclass(frozen=True, slots=True)
class Text:
    """`train` and `held_out` are uint8, [bytes]; nobody trains on the second. `digest`: 16 hexadecimal digits."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str
    digest: str


def load_text(file: str | None = None) -> Text:
    """The text of `file`, or of this Python installation. Raises ConfigError where it can't be used."""
    content = _read_library() if file is None else _read_file(Path(file))
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    border = int(len(values) * (1 - HELD_OUT_SHARE))
    source = "the Python documentation and standard library" if file is None else file
    return Text(values[:border], values[border:], source, hashlib.sha256(content).hexdigest()[:16])


def training_batch(
    text: Text, batch: int, sequence: int, *, seed: int, step: int, micro_batch: int, worker: int, workers: int
) -> torch.Tensor:
    """Windows of the worker's own shard, [batch, sequence + 1] (int64): inputs and, one further, targets.

    Raises ConfigError for a text with fewer windows than workers.
    """
    mine = (_windows(text.train, sequence, workers) - worker + workers - 1) // workers
    key = f"{seed} {step} {micro_batch} {worker}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big"))
    index = torch.randint(mine, (batch,), generator=generator) * workers + worker
    return _cut(text.train, index, sequence)


def held_out_batches(
    text: Text, batch: int, sequence: int, *, count: int, worker: int, workers: int
) -> list[torch.Tensor]:
    """The worker's part of `count` * `workers` batches, spread evenly over the held-out text; shaped as in training."""
    windows, wanted = _windows(text.held_out, sequence, 1), count * workers * batch
    index = torch.arange(wanted) * windows // wanted
    mine = index.view(workers, count, batch)[worker]
    return [_cut(text.held_out, row, sequence) for row in mine]


def _windows(values: torch.Tensor, sequence: int, least: int) -> int:
    windows = (len(values) - 1) // sequence
    if windows < least:
        raise ConfigError(f"the text is too short: {len(values)} bytes make no {least} sequences of {sequence} bytes")
    return windows


def _cut(values: torch.Tensor, index: torch.Tensor, sequence: int) -> torch.Tensor:
    return values[index[:, None] * sequence + torch.arange(sequence + 1)].long()


def _read_library() -> bytes:
    """Help topics first, then modules in the order of their paths, up to LIBRARY_BYTES."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = (path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts))
    content = bytearray()
    for path in chain(root.glob("pydoc_data/topics.py"), modules):
        if len(content) >= LIBRARY_BYTES:
            break
        content += path.read_bytes()
    return bytes(content[:LIBRARY_BYTES])


def _read_file(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ConfigError(f"--text {path}: no such file")
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from None
    if len(content) > FILE_BYTES:
        raise ConfigError(f"--text {path}: larger than {FILE_BYTES >> 20} MiB")
    return content
