"""One training run of `benchmarks.quality`: a model, a way to code what crosses between DCs, and a seed."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import hybridep_rt
from benchmarks.emulated_dcs import EmulatedDCs, EmulatedLayer, Sent
from benchmarks.report import machine
from examples.text_data import Text, held_out_batches, load_text, training_batch
from examples.text_model import TextModel
from examples.text_shapes import TextShape
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import EXACT, LADDER, Rung
from hybridep_rt.codecs.ladder import rung as find_rung
from hybridep_rt.planner.makers import subscribe
from hybridep_rt.planner.plan import LayerPlan, Layout

DCS = 4
LONGER = 1.2
COPIED = 0.75
"""Part of the experts that all DCs have copies of; tokens travel to the others."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared. `length`: steps as a part of what the others make.

    `shared_every`: of `sr`, the steps from one mean of the layer's experts to the next; 0: there is none, and the
    largest weights themselves are sent. `start_off`: noise on the first weights, as a part of each tensor's own spread.
    """

    title: str
    rung: Rung = EXACT
    length: float = 1.0
    shared_every: int | None = None
    start_off: float = 0.0


def _residual(title: str, keep: float, shared_every: int) -> Row:
    return Row(title, Rung("exact", Codecs(weights=f"sr:keep={keep}"), 0), shared_every=shared_every)


_DEFAULT = find_rung("default").codecs

ROWS = {
    **{rung.name: Row(rung.name, rung) for rung in LADDER},
    "null": Row("exact, start off by a thousandth", start_off=1e-3),
    "longer": Row("exact, 20 % more steps", length=LONGER),
    "sr-1": _residual("SR 1 %, shared", 0.01, 16),
    "sr-2": _residual("SR 2 %, shared", 0.02, 16),
    "sr-1-alone": _residual("SR 1 %, nothing shared", 0.01, 0),
    "side": Row(
        "default with 1 bit and second moments",
        replace(find_rung("default"), codecs=Codecs("int8", _DEFAULT.weights, "1bit:vs=16:block=256")),
    ),
    "default-cold": Row("default, no warm-up", replace(find_rung("default"), warm_up_steps=0)),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all runs that are compared. Learning rate: linear warm-up, then a cosine to 0.

    A calm course: with a higher rate, a shorter warm-up or no clipping, runs that differ by a thousandth at the start
    end far enough apart to hide what codecs do.
    """

    steps: int = 2000
    lr: float = 5e-4
    lr_warm_up_steps: int = 100
    clip: float = 1.0
    batch: int = 4
    shape: TextShape = field(default_factory=lambda: TextShape(256, 512, 8, 2, layers=2, heads=4, batch=1, sequence=64))
    evaluations: int = 10
    curve_windows: int = 256
    final_windows: int = 2048

    def quick(self) -> Settings:
        """As small as shows that it works."""
        shape = replace(self.shape, hidden=32, ffn=64, heads=2)
        return replace(self, steps=30, shape=shape, evaluations=2, curve_windows=32, final_windows=64)


