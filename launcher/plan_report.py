"""What `hybridep plan --workload` prints: the search's choice by the runtime's own model, or the paper's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from hybridep_rt.errors import ConfigError, PlanError
from hybridep_rt.planner import routing as routings
from hybridep_rt.planner.auto import size_name
from hybridep_rt.planner.calibration import Calibration, measured_compute, usable
from hybridep_rt.planner.calibration_file import load_calibration
from hybridep_rt.planner.choice import layer_plans
from hybridep_rt.planner.economics import Workload
from hybridep_rt.planner.explain import SWITCH_DCS_MOST, Switch, reason, switches, why_lost
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.paper_levels import PaperPlan, paper_plans
from hybridep_rt.planner.plan import LayerPlan, Plan
from hybridep_rt.planner.plan_file import from_file, to_file
from hybridep_rt.planner.plan_spec import Maker, make_layer, parse_plan_spec
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import Found, Option, copy_bytes, search
from hybridep_rt.planner.timeline import Timeline, timeline
from hybridep_rt.planner.workload_file import ModelFile, load_model
from topology.model import Topology
from topology.units import format_size, format_time

DEFAULT_FLOPS_PER_S = 100e12
TIMELINE_DCS_MOST = 16
_SHOWN = 8
_COLUMNS = ("compute", "codecs", "tokens", "experts", "gradients", "dense", "others")
_FROM_FILE_ONLY = ("hidden", "ffn", "experts", "top_k", "layers", "matrices")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says. `numbers`: options that override the file's."""

    workload: str
    plan: str
    memory_gb: float | None
    routing: str | None
    tflops: float | None
    calibration: str | None
    rungs: str | None
    numbers: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan by the runtime's model, and everything that is said about it.

    `played` is None for many DCs. `rungs`: step times of the rungs that were allowed.
    """

    title: str
    job: Job
    found: Found
    option: Option
    played: Timeline | None
    switches: tuple[Switch, ...]
    rungs: dict[str, float]


def make_job(wish: Wish, topology: Topology) -> tuple[str, Job]:
    """The model's title, and its step on that topology. Raises PlanError where something is missing or wrong."""
    model = load_model(wish.workload)
    numbers = {name: value for name, value in wish.numbers.items() if name not in _FROM_FILE_ONLY}
    tokens = numbers.pop("tokens", model.tokens)
    if tokens is None:
        raise PlanError(
            f"{wish.workload}: say how many tokens a worker has per step: 'tokens:' in the file, or --tokens"
        )
    if "pre_expert_ms" in numbers:
        numbers["pre_expert_s"] = numbers.pop("pre_expert_ms") / 1e3
    work = Workload((model.shape,) * model.layers, tokens, **(model.workload | numbers))
    text = wish.routing or model.routing
    chosen = routings.parse(text, model.shape.num_experts, model.shape.top_k, samples=_samples(topology))
    compute, measured = _compute(wish, topology, model), _calibration(wish)
    if measured is not None:
        compute = measured_compute(compute, measured, topology)
    return model.title, Job(usable(topology, measured), work, (chosen,), compute)


def print_report(
    wish: Wish, topology: Topology, model: str, *, as_json: bool, output: str | None, plot: str | None
) -> None:
    """Answer on the screen, and in the files asked for. Raises ConfigError."""
    title, job = make_job(wish, topology)
    if model == "paper":
        _print_paper(title, job, as_json=as_json, output=output)
        return
    budget_bytes = None if wish.memory_gb is None else wish.memory_gb * 1e9
    rungs: dict[str, float] = {}
    if wish.rungs is None:
        found = search(Predictor(job), memory_budget_bytes=budget_bytes)
    else:
        from launcher.plan_rungs import search_rungs  # codecs need torch

        name, job, found, rungs = search_rungs(job, wish.rungs, _calibration(wish), budget_bytes)
        title = f"{title}, codec {name}"
    answer = _answer(title, job, found, wish, rungs)
    if output is not None:
        to_file(Plan(0, job.layout, _layers(answer), _reason(answer)), output)
    if plot is not None:
        _draw(answer, plot)
    if as_json:
        click.echo(json.dumps(_as_json(answer), indent=2))
    else:
        _print(Console(), answer)


def _calibration(wish: Wish) -> Calibration | None:
    return None if wish.calibration is None else load_calibration(wish.calibration)


def _samples(topology: Topology) -> int:
    """Fewer samples for many DCs, whose links are many."""
    return 2048 if len(topology.datacenters) <= TIMELINE_DCS_MOST else 256


