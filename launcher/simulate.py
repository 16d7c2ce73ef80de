"""`hybridep simulate`: a training step on one to a thousand DCs, by the planner's model; sweeps and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.job import Compute
from hybridep_rt.planner.makers import divisors
from hybridep_rt.planner.workload_file import load_model
from hybridep_rt.simulate.paper_figures import PaperModel, Speedup, messages, speedups, traffic
from hybridep_rt.simulate.scenario import CODECS, Result, Scenario
from hybridep_rt.simulate.scenario import simulate as simulate_step
from hybridep_rt.simulate.sweep import SWEEPS, Point, default_values, sweep
from topology.units import RATE, TIME, format_bit_rate, format_time

DEFAULT_SHAPE = LayerShape(7168, 2048, 256, 8, 3 * 7168 * 2048)
"""DeepSeek-V3's experts: see benchmarks/workloads/public.yaml."""
DEFAULT_LAYERS = 58
FIGURES = ("16", "17", "messages")
_PARTS = ("compute", "tokens", "experts", "gradients", "dense")
_FIGURE_DCS = (8, 64, 250, 1000)
_FIGURE_RATES = tuple(RATE.parse(text) for text in ("1 Gbit/s", "10 Gbit/s"))
_FIGURE_SIZES = (2, 8, 50, 250)
_FIGURE_SHARES = (0.25, 0.5, 0.75)


@click.command("simulate")
@click.option("--workload", default=None, help="A model's YAML file, or FILE:NAME. Default: of DeepSeek-V3's sizes.")
@click.option("--dcs", type=click.IntRange(1, 4096), default=1000, show_default=True, help="Datacenters.")
@click.option("--gpus", type=click.IntRange(1, 1024), default=8, show_default=True, help="Of each DC.")
@click.option("--bandwidth", default="1 Gbit/s", show_default=True, help="Of a DC's uplink, and of each link.")
@click.option("--rtt", default="50 ms", show_default=True, help="Round trip between DCs.")
@click.option("--rate-spread", type=click.FloatRange(0, 3), default=0.0, help="Sigma of log-normal rates; 0: alike.")
@click.option("--rtt-spread", type=click.FloatRange(0, 3), default=0.0, help="Sigma of log-normal round trips.")
@click.option("--zipf", type=click.FloatRange(0, 16), default=0.0, help="Exponent of experts' popularity; 0: uniform.")
@click.option("--tokens", type=click.IntRange(min=1), default=None, help="Per GPU and step. [default: 4096]")
@click.option("--codec", type=click.Choice([c.name for c in CODECS]), default="1.11", show_default=True)
@click.option("--tflops", type=click.FloatRange(min=1e-9), default=None, help="Of a GPU. [default: 400]")
@click.option("--plan", "plans", multiple=True, help="ep, domains:S, replicate, p:SHARE, dp; may be repeated.")
@click.option("--sweep", "swept", type=click.Choice(SWEEPS), default=None, help="Quantity that takes several values.")
@click.option("--values", default=None, help="Of the sweep, separated by commas.")
@click.option("--figure", type=click.Choice(FIGURES), default=None, help="Of the paper: its model, our assumptions.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of what is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--plot", type=click.Path(dir_okay=False), default=None, help="Draw to this file.")
def simulate(
    plans: tuple[str, ...],
    swept: str | None,
    values: str | None,
    figure: str | None,
    as_json: bool,
    plot: str | None,
    **options: Any,
) -> None:
    """Simulate one training step. Needs neither MPI nor torch.

    Plain EP here sends a token once per DC; dp keeps all experts in every DC and sums their gradients in bfloat16.
    """
    console = Console(stderr=as_json)
    try:
        if figure is not None:
            shown = _figure(figure, _scenario(**options), console)
        else:
            shown = _simulated(_scenario(**options), plans, swept, values, console)
    except ConfigError as error:
        raise _Refused(str(error)) from None
    content, tables = shown
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        for table in tables:
            console.print(table)
    if plot is not None:
        _draw(content, plot)


class _Refused(click.ClickException):
    exit_code = 2


