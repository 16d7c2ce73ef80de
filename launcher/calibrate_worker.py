"""The job that `hybridep calibrate` runs: every worker measures, the first one writes the file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

import hybridep_rt
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import rung
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.moe.site_figures import Load, measure_codecs, measure_site
from hybridep_rt.planner.calibration import Calibration, CodecFigures, Figure, LinkFigures, SiteFigures, slowest
from hybridep_rt.planner.calibration_file import dump_calibration
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.workload_file import ModelFile, load_model
from hybridep_rt.runtime.environment import Environment
from hybridep_rt.runtime.link_figures import measure_links
from topology import Topology, load

DEFAULT = ModelFile(
    "hidden 512, ffn 2048, 32 experts", LayerShape(512, 2048, 32, 2, 3 * 512 * 2048), 1, 2048, {}, {}, ""
)
_TOKENS_MOST = 4096
"""Of a micro-batch that is measured: more takes longer and says no more."""
_KINDS = ("tokens", "weights", "gradients")
_FIGURES_MOST = 1 << 16

Figures = dict[str, tuple[float, ...]]
"""Name of a quantity -> median, low, high."""


def main(words: Sequence[str]) -> None:
    """Raises ConfigError for a workload that can't be read, and whatever the runtime raises."""
    options = _parse(words)
    model = DEFAULT if options.workload is None else load_model(options.workload)
    runtime = hybridep_rt.init()
    told = Environment.read(os.environ)
    assert told is not None  # the launcher started this
    topology = load(told.settings.topology)

    def progress(text: str) -> None:
        if runtime.rank == 0:
            print(f"calibrating: {text}", flush=True)

    specs = _specs(runtime.rung.codecs, options.codecs)
    found = calibrated(runtime, topology, model.title, _load(model), specs, options.budget, progress)
    if found is not None:
        Path(options.out).write_text(dump_calibration(found))
        progress(f"written to {options.out}")
    runtime.barrier()
    runtime.shutdown()


def calibrated(
    runtime: hybridep_rt.Runtime,
    topology: Topology,
    title: str,
    work: Load,
    specs: list[tuple[str, str]],
    budget_bytes: float,
    progress: Callable[[str], None],
) -> Calibration | None:
    """Measure everything; all workers call it. The result is the first worker's.

    Raises DeadlineExceeded, PeerLost, and RemoteProtocolError for figures that are none.
    """
    progress(f"compute at the shapes of {title}")
    site = measure_site(runtime, work)
    progress(f"{len(specs)} codecs")
    codecs = measure_codecs(runtime, specs, work.shape.hidden)
    heard = measure_links(runtime, topology, budget_bytes, progress)
    mine = _packed(site, codecs) | {
        f"link {each.source} {name}": tuple(Figure.of(samples))
        for each in heard
        for name, samples in (("goodput", each.goodput_bytes_per_s), ("rtt", each.rtt_s))
    }
    found = _gather(runtime, mine)
    return _calibration(runtime, topology.cluster, title, found, specs) if runtime.rank == 0 else None


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("hybridep calibrate")
    parser.add_argument("--workload", default=None)
    parser.add_argument("--codecs", default="")
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args(words)


def _load(model: ModelFile) -> Load:
    tokens = (model.tokens or _TOKENS_MOST) // int(model.workload.get("micro_batches", 1))
    flops = model.compute.get("pre_expert_flops_per_token", 8.0 * model.shape.hidden**2)
    matrices = model.shape.parameters_per_expert // (model.shape.hidden * model.shape.ffn)
    return Load(model.shape, matrices, max(1, min(tokens, _TOKENS_MOST)), flops)


def _specs(codecs: Codecs, rungs: str) -> list[tuple[str, str]]:
    """Each (kind, codec) of the job and of the rungs, once; those that need shared weights are left out."""
    allowed = [codecs, *(rung(name).codecs for name in rungs.split(",") if name)]
    named = {(kind, getattr(each, kind)): None for each in allowed for kind in _KINDS}
    return [(kind, spec) for kind, spec in named if spec.partition(":")[0] != "sr"]


def _packed(site: SiteFigures, codecs: dict[str, CodecFigures]) -> Figures:
    figures = {f"site {name}": figure for name, figure in site._asdict().items() if figure is not None}
    for name, codec in codecs.items():
        figures |= {f"encode {name}": codec.encode_s, f"decode {name}": codec.decode_s}
    return {name: tuple(figure) for name, figure in figures.items()}


def _gather(runtime: hybridep_rt.Runtime, mine: Figures) -> list[Figures]:
    """Of all workers by number, at the first one; nothing elsewhere."""
    box = runtime.mailbox("calibrated")
    if runtime.rank != 0:
        box.send(0, msgpack.packb({name: list(figure) for name, figure in mine.items()}))
        return []
    return [mine, *(_read(box.receive(number)) for number in range(1, runtime.world_size))]


def _read(payload: memoryview) -> Figures:
    """Raises RemoteProtocolError for anything but names and three finite numbers each."""
    try:
        content: Any = msgpack.unpackb(payload, strict_map_key=True) if payload.nbytes <= _FIGURES_MOST else None
        figures = {str(name): tuple(map(float, values)) for name, values in content.items()}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError("unreadable figures of a worker") from error
    if not all(len(each) == 3 and np.isfinite(each).all() for each in figures.values()):
        raise RemoteProtocolError("figures of a worker that are no numbers")
    return figures


def _calibration(
    runtime: hybridep_rt.Runtime, cluster: str, title: str, found: list[Figures], specs: list[tuple[str, str]]
) -> Calibration:
    layout, names = runtime.layout, runtime.dc_names
    sites, links = {}, {}
    for dc, name in enumerate(names):
        first = layout.first(dc)
        sites[name] = slowest([_site(found[first + worker]) for worker in range(layout.workers_per_dc[dc])])
        for source in (source for source in range(layout.dcs) if source != dc):
            goodput, rtt = (Figure(*found[first][f"link {source} {what}"]) for what in ("goodput", "rtt"))
            links[names[source], name] = LinkFigures(goodput, rtt)
    codecs = {f"{kind}={spec}": _codec(f"{kind}={spec}", found) for kind, spec in specs}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(cluster, date, title, sites, links, codecs)


def _site(figures: Figures) -> SiteFigures:
    picked = {name: Figure(*figures[f"site {name}"]) for name in SiteFigures._fields if f"site {name}" in figures}
    return SiteFigures(**picked)


def _codec(name: str, found: list[Figures]) -> CodecFigures:
    """At the slowest worker."""
    ways = (max(Figure(*each[f"{way} {name}"]) for each in found) for way in ("encode", "decode"))
    return CodecFigures(*ways)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