def _compute(wish: Wish, topology: Topology, model: ModelFile) -> Compute:
    """By default a worker's attention has four matrices of hidden x hidden per layer, and nothing else is dense."""
    square = model.shape.hidden**2
    default = {
        "flops_per_s": topology.emulate_compute_flops_per_s or DEFAULT_FLOPS_PER_S,
        "pre_expert_flops_per_token": 8.0 * square,
        "dense_parameters": 4.0 * square * model.layers,
    }
    asked = {} if wish.tflops is None else {"flops_per_s": wish.tflops * 1e12}
    return Compute(**(default | model.compute | asked))


def _answer(title: str, job: Job, found: Found, wish: Wish, rungs: dict[str, float]) -> Answer:
    predictor = Predictor(job)
    option = found.choice if wish.plan == "auto" else _asked(predictor, wish.plan)
    few = job.layout.dcs <= TIMELINE_DCS_MOST
    played = timeline(predictor, option.layers) if few else None
    return Answer(title, job, found, option, played, tuple(switches(predictor, found)), rungs)


def _asked(predictor: Predictor, text: str) -> Option:
    """A plan by its name or file."""
    job, spec = predictor.job, parse_plan_spec(text)
    if spec.maker is Maker.FILE:
        layers: Sequence[LayerPlan] = from_file(spec.path, job.layout).layers
    else:
        counts = {shape.num_experts for shape in job.work.layers}
        made = {count: make_layer(spec, job.layout, count, job.topology.scaling) for count in counts}
        layers = [made[shape.num_experts] for shape in job.work.layers]
    if [layer.num_experts for layer in layers] != [shape.num_experts for shape in job.work.layers]:
        raise PlanError(f"{text}: the plan is for other layers than the model's")
    views = predictor.site_plans(layers)
    outcome = predictor.predict([views])
    last = int(outcome.end_s[0].argmax())
    parts = {part: float(seconds[0, last]) for part, seconds in outcome.parts.items()}
    step_s = float(outcome.step_s[0])
    return Option(text, views, step_s, parts, copy_bytes(job, views), fits=True, canonical=False, score=step_s)


def _layers(answer: Answer) -> tuple[LayerPlan, ...]:
    """The executor's tables of the plan."""
    option, job = answer.option, answer.job
    if not option.canonical and parse_plan_spec(option.name).maker is Maker.FILE:
        return from_file(option.name, job.layout).layers
    return layer_plans(option, job)


def _reason(answer: Answer) -> str:
    text = reason(answer.found)
    if answer.option is not answer.found.choice:
        return f"{answer.option.name}, as asked for: {format_time(answer.option.step_s)} per step. The choice: {text}"
    return text


def _switch_lines(answer: Answer) -> list[str]:
    lines = []
    tokens = answer.job.work.tokens_per_worker_per_step
    for switch in answer.switches:
        if switch.what == "tokens":
            at = f"{tokens * switch.factor:,.0f} tokens per worker and step"
        else:
            at = f"{switch.factor:.3g} times the bandwidth"
        lines.append(f"{'From' if switch.factor > 1 else 'Down from'} {at} the answer is {switch.name}.")
    if answer.job.layout.dcs > SWITCH_DCS_MOST:
        return []
    return lines or ["No bandwidth or number of tokens within 256 times of these changes the answer."]


def _print(console: Console, answer: Answer) -> None:
    if answer.played is not None:
        console.print(_split_table(answer, answer.played))
    console.print(_plans_table(answer))
    lines = [_reason(answer), _copies(answer)]
    if answer.rungs:
        each = ", ".join(f"{name} {format_time(seconds)}" for name, seconds in answer.rungs.items())
        lines.append(f"Step with the best plan of each codec: {each}.")
    if answer.played is None:
        parts = ", ".join(f"{part} {format_time(seconds)}" for part, seconds in answer.option.parts.items())
        lines.append(f"The last DC's step: {parts}.")
    else:
        bottleneck = answer.played.bottleneck()
        lines.append("The step never waits for a link." if bottleneck is None else f"Bottleneck: link {bottleneck}.")
    if answer.job.layout.dcs > 1:
        lines += _switch_lines(answer)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _copies(answer: Answer) -> str:
    """What the plan is, in few words."""
    layers, names = answer.option.layers, answer.job.topology.dc_names
    held = [(layer.held & (layer.spread.home != np.arange(len(names))[:, None])).sum(1) for layer in layers]
    per_dc = np.array(held).mean(0)
    text = ", ".join(f"{name} {count:.4g}" for name, count in list(zip(names, per_dc, strict=True))[:_SHOWN])
    used = sum(int(each.any()) for each in held)
    more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more DCs"
    return f"Experts of other DCs that each holds, per layer: {text}{more}; in {used} of {len(layers)} layers."