def _scenario(
    workload: str | None,
    dcs: int,
    gpus: int,
    bandwidth: str,
    rtt: str,
    tokens: int | None,
    codec: str,
    tflops: float | None,
    **drawn: Any,
) -> Scenario:
    shape, layers, compute = DEFAULT_SHAPE, DEFAULT_LAYERS, dict[str, float]()
    if workload is not None:
        model = load_model(workload)
        shape, layers, compute, tokens = model.shape, model.layers, model.compute, tokens or model.tokens
    square = shape.hidden**2
    rate = {"flops_per_s": 400e12} if tflops is None else {"flops_per_s": tflops * 1e12}
    default = {"pre_expert_flops_per_token": 8.0 * square, "dense_parameters": 4.0 * square * layers}
    asked = {} if tflops is None else rate
    return Scenario(
        shape,
        layers,
        dcs,
        gpus,
        RATE.parse(bandwidth),
        TIME.parse(rtt),
        tokens or 4096,
        next(each for each in CODECS if each.name == codec),
        Compute(**(rate | default | compute | asked)),
        **drawn,
    )


def _simulated(
    scenario: Scenario, plans: tuple[str, ...], swept: str | None, values: str | None, console: Console
) -> tuple[dict[str, Any], list[Table]]:
    chosen = plans or _default_plans(scenario)
    if swept is None:
        shown = list(track(chosen, "simulating", console=console, transient=True))
        points = [Point("", tuple(simulate_step(scenario, plan) for plan in shown))]
    else:
        listed = values.split(",") if values else default_values(scenario, swept)

        def progress(each: Iterable[str]) -> Iterable[str]:
            return track(list(each), f"sweeping {swept}", console=console, transient=True)

        points = sweep(scenario, swept, listed, plans or ("ep", "replicate", "dp"), progress)
    content = {"scenario": _described(scenario), "sweep": swept, "points": [_point_json(point) for point in points]}
    return content, [_points_table(scenario, swept, points)]