def plan_of(shape: TextShape, copied: float) -> LayerPlan:
    """Homes in blocks, a worker per DC; of each run of 1 / (1 - `copied`) experts the last has no copies."""
    layout = Layout((1,) * DCS)
    home = [expert * DCS // shape.experts for expert in range(shape.experts)]
    apart = round(1 / (1 - copied))
    holders = [[home[e]] if e % apart == apart - 1 else range(DCS) for e in range(shape.experts)]
    return subscribe(layout, home, holders)


def run(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train, and say what came out; as JSON. `trained` in its curve: mean loss of the batches since the last point."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    hybridep_rt.init()
    row, text = _row_of(name, settings), load_text()
    steps = round(settings.steps * row.length)
    model = TextModel(settings.shape, settings.shape.sequence, seed)
    _disturb(model, row.start_off, seed)
    optimizer = hybridep_rt.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    dcs = _emulate(row, model, optimizer, settings.shape)
    evaluation, final = _held_out(text, settings)
    started, curve, sent, losses = time.process_time(), [], [], []
    for step in range(steps):
        loss = model.loss(_batch(text, settings, seed, step))
        losses.append(float(loss.detach()))
        optimizer.param_groups[0]["lr"] = _rate(settings, step, steps)
        sent.append(dcs.step(loss, settings.clip))
        if (step + 1) % (steps // settings.evaluations) == 0:
            distance = max(layer.distance() for layer in dcs.layers)
            trained = fmean(losses[-(steps // settings.evaluations) :])
            point = {"step": step + 1, "loss": _evaluate(model, evaluation), "trained": trained, "distance": distance}
            curve.append(point)
    return {
        "row": name,
        "seed": seed,
        **_conditions(row, settings, text),
        "parameters": _parameters(model),
        "final": _evaluate(model, final),
        "curve": curve,
        "bytes": _bytes(dcs, row, sent),
        "cpu_s": time.process_time() - started,
        "machine": machine(),
    }


def finished(file: Path, name: str, settings: Settings, text: Text) -> dict[str, Any] | None:
    """What `run` wrote there, if it was one of that row, as it is now, with these settings and this text."""
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    wanted = json.loads(json.dumps(_conditions(_row_of(name, settings), settings, text)))
    return content if all(content[key] == value for key, value in wanted.items()) else None


def _row_of(name: str, settings: Settings) -> Row:
    row = ROWS[name]
    most = round(settings.steps * row.length) // 4
    return replace(row, rung=replace(row.rung, warm_up_steps=min(row.rung.warm_up_steps, most)))


def _conditions(row: Row, settings: Settings, text: Text) -> dict[str, Any]:
    """All that a run's outcome depends on, but for the seed and the machine."""
    told = {"source": text.source, "digest": text.digest}
    return {"settings": asdict(settings), "rung": asdict(row.rung), "text": told}


def _emulate(row: Row, model: TextModel, optimizer: hybridep_rt.AdamW, shape: TextShape) -> EmulatedDCs:
    parameters, plan, layers = list(model.parameters()), plan_of(shape, COPIED), []
    for block in model.blocks:
        block.moe = EmulatedLayer(block.moe, plan, row.rung, expert=shape.expert, shared_every=row.shared_every)
        layers.append(block.moe)
    return EmulatedDCs(layers, optimizer, parameters, row.rung)


@torch.no_grad()
def _disturb(model: TextModel, part: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if part else ():
        parameter += part * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)


def _batch(text: Text, settings: Settings, seed: int, step: int) -> torch.Tensor:
    sequence = settings.shape.sequence
    of_dcs = [
        training_batch(text, settings.batch, sequence, seed=seed, step=step, micro_batch=0, worker=dc, workers=DCS)
        for dc in range(DCS)
    ]
    return torch.cat(of_dcs)


def _held_out(text: Text, settings: Settings) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Windows of the first half of the held-out text for curves, and of the second for the final figure alone."""
    size, sequence = 32, settings.shape.sequence
    curve, final = (
        held_out_batches(text, size, sequence, count=settings.final_windows // size, worker=half, workers=2)
        for half in range(2)
    )
    return curve[:: settings.final_windows // settings.curve_windows], final


@torch.no_grad()
def _evaluate(model: TextModel, windows: list[torch.Tensor]) -> float:
    model.eval()
    loss = torch.stack([model.loss(window) for window in windows]).double().mean().item()
    model.train()
    return loss


def _rate(settings: Settings, step: int, steps: int) -> float:
    rise = min((step + 1) / settings.lr_warm_up_steps, 1.0)
    return settings.lr * rise * (1 + math.cos(math.pi * step / steps)) / 2


def _bytes(dcs: EmulatedDCs, row: Row, sent: list[Sent]) -> dict[str, float]:
    """Per copied parameter, step and subscriber, after a warm-up and over all steps. Copies are there at the start."""
    copied = sum(layer.copied_elements() for layer in dcs.layers)
    if not copied:
        return {}
    steady = sent[row.rung.warm_up_steps :]

    def mean(values: list[int], each: int) -> float:
        return sum(values) / max(len(values), 1) / each

    every = row.shared_every
    copies = sum(len(layer.experts) for layer in dcs.layers) * COPIED / len(dcs.layers)
    return {
        "weights": mean([step.weights for step in steady], copied),
        "gradients": mean([step.gradients for step in steady], copied * (DCS - 1)),
        "weights_mean": mean([step.weights for step in sent], copied),
        "gradients_mean": mean([step.gradients for step in sent], copied * (DCS - 1)),
        "shared": 8 / (copies * every) if every else 0.0,
    }


def _parameters(model: TextModel) -> dict[str, int]:
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return {"experts": experts, "all": sum(p.numel() for p in model.parameters())}