def _split_table(answer: Answer, played: Timeline) -> Table:
    table = Table(
        title=f"{answer.title} on {answer.job.topology.cluster}: {format_time(played.step_s)} a step",
        caption="waits for tokens, experts, gradients and dense sums; others: until the last DC is done",
        padding=(0, 0),
    )
    for column in ("DC", *_COLUMNS):
        table.add_column(column, justify="left" if column == "DC" else "right", no_wrap=True)
    for name, split in zip(played.names, played.parts(), strict=True):
        table.add_row(name, *(format_time(split[part]) for part in _COLUMNS))
    return table


def _plans_table(answer: Answer) -> Table:
    found, choice = answer.found, answer.found.choice
    table = Table(title=f"{found.weighed} plans weighed", padding=(0, 0))
    for column in ("plan", "step", "copies", "why it lost"):
        table.add_column(
            column, justify="right" if column in ("step", "copies") else "left", no_wrap=column != "why it lost"
        )
    rows = [choice, *(option for option in found.named if option is not choice)]
    for option in rows[: _SHOWN + 1]:
        why = "chosen" if option is choice else why_lost(option, choice)
        table.add_row(option.name, format_time(option.step_s), format_size(option.copy_bytes), why)
    if answer.option is not choice:
        why = why_lost(answer.option, choice)
        table.add_row("as asked for", format_time(answer.option.step_s), format_size(answer.option.copy_bytes), why)
    return table


def _as_json(answer: Answer) -> dict[str, Any]:
    played, choice = answer.played, answer.found.choice
    return {
        "model": "runtime",
        "workload": answer.title,
        "choice": choice.name,
        "reason": _reason(answer),
        "step_s": answer.option.step_s,
        "parts_s": None if played is None else dict(zip(played.names, played.parts(), strict=True)),
        "bottleneck": None if played is None else played.bottleneck(),
        "critical_s": None if played is None else played.critical_seconds(),
        "copy_bytes_per_worker": answer.option.copy_bytes,
        "weighed": answer.found.weighed,
        "codecs_s": answer.rungs,
        "candidates": [
            {
                "plan": option.name,
                "step_s": option.step_s,
                "parts_s": option.parts,
                "copy_bytes_per_worker": option.copy_bytes,
                "fits": option.fits,
                "why": "chosen" if option is choice else why_lost(option, choice),
            }
            for option in answer.found.named
        ],
        "switches": [{"what": switch.what, "factor": switch.factor, "plan": switch.name} for switch in answer.switches],
    }


def _draw(answer: Answer, path: str) -> None:
    try:
        from launcher.plan_plot import draw
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: pip install 'hybridep[plot]'") from None
    draw(answer.title, answer.job, answer.found, answer.played, path)


def _print_paper(title: str, job: Job, *, as_json: bool, output: str | None) -> None:
    plans = paper_plans(job)
    best = plans[0]
    if output is not None:
        spec = parse_plan_spec("domains:" + ",".join(map(str, best.sizes)))
        layers = tuple(make_layer(spec, job.layout, s.num_experts, job.topology.scaling) for s in job.work.layers)
        to_file(Plan(0, job.layout, layers, f"{_paper_name(job, best)}, by the paper's model"), output)
    if as_json:
        rows = [
            {
                "plan": _paper_name(job, plan),
                "sizes": list(plan.sizes),
                "layer_s": plan.layer_s,
                "all_gather_s": plan.all_gather_s,
                "all_to_all_s": plan.all_to_all_s,
            }
            for plan in plans
        ]
        click.echo(json.dumps({"model": "paper", "choice": rows[0]["plan"], "candidates": rows}, indent=2))
        return
    table = Table(
        title=f"{title} on {job.topology.cluster}, by the paper's model: one layer's forward",
        caption="no gradient return, no de-duplication, the slowest DC's rate for all",
    )
    for column in ("plan", "layer", "all-gather", "one all-to-all"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for plan in plans[: 2 * _SHOWN]:
        row = map(format_time, (plan.layer_s, plan.all_gather_s, plan.all_to_all_s))
        table.add_row(_paper_name(job, plan) + (" *" if plan is best else ""), *row)
    Console().print(table)


def _paper_name(job: Job, plan: PaperPlan) -> str:
    return size_name(plan.sizes, job.topology)
