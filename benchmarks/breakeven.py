"""When do experts move fewer bytes than tokens? Monte Carlo of routing, independent of the planner's formulas.

    python -m benchmarks.breakeven [--json FILE] [--png FILE]

D equal DCs; N tokens of one DC per optimizer step, all micro-batches. Bytes on one DC's uplink, per MoE layer and step:
    tokens, domains of S DCs:  4 * N * crossings(S) * H * b      dispatch and combine, forward and backward, of a vector
                               per (token, foreign domain) pair: a token crosses once, whatever it needs there
    experts:                   (E/D) * (S-1) * parameters * (b_w + b_g)      weights out, gradients home
    DP across sites:           2 * (D-1)/D * E * parameters * 2              a ring all-reduce of bfloat16 gradients
S = 1 is plain EP, S = D replicates every expert in every DC. `crossings` is counted over sampled routings. N* is the
number of tokens at which plain EP and full replication send equally much.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

WORKLOADS = Path(__file__).parent / "workloads"
DC_COUNTS = (2, 4, 8)
TOKENS = (10_000, 100_000, 1_000_000, 10_000_000)
ROUTINGS = ("uniform", "zipf")
BATCH = 2048
DP_BYTES = 2.0


@dataclass(frozen=True)
class Codec:
    """Bytes per token element, and per expert parameter for weights and gradient return together."""

    name: str
    token_bytes: float
    expert_bytes: float


CODECS = (
    Codec("tokens 1 B, experts 0.61 B", 1.0, 0.61),
    Codec("tokens 2 B, experts 0.345 B", 2.0, 0.345),
    Codec("tokens 2 B, experts 1.11 B", 2.0, 1.11),
    Codec("tokens 2 B, experts 4 B (raw)", 2.0, 4.0),
)
SHOWN = CODECS[2]


@dataclass(frozen=True)
class Model:
    """The MoE layers of one model."""

    title: str
    source: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    layers: int
    matrices: int

    @property
    def parameters(self) -> int:
        """Of one expert."""
        return self.matrices * self.hidden * self.ffn


@dataclass(frozen=True)
class Crossings:
    """Foreign domains that a token needs, by domain size: mean over sampled routings, and the mean's standard error."""

    model: Model
    dcs: int
    routing: str
    mean: dict[int, float]
    error: dict[int, float]

    @property
    def q(self) -> float:
        """Chance that a token needs a given remote DC."""
        return self.mean[1] / (self.dcs - 1)

    def tokens_bytes(self, size: int, tokens: float, codec: Codec) -> float:
        """Token bytes on a DC's uplink, per layer and step."""
        return 4 * tokens * self.mean[size] * self.model.hidden * codec.token_bytes

    def experts_bytes(self, size: int, codec: Codec) -> float:
        """Expert bytes on a DC's uplink, per layer and step."""
        owned = self.model.experts / self.dcs
        return owned * (size - 1) * self.model.parameters * codec.expert_bytes

    def uplink_bytes(self, tokens: float, codec: Codec) -> dict[str, float]:
        """Bytes on a DC's uplink by strategy, per layer and step."""
        found = {
            strategy(size, self.dcs): self.tokens_bytes(size, tokens, codec) + self.experts_bytes(size, codec)
            for size in self.mean
        }
        everything = self.model.experts * self.model.parameters
        return found | {"DP": 2 * (self.dcs - 1) / self.dcs * everything * DP_BYTES}

    def break_even(self, codec: Codec) -> float:
        """N*: tokens per DC and step at which plain EP and full replication send equally much."""
        return self.experts_bytes(self.dcs, codec) / self.tokens_bytes(1, 1, codec)


def strategy(size: int, dcs: int) -> str:
    """The name of domains of that size."""
    return "plain EP" if size == 1 else "replicate" if size == dcs else f"domains of {size}"


