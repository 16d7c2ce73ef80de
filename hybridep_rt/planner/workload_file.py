"""Models as YAML: one model, or several by name, of which `FILE:NAME` picks one.

title: OLMoE-7B
hidden: 2048
ffn: 1024
experts: 64
top_k: 8
layers: 16            # MoE layers
matrices: 3           # of an expert; 3 is SwiGLU
tokens: 65536         # optional from here on: per worker and optimizer step, all micro-batches
micro_batches: 4
token_chunks: 4
token_bytes: 2        # per element of a token on the wire
weight_bytes: 0.5     # per expert parameter on the wire; gradient_bytes likewise
copy_bytes: 8         # memory per parameter of a copy
home_bytes: 4         # memory per parameter at the home of a copied expert; subscriber_bytes for each DC with copies
routing: zipf:1       # uniform, zipf:EXPONENT, or a file of samples
flops_per_s: 100 TFLOP/s          # of a worker
pre_expert_flops_per_token: 3.4e7
dense_parameters: 2.7e8           # of the whole model; dense_bytes each
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridep_rt.errors import PlanError, TopologyError
from hybridep_rt.planner.economics import LayerShape
from topology.document import FILE_BYTES_MAX, Item, read
from topology.units import FLOPS

_SIZES = {"hidden": 1 << 24, "ffn": 1 << 24, "experts": 1 << 16, "top_k": 1 << 16, "layers": 4096}
_COUNTS = {"tokens": 1 << 40, "micro_batches": 1 << 20, "token_chunks": 1 << 10}
_NUMBERS = (
    "token_bytes",
    "weight_bytes",
    "gradient_bytes",
    "copy_bytes",
    "home_bytes",
    "subscriber_bytes",
    "pre_expert_flops_per_token",
    "dense_parameters",
    "dense_bytes",
)
_KNOWN = ("title", "source", *_SIZES, "matrices", *_COUNTS, *_NUMBERS, "routing", "flops_per_s")
_NUMBER_MOST = 1e18


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model. `settings`: what the file says of `Workload`, by name there, and of `Compute` likewise."""

    title: str
    shape: LayerShape
    layers: int
    tokens: int | None
    workload: dict[str, float]
    compute: dict[str, float]
    routing: str


def load_model(text: str) -> ModelFile:
    """Read `FILE` or `FILE:NAME`. Raises PlanError: one line with file, line, key, and what is allowed."""
    path, name = (text, "") if Path(text).exists() else _split(text)
    try:
        root = read(_text(Path(path)), path)
        return _model(_chosen(root, name, path))
    except TopologyError as error:
        raise PlanError(str(error)) from None


def _split(text: str) -> tuple[str, str]:
    path, _, name = text.rpartition(":")
    return (path, name) if path else (text, "")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1).decode()
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text at byte {error.start}") from None


def _chosen(root: Item, name: str, path: str) -> Item:
    entries = root.entries("a model, or models by name")
    if not all(value.is_mapping for _, value in entries):
        if name:
            raise PlanError(f"{path}: this file has one model, leave out ':{name}'")
        return root
    models = {str(key.node.value): value for key, value in entries}
    if name in models:
        return models[name]
    if not name and len(models) == 1:
        return next(iter(models.values()))
    raise PlanError(f"{path}: which model? allowed: {', '.join(f'{path}:{each}' for each in models)}")


def _model(item: Item) -> ModelFile:
    fields = item.fields(_KNOWN, required=tuple(_SIZES))
    sizes = {key: fields[key].whole(1, most) for key, most in _SIZES.items()}
    matrices = fields["matrices"].whole(2, 3) if "matrices" in fields else 3
    counts = {key: fields[key].whole(1, most) for key, most in _COUNTS.items() if key in fields}
    numbers = {key: _number(fields[key]) for key in _NUMBERS if key in fields}
    hidden, ffn = sizes["hidden"], sizes["ffn"]
    workload = {key: value for key, value in numbers.items() if key.endswith("_bytes") and key != "dense_bytes"}
    compute = {key: value for key, value in numbers.items() if key not in workload}
    if "flops_per_s" in fields:
        compute["flops_per_s"] = fields["flops_per_s"].quantity(FLOPS, 1.0, 1e21)
    return ModelFile(
        title=fields["title"].text("a title") if "title" in fields else "the model",
        shape=LayerShape(hidden, ffn, sizes["experts"], sizes["top_k"], matrices * hidden * ffn),
        layers=sizes["layers"],
        tokens=counts.pop("tokens", None),
        workload=workload | counts,
        compute=compute,
        routing=fields["routing"].text("uniform, zipf:EXPONENT or a file") if "routing" in fields else "uniform",
    )


def _number(item: Item) -> float:
    allowed = "a number from 0"
    try:
        value = float(item.text(allowed))
    except ValueError:
        raise item.wrong(allowed) from None
    if not 0 <= value <= _NUMBER_MOST:
        raise item.wrong(allowed)
    return value
