"""`hybridep plan`: what each way of sharing experts would cost on a topology, which one is taken, and why.

With `--workload` by the runtime's own model (`plan_report`); with sizes as options by what plans cost in bytes.
"""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hybridep_rt.codecs.ladder import parse_rung
from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.auto import Decision, decide, make_plan
from hybridep_rt.planner.economics import Cost, LayerShape, Workload, price
from hybridep_rt.planner.plan import Plan
from hybridep_rt.planner.plan_file import to_file
from hybridep_rt.planner.plan_spec import Maker, parse_plan_spec
from hybridep_rt.planner.workload_file import load_model
from launcher.plan_report import Wish, print_report
from topology.model import Topology
from topology.source import load
from topology.units import format_size, format_time

COUNT = click.IntRange(min=1, max=1 << 40)
AMOUNT = click.FloatRange(min=0, max=1e6)


@click.command("plan")
@click.argument("topology")
@click.option("--workload", default=None, help="A model's YAML file, or FILE:NAME; instead of sizes as options.")
@click.option("--model", type=click.Choice(["runtime", "paper"]), default="runtime", help="Which model predicts.")
@click.option("--routing", default=None, help="uniform, zipf:EXPONENT or a file of samples; with --workload.")
@click.option("--tflops", type=click.FloatRange(min=1e-9), default=None, help="Of a worker; with --workload.")
@click.option("--calibration", default=None, metavar="FILE", help="What hybridep calibrate wrote; with --workload.")
@click.option(
    "--codecs", "rungs", default=None, metavar="RUNGS", help="To choose from, as safe,default; with --workload."
)
@click.option("--plot", type=click.Path(dir_okay=False), default=None, help="Draw step times; with --workload.")
@click.option("--hidden", type=COUNT, default=None, help="Width of a token vector.")
@click.option("--ffn", type=COUNT, default=None, help="Inner width of an expert.")
@click.option("--experts", type=click.IntRange(1, 1 << 16), default=None, help="Experts per layer.")
@click.option("--top-k", type=COUNT, default=None, help="Experts per token.")
@click.option("--layers", type=click.IntRange(1, 4096), default=None, help="MoE layers.")
@click.option("--tokens", type=COUNT, default=None, help="Tokens per worker and optimizer step, all micro-batches.")
@click.option("--matrices", type=click.IntRange(2, 3), default=3, show_default=True, help="Of an expert: 3 is SwiGLU.")
@click.option("--token-bytes", type=AMOUNT, default=None, show_default="2", help="Per element of a token on the wire.")
@click.option("--weight-bytes", type=AMOUNT, default=None, show_default="2", help="Per expert parameter on the wire.")
@click.option("--gradient-bytes", type=AMOUNT, default=None, show_default="2", help="Per parameter, gradient return.")
@click.option("--codec", default="", metavar="CODEC", help="As in `hybridep run`: bytes and memory of that rung.")
@click.option("--micro-batches", type=COUNT, default=None, show_default="1", help="Per optimizer step.")
@click.option("--token-chunks", type=COUNT, default=None, show_default="1", help="Parts of a pipelined exchange.")
@click.option(
    "--pre-expert-ms", type=AMOUNT, default=None, show_default="0", help="Compute per layer that hides experts."
)
@click.option("--memory-gb", type=AMOUNT, default=None, help="For the copies of one worker; default: no limit.")
@click.option(
    "--plan", "spec", default="auto", show_default=True, help="auto, ep, replicate, domains:S0[,S1..] or FILE."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--output", type=click.Path(dir_okay=False), default=None, help="Write the plan to this file.")
def plan(
    topology: str,
    spec: str,
    as_json: bool,
    output: str | None,
    memory_gb: float | None,
    workload: str | None,
    model: str,
    routing: str | None,
    tflops: float | None,
    calibration: str | None,
    rungs: str | None,
    plot: str | None,
    codec: str,
    **numbers: Any,
) -> None:
    """Show what every plan costs on TOPOLOGY (a YAML file or preset:NAME), and which one is taken.

    Needs no MPI, and torch only where a codec is named.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    try:
        read = load(topology)
        shape = load_model(workload).shape if workload else None
        sizes = (given.get(name) or (getattr(shape, name) if shape else 1) for name in ("hidden", "ffn"))
        if codec and rungs:
            raise ConfigError("--codec names the rung, --codecs those to choose from: give one of them")
        given = _coded("" if rungs else codec or read.codec, *sizes) | given
        if workload is not None:
            wish = Wish(workload, spec, memory_gb, routing, tflops, calibration, rungs, given)
            print_report(wish, read, model, as_json=as_json, output=output, plot=plot)
            return
        shown = _report(read, _workload(**_complete(given)), spec, memory_gb, output)
    except ConfigError as error:
        raise _Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps(_as_json(*shown), indent=2))
    else:
        _print(Console(), *shown)


class _Refused(click.ClickException):
    exit_code = 2


def _coded(codec: str, hidden: int, ffn: int) -> dict[str, float]:
    """What a rung takes of a float32 model, on the wire and in memory."""
    if not codec:
        return {}
    import torch

    from hybridep_rt.codecs.sizes import HeldBytes, wire_bytes

    rung = parse_rung(codec)
    memory = HeldBytes.of_rung(rung, torch.float32).workload_bytes(8.0)
    return wire_bytes(rung.codecs, torch.float32, hidden, ffn) | memory


def _complete(given: dict[str, Any]) -> dict[str, Any]:
    """All that makes a model must be given, one way or the other."""
    for name in ("hidden", "ffn", "experts", "top_k", "layers", "tokens"):
        if name not in given:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}' (or --workload).")
    return {"pre_expert_ms": 0.0, **given}


def _workload(
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    layers: int,
    tokens: int,
    matrices: int,
    pre_expert_ms: float,
    **rates: Any,
) -> Workload:
    shape = LayerShape(hidden, ffn, experts, top_k, matrices * hidden * ffn)
    return Workload((shape,) * layers, tokens, pre_expert_s=pre_expert_ms / 1e3, **rates)


def _report(
    topology: Topology, work: Workload, text: str, memory_gb: float | None, output: str | None
) -> tuple[Topology, Decision, Plan, Cost]:
    budget_bytes = None if memory_gb is None else memory_gb * 1e9
    spec = parse_plan_spec(text)
    decision = decide(topology, work, memory_budget_bytes=budget_bytes)
    automatic = spec.maker is Maker.AUTO
    made = make_plan(spec, topology, work, memory_budget_bytes=budget_bytes)
    if output is not None:
        to_file(made, output)
    return topology, decision, made, decision.choice.cost if automatic else price(made.layers, topology, work)


def _print(console: Console, topology: Topology, decision: Decision, made: Plan, cost: Cost) -> None:
    table = Table(
        title=f"Plans for {topology.cluster}, per optimizer step",
        caption="uplink: bytes of the busiest; inside: on links inside DCs; copies: memory of one worker",
        padding=(0, 0),
    )
    for column in ("plan", "uplink", "tokens", "experts", "hidden", "inside", "total", "copies"):
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for candidate in decision.candidates:
        mark = " *" if candidate is decision.choice else "" if candidate.fits else " (too big)"
        table.add_row(candidate.name + mark, *_row(topology, candidate.cost))
    if cost != decision.choice.cost:
        table.add_section()
        table.add_row("as asked for", *_row(topology, cost))
    console.print(table)
    console.print(_links(topology, cost))
    console.print(f"Automatic choice: {decision.reason}", soft_wrap=True, markup=False, highlight=False)
    if cost != decision.choice.cost:
        console.print(f"This plan: {made.reason}", soft_wrap=True, markup=False, highlight=False)


def _row(topology: Topology, cost: Cost) -> list[str]:
    uplink = max(cost.uplink_bytes(dc) for dc in range(len(topology.datacenters)))
    times = (cost.tokens_s, cost.experts_s, cost.hidden_s, cost.inside_s, cost.total_s)
    return [format_size(uplink), *map(format_time, times), format_size(cost.copy_bytes_per_worker)]


def _links(topology: Topology, cost: Cost, most: int = 12) -> Table:
    """The busiest links of the plan that is taken."""
    busiest = sorted(cost.links.items(), key=lambda item: -item[1].total)
    rest = len(busiest) - most
    table = Table(title="Bytes per link", caption=f"and {rest} links with less" if rest > 0 else None)
    for column in ("link", "tokens", "weights", "gradients"):
        table.add_column(column, justify="left" if column == "link" else "right")
    names = topology.dc_names
    for (source, target), link in busiest[:most]:
        sizes = map(format_size, (link.tokens, link.weights, link.gradients))
        table.add_row(f"{names[source]} -> {names[target]}", *sizes)
    return table


def _as_json(topology: Topology, decision: Decision, made: Plan, cost: Cost) -> dict[str, Any]:
    return {
        "choice": decision.choice.name,
        "reason": decision.reason,
        "break_even_tokens_per_worker": decision.break_even_tokens,
        "candidates": [
            {"plan": c.name, "sizes": list(c.sizes), "fits": c.fits, **_cost_json(topology, c.cost)}
            for c in decision.candidates
        ],
        "plan": {"reason": made.reason, "layers": len(made.layers), **_cost_json(topology, cost)},
    }


def _cost_json(topology: Topology, cost: Cost) -> dict[str, Any]:
    names = topology.dc_names
    seconds = ("tokens_s", "weights_s", "gradients_s", "hidden_s", "inside_s", "total_s", "copy_bytes_per_worker")
    links = [
        {
            "from": names[source],
            "to": names[target],
            "tokens_bytes": link.tokens,
            "weights_bytes": link.weights,
            "gradients_bytes": link.gradients,
        }
        for (source, target), link in cost.links.items()
    ]
    return {**{name: getattr(cost, name) for name in seconds}, "links": links}