def _default_plans(scenario: Scenario) -> tuple[str, ...]:
    sizes = divisors(scenario.dcs)[1:-1]
    some = sorted({sizes[len(sizes) * part // 4] for part in range(1, 4)}) if sizes else []
    return ("ep", *(f"domains:{size}" for size in some), "replicate", "dp") if scenario.dcs > 1 else ("ep",)


def _described(scenario: Scenario) -> dict[str, Any]:
    return asdict(scenario)


def _point_json(point: Point) -> dict[str, Any]:
    return {"value": point.value, "results": [asdict(result) for result in point.results]}


def _points_table(scenario: Scenario, swept: str | None, points: list[Point]) -> Table:
    table = Table(
        title=f"{scenario.dcs} DCs x {scenario.workers} GPUs, {format_bit_rate(scenario.bandwidth)}, "
        f"{format_time(scenario.rtt_s)}, {scenario.tokens:,.0f} tokens per GPU, codec {scenario.codec.name}",
        caption="seconds of a step: mean over DCs of each part; uplink: bytes of the mean DC",
        box=None,
        padding=(0, 1),
    )
    columns = [*([swept] if swept else []), "plan", "step", "against ep", *_PARTS, "uplink"]
    for column in columns:
        table.add_column(column, justify="left" if column in (swept, "plan") else "right", no_wrap=True)
    for point in points:
        plain = next((result.step_s for result in point.results if result.plan == "ep"), None)
        for result in point.results:
            table.add_row(*([point.value] if swept else []), *_cells(result, plain))
    return table


def _cells(result: Result, plain_s: float | None) -> list[str]:
    against = "" if plain_s is None else f"{plain_s / result.step_s:.2f}x"
    parts = [_seconds(result.parts_s[part]) for part in _PARTS]
    return [result.plan, _seconds(result.step_s), against, *parts, _gigabytes(result.uplink_bytes)]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else format_time(seconds)


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.4g} GB"


def _figure(figure: str, scenario: Scenario, console: Console) -> tuple[dict[str, Any], list[Table]]:
    if figure == "messages":
        return _messages(scenario.dcs)
    if figure == "16":
        return _traffic(PaperModel(), scenario.dcs)
    return _speedups(scenario, console)


def _messages(dcs: int) -> tuple[dict[str, Any], list[Table]]:
    rows = messages(dcs)
    table = Table(title=f"Messages per layer forward among {dcs} workers of a level (as Table VII)")
    for column in ("domain size", "all-gather", "all-to-all (each of 2)", "all"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row.size), f"{row.all_gather:,}", f"{row.all_to_all:,}", f"{row.total:,}")
    return {"figure": "messages", "dcs": dcs, "rows": [asdict(row) | {"total": row.total} for row in rows]}, [table]


def _traffic(model: PaperModel, dcs: int) -> tuple[dict[str, Any], list[Table]]:
    tokens = [1 << power for power in range(8, 17)]
    rows = traffic(model, dcs, tokens)
    sizes = sorted({row.size for row in rows})
    shown = sizes if len(sizes) <= 6 else [sizes[len(sizes) * part // 6] for part in range(5)] + [sizes[-1]]
    table = Table(title=f"Bytes that leave a DC per layer forward, {dcs} DCs (as Fig. 16)")
    for column in ("tokens per GPU", "all as tokens", *(f"S = {size}" for size in shown)):
        table.add_column(column, justify="right")
    for count in tokens:
        found = {row.size: row for row in rows if row.tokens == count}
        hybrid = [_gigabytes(found[size].hybrid_bytes) for size in shown]
        table.add_row(f"{count:,}", _gigabytes(next(iter(found.values())).plain_bytes), *hybrid)
    return {"figure": "16", "dcs": dcs, "model": asdict(model), "rows": [asdict(row) for row in rows]}, [table]


def _speedups(scenario: Scenario, console: Console) -> tuple[dict[str, Any], list[Table]]:
    """The paper's model, then the planner's on the same numbers of DCs: with gradients, and EP that sends rows once."""
    counts = [count for count in _FIGURE_DCS if count <= scenario.dcs]
    models = {"8 experts in each DC": PaperModel(), "32 experts in all": PaperModel(experts=32)}
    rows = {
        name: speedups(model, counts, _FIGURE_RATES, _FIGURE_SIZES, _FIGURE_SHARES) for name, model in models.items()
    }
    points = []
    for count in track(counts, "simulating", console=console, transient=True):
        sizes = [size for size in _FIGURE_SIZES if count % size == 0 and size < count]
        tried = ["ep", *(f"domains:{size}" for size in sizes), *(f"p:{p:g}" for p in _FIGURE_SHARES), "replicate", "dp"]
        points += sweep(scenario, "dcs", [str(count)], tried)
    content = {
        "figure": "17",
        "rows": [{"assumed": name, **asdict(row)} for name, found in rows.items() for row in found],
        "models": {name: asdict(model) for name, model in models.items()},
        "scenario": _described(scenario),
        "points": [_point_json(point) for point in points],
    }
    tables = [_speedup_table(name, found, counts) for name, found in rows.items()]
    return content, [*tables, _points_table(scenario, "dcs", points)]


def _speedup_table(name: str, rows: Sequence[Speedup], counts: Sequence[int]) -> Table:
    table = Table(title=f"Plain EP against the hybrid, by the paper's model (as Fig. 17), {name}", box=None)
    columns = sorted({(row.kind, row.value) for row in rows}, key=lambda column: (column[0] == "p", column[1]))
    for column in ("DCs", "bandwidth", *(f"{kind} = {value:g}" for kind, value in columns)):
        table.add_column(column, justify="right", no_wrap=True)
    for count in counts:
        for bandwidth in _FIGURE_RATES:
            found = {(r.kind, r.value): r.ratio for r in rows if (r.dcs, r.bandwidth) == (count, bandwidth)}
            cells = [f"{found[each]:.2f}x" if each in found else "" for each in columns]
            table.add_row(str(count), format_bit_rate(bandwidth), *cells)
    return table


def _draw(content: dict[str, Any], path: str) -> None:
    try:
        from launcher.simulate_plot import draw
    except ModuleNotFoundError:
        raise _Refused("--plot needs matplotlib: pip install 'hybridep[plot]'") from None
    draw(content, path)