def models() -> dict[str, Model]:
    """All workloads in benchmarks/workloads, by name."""
    found: dict[str, Model] = {}
    for path in sorted(WORKLOADS.glob("*.yaml"), reverse=True):
        found |= {name: Model(**fields) for name, fields in yaml.safe_load(path.read_text()).items()}
    return found


def routings(model: Model, routing: str, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of (tokens, k) distinct expert numbers. Zipf: popularity 1/rank, ranks shuffled anew for each batch."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, model.experts + 1)
    for start in range(0, samples, BATCH):
        weight = np.zeros(model.experts) if routing == "uniform" else -np.log(rng.permutation(ranks))
        score = weight + rng.gumbel(size=(min(BATCH, samples - start), model.experts))
        yield np.argpartition(score, -model.top_k, axis=1)[:, -model.top_k :]


def count(model: Model, routing: str, samples: int, seed: int = 0) -> list[Crossings]:
    """Count crossings for every number of DCs over one set of sampled routings."""
    sizes = {dcs: [size for size in range(1, dcs + 1) if dcs % size == 0] for dcs in DC_COUNTS}
    seen: dict[tuple[int, int], list[np.ndarray]] = {(d, s): [] for d, row in sizes.items() for s in row}
    for chosen in routings(model, routing, samples, seed):
        for dcs, size in seen:
            seen[dcs, size].append(foreign_domains(chosen, model.experts, dcs, size))
    counted = {key: np.concatenate(parts) for key, parts in seen.items()}
    return [
        Crossings(
            model,
            dcs,
            routing,
            mean={size: float(counted[dcs, size].mean()) for size in row},
            error={size: float(counted[dcs, size].std() / np.sqrt(samples)) for size in row},
        )
        for dcs, row in sizes.items()
    ]


def foreign_domains(chosen: np.ndarray, experts: int, dcs: int, size: int) -> np.ndarray:
    """Per token, the domains other than its own DC's that own a chosen expert. Token i starts in DC i mod D."""
    domain = chosen * dcs // experts // size
    needed = np.zeros((len(chosen), dcs // size), dtype=bool)
    needed[np.arange(len(chosen))[:, None], domain] = True
    needed[np.arange(len(chosen)), np.arange(len(chosen)) % dcs // size] = False
    return needed.sum(axis=1)


def report(results: Sequence[Crossings], samples: int, seed: int) -> dict[str, Any]:
    """Everything, for JSON: what ran where and when, and the bytes of every strategy."""
    return {
        "benchmark": "breakeven",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "samples": samples,
        "seed": seed,
        "unit": "bytes on one DC's uplink, per MoE layer and optimizer step; tokens are per DC and step",
        "codecs": [asdict(codec) for codec in CODECS],
        "results": [_result(result) for result in results],
    }


def _result(result: Crossings) -> dict[str, Any]:
    return {
        "model": asdict(result.model) | {"parameters_per_expert": result.model.parameters},
        "dcs": result.dcs,
        "routing": result.routing,
        "q": result.q,
        "q_standard_error": result.error[1] / (result.dcs - 1),
        "crossings": {strategy(size, result.dcs): mean for size, mean in result.mean.items()},
        "break_even_tokens": {codec.name: result.break_even(codec) for codec in CODECS},
        "uplink_bytes": {
            codec.name: {str(tokens): result.uplink_bytes(tokens, codec) for tokens in TOKENS} for codec in CODECS
        },
    }


def break_even_table(results: Sequence[Crossings]) -> Table:
    """q and N* of every model, number of DCs and routing."""
    table = Table(title="Tokens per DC and step from which full replication sends less than plain EP (N*)")
    for column in ("model", "DCs", "routing", "q", *(codec.name for codec in CODECS)):
        table.add_column(column, justify="left" if column in ("model", "routing") else "right")
    for result in results:
        row = [f"{result.break_even(codec):,.0f}" for codec in CODECS]
        table.add_row(result.model.title, str(result.dcs), result.routing, f"{result.q:.3f}", *row)
    return table


def bytes_table(results: Sequence[Crossings], tokens: int) -> Table:
    """Megabytes of every strategy at one number of tokens; the least is marked."""
    names = ("plain EP", "domains of 2", "domains of 4", "replicate", "DP")
    table = Table(title=f"MB per uplink, layer and step at {tokens:,} tokens per DC ({SHOWN.name}; * least)")
    for column in ("model", "DCs", *names):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        found = result.uplink_bytes(tokens, SHOWN)
        least = min(found.values())
        cells = [f"{found[n] / 1e6:,.0f}{'*' if found[n] == least else ' '}" if n in found else "" for n in names]
        table.add_row(result.model.title, str(result.dcs), *cells)
    return table


def draw(results: Sequence[Crossings], path: Path, dcs: int = 4) -> None:
    """The break-even map: one panel per model, tokens per step against bytes per expert parameter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [result for result in results if result.dcs == dcs and result.routing == "uniform"]
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 7.6), sharex=True, sharey=True, layout="constrained")
    for axis, result in zip(axes.flat, chosen, strict=True):
        shades = _panel(axis, result)
    for axis in axes[-1]:
        axis.set_xlabel("tokens per DC and optimizer step")
    for axis in axes[:, 0]:
        axis.set_ylabel("bytes per expert parameter\n(weights + gradients)")
    bar = figure.colorbar(shades, ax=axes, ticks=[-2, -1, 0, 1, 2], pad=0.01)
    bar.ax.set_yticklabels(["1/100", "1/10", "1", "10", "100"])
    bar.set_label("uplink bytes: plain EP / best with copies")
    figure.suptitle(
        f"Break-even of moving experts, {dcs} DCs, uniform routing, tokens at 2 B per element\n"
        "blue: copies send less; red: plain EP sends less; black line: equal; dotted: 4, 1.11 and 0.345 B per parameter"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, result: Crossings) -> Any:
    tokens, expert_bytes = np.meshgrid(np.logspace(3, 7, 161), np.logspace(-1, np.log10(8), 121))
    unit = Codec("one byte per parameter", 2.0, 1.0)
    with_copies = [
        result.tokens_bytes(size, 1, unit) * tokens + result.experts_bytes(size, unit) * expert_bytes
        for size in result.mean
        if size > 1
    ]
    ratio = np.log10(result.tokens_bytes(1, 1, unit) * tokens / np.minimum.reduce(with_copies))
    shades = axis.pcolormesh(tokens, expert_bytes, ratio, cmap="RdBu", vmin=-2, vmax=2, shading="gouraud")
    axis.contour(tokens, expert_bytes, ratio, levels=[0], colors="black", linewidths=1.8)
    for level in (0.345, 1.11, 4.0):
        axis.axhline(level, color="black", linestyle=":", linewidth=0.8)
    axis.set(xscale="log", yscale="log", title=f"{result.model.title} (q = {result.q:.2f})")
    axis.set_yticks([0.1, 0.3, 1, 3, 8], labels=["0.1", "0.3", "1", "3", "8"])
    axis.minorticks_off()
    return shades


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option(
    "--png", "png_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw the break-even map here."
)
@click.option("--samples", type=click.IntRange(16, 1 << 20), default=1 << 15, show_default=True, help="Routings.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def main(json_path: Path | None, png_path: Path | None, samples: int, seed: int) -> None:
    """Count WAN bytes of plain EP, expert domains, replication and DP over sampled routings."""
    console = Console()
    cases = [(model, routing) for model in models().values() for routing in ROUTINGS]
    counted = track(cases, "sampling routings", console=console, transient=True)
    results = [result for model, routing in counted for result in count(model, routing, samples, seed)]
    console.print(break_even_table(results))
    for tokens in TOKENS[:3]:
        console.print(bytes_table([result for result in results if result.routing == "uniform"], tokens))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report(results, samples, seed), indent=1) + "\n")
    if png_path is not None:
        draw(results, png_path)


if __name__ == "__main__":
    main()
