"""One worker of a job that predicts its steps under several plans, and takes them; `benchmarks.prediction` starts it.

hybridep run CASE.yaml --plan ep -- -m benchmarks.prediction_worker --case NUMBER --rounds 3 --steps 3 --out FILE

The job calibrates itself, the first worker predicts, and only then all plans take steps in turns: each is a model and a
Runtime of its own over the same links.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import hybridep_rt
from benchmarks.intervals import schedule
from benchmarks.prediction_cases import CASES, MATRICES, Case
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.moe.router import Router
from hybridep_rt.moe.site_figures import Load
from hybridep_rt.planner import routing
from hybridep_rt.planner.calibration import Calibration, measured_compute, usable
from hybridep_rt.planner.calibration_file import dump_calibration
from hybridep_rt.planner.choice import layer_plans, settled
from hybridep_rt.planner.comparison import COMPONENTS, measured_parts, predicted_parts
from hybridep_rt.planner.economics import Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.plan import Plan
from hybridep_rt.planner.plan_file import dump, parse_plan
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import Routing
from hybridep_rt.planner.search import Option, search
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message, Payload, Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.planning import FixedPlan
from hybridep_rt.runtime.session import Runtime
from hybridep_rt.simulate.scenario import Codec, Scenario, simulate
from hybridep_rt.transport.ports import WanPort
from launcher.calibrate_worker import calibrated
from topology import Topology, load

BYTES = 4.0
"""Of every value on the wire: codecs are exact, so that plans differ by what they send."""
BUDGET_BYTES = 60e6
SPECS = [("tokens", "exact"), ("weights", "exact"), ("gradients", "exact")]
COUNTED = (Traffic.TOKENS, Traffic.EXPERTS, Traffic.GRADIENTS)


class Apart:
    """A port whose channels are those of one arm only."""

    def __init__(self, wan: WanPort, arm: str) -> None:
        self.address = wan.address
        self._wan = wan
        self._arm = arm

    def send(
        self,
        to: Address,
        channel: str,
        position: Position,
        payload: Payload,
        *,
        traffic: Traffic,
        counts: Sequence[int] = (),
        urgency: int = 0,
    ) -> None:
        """As the port."""
        self._wan.send(to, f"{self._arm}/{channel}", position, payload, traffic=traffic, counts=counts, urgency=urgency)

    def receive(self, source: Address, channel: str, position: Position, *, timeout_s: float | None = None) -> Message:
        """As the port."""
        return self._wan.receive(source, f"{self._arm}/{channel}", position, timeout_s=timeout_s)

    def take(self, source: Address, channel: str, position: Position) -> Message | None:
        """As the port."""
        return self._wan.take(source, f"{self._arm}/{channel}", position)

    def watch(self, channel: str, notify: Callable[[], None]) -> None:
        """As the port."""
        self._wan.watch(f"{self._arm}/{channel}", notify)

    def check(self) -> None:
        """As the port."""
        self._wan.check()

    def expect(self, peers: Iterable[Address], position: Position) -> None:
        """As the port."""
        self._wan.expect(peers, position)

    def fail(self, reason: str) -> None:
        """As the port."""
        self._wan.fail(reason)

    def close(self) -> None:
        """Nothing: the port is everybody's."""


class DrawnRouter(Router):
    """Chooses what was drawn, whatever the tokens are; all gate weights are equal."""

    def __init__(self, case: Case, drawn_TK: torch.Tensor) -> None:
        super().__init__(case.hidden, case.experts, case.top_k, renormalise=True, seed=0)
        self._drawn_TK = drawn_TK

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As a Router, with no losses."""
        weight_TK = torch.full(self._drawn_TK.shape, 1 / self.top_k) + 0 * self.weight.sum()
        nothing = torch.zeros(())
        return self._drawn_TK, weight_TK, nothing, nothing


class Model(nn.Module):
    """Layers of a dense matrix and a MoE layer, both with residuals."""

    def __init__(self, case: Case, runtime: Runtime, drawn_TK: torch.Tensor) -> None:
        super().__init__()
        self._runtime = runtime
        self.dense = nn.ModuleList(nn.Linear(case.hidden, case.hidden, bias=False) for _ in range(case.layers))
        self.moe = nn.ModuleList(
            MoELayer(case.hidden, case.ffn, case.experts, case.top_k, runtime=runtime, expert="gelu")
            for _ in range(case.layers)
        )
        for layer in self.moe:
            layer.router = DrawnRouter(case, drawn_TK)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """[T,H] -> [T,H]"""
        for dense, moe in zip(self.dense, self.moe, strict=True):
            h = h + self._runtime.kernel(dense, h, 2.0 * h.numel() * h.shape[1])
            h = h + moe(h)
        return h


class Arm:
    """One plan's model in training."""

    def __init__(self, case: Case, whole: Runtime, name: str, plan: Plan, drawn_TK: torch.Tensor) -> None:
        self.name = name
        self.runtime = Runtime(
            address=whole.address,
            layout=whole.layout,
            dc_names=whole.dc_names,
            make_site=lambda: whole.site,
            wan=Apart(whole.wan, name),
            plans=FixedPlan(plan),
            rung=whole.rung,
            chunks=case.chunks,
            metrics=whole.metrics,
            emulated=whole.emulated,
        )
        torch.manual_seed(0)
        self._model = Model(case, self.runtime, drawn_TK)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._micro_batches = case.micro_batches
        self._x = torch.randn(len(drawn_TK), case.hidden)
        self.runtime.attach(self._model, self._optimizer, tokens_per_step=case.tokens)

    def steps(self, count: int) -> tuple[list[float], dict[str, float], float]:
        """Seconds of each of `count` steps after one more, seconds of one by component, WAN bytes of one from here."""
        self.runtime.barrier()
        self._step()
        before, marks = self.runtime.metrics.snapshot(), [time.perf_counter()]
        for _ in range(count):
            self._step()
            marks.append(time.perf_counter())
        found = self.runtime.metrics.snapshot().minus(before)
        with torch.no_grad():
            self._model(self._x)  # takes the weights of the last step, which would come in another arm's time
        self.runtime.barrier()
        step_s = (marks[-1] - marks[0]) / count
        prefix = f"{self.name}/"
        waits = {
            (layer, dc, channel.removeprefix(prefix)): seconds / count
            for (layer, dc, channel), seconds in found.waited_s.items()
        }
        here = self.runtime.address.dc
        sent = sum(n for (dc, kind), n in found.sent_bytes.items() if dc != here and kind in COUNTED)
        return [b - a for a, b in pairwise(marks)], measured_parts(step_s, waits), sent / count

    def _step(self) -> None:
        self._optimizer.zero_grad()
        for number in range(self._micro_batches):
            if number < self._micro_batches - 1:
                with self.runtime.no_sync():
                    self._model(self._x).square().mean().backward()
            else:
                self._model(self._x).square().mean().backward()
        self._optimizer.step()


@dataclass(frozen=True, slots=True)
class Predicted:
    """One plan: `parts_s` of the first DC, `simulated_s` where the simulator knows such sites."""

    name: str
    plan: Plan
    step_s: float
    parts_s: dict[str, float]
    sent_bytes: float
    simulated_s: float | None
    chosen: bool


def predict(case: Case, topology: Topology, found: Calibration, drawn: Routing) -> list[Predicted]:
    """Plain EP, every domain size, all copies, and the choice."""
    dense = case.layers * (case.hidden**2 + case.experts * case.hidden)
    compute = measured_compute(Compute(dense_parameters=float(dense), dense_bytes=BYTES), found, topology, dict(SPECS))
    work = Workload((case.shape,) * case.layers, case.tokens, BYTES, BYTES, BYTES, case.micro_batches, case.chunks)
    job = Job(usable(topology, found), work, (drawn,), compute)
    predictor = Predictor(job)
    searched = search(predictor)
    chosen = settled(searched)
    named = [option for option in searched.named if option.name == "ep" or option.name.startswith(("domains", "repl"))]
    return [
        _predicted(case, predictor, option, option is chosen)
        for option in [*named, *([] if chosen in named else [chosen])]
    ]


def _predicted(case: Case, predictor: Predictor, option: Option, chosen: bool) -> Predicted:
    job = predictor.job
    outcome = predictor.predict([option.layers])
    sent = sum(float(each[0].sum()) for each in outcome.sent_bytes.values())
    dense = 2 * (job.layout.dcs - 1) * job.compute.dense_parameters * job.compute.dense_bytes
    plan = Plan(0, job.layout, layer_plans(option, job), option.name)
    return Predicted(
        option.name,
        plan,
        option.step_s,
        predicted_parts(outcome, 0),
        sent + dense,
        _simulated_s(case, job, option.name),
        chosen,
    )


def _simulated_s(case: Case, job: Job, name: str) -> float | None:
    """By `hybridep simulate`'s model of DCs that are alike, under uniform routing."""
    if not case.is_even or case.routing != "uniform" or case.micro_batches > 1 or "," in name or name == "searched":
        return None
    dcs = len(case.workers)
    bandwidth, rtt_s = job.topology.links[0, 1].bandwidth_bytes_per_s, job.topology.links[0, 1].rtt_s
    scenario = Scenario(
        case.shape,
        case.layers,
        dcs,
        case.workers[0],
        bandwidth,
        rtt_s,
        case.tokens,
        Codec("exact", BYTES, BYTES, BYTES),
        job.compute,
        token_chunks=case.chunks,
        inside_bandwidth=job.inside_rate[0],
    )
    return simulate(scenario, name).step_s if name.startswith(("ep", "domains:", "replicate")) else None


def run_case(case: Case, rounds: int, steps: int) -> dict[str, Any] | None:
    """All of it; the result is the first worker's."""
    runtime = hybridep_rt.init()
    topology = load(os.environ["HYBRIDEP_TOPOLOGY"])
    tokens = case.tokens // case.micro_batches
    drawn = routing.parse(case.routing, case.experts, case.top_k, samples=tokens)
    drawn = Routing(drawn.choices[:, :tokens], drawn.source)
    work = Load(case.shape, MATRICES, tokens, 2.0 * case.hidden**2)
    found = calibrated(runtime, topology, case.name, work, SPECS, BUDGET_BYTES, lambda text: None)
    predicted = [] if found is None else predict(case, topology, found, drawn)
    plans = _shared(runtime, predicted)
    drawn_TK = torch.from_numpy(drawn.choices[0])
    arms = {name: Arm(case, runtime, name, plan, drawn_TK) for name, plan in plans.items()}
    taken: dict[str, list[tuple[list[float], dict[str, float], float]]] = {name: [] for name in arms}
    for order in schedule(rounds, list(arms)):
        for name in order:
            taken[name].append(arms[name].steps(steps))
    results = [_measured(runtime, taken[name]) for name in plans]
    runtime.barrier()
    runtime.shutdown()
    if found is None:
        return None
    rows = [
        {
            "plan": each.name,
            "chosen": each.chosen,
            "predicted_s": each.step_s,
            "predicted_parts_s": each.parts_s,
            "predicted_bytes": each.sent_bytes,
            "simulated_s": each.simulated_s,
        }
        | measured
        for each, measured in zip(predicted, results, strict=True)
    ]
    return {"case": case.name, "arms": rows, "calibration": dump_calibration(found)}


def _shared(runtime: Runtime, predicted: list[Predicted]) -> dict[str, Plan]:
    """The first worker's plans, at all workers."""
    box = runtime.mailbox("plans")
    if runtime.rank != 0:
        texts: dict[str, str] = json.loads(bytes(box.receive(0)))
        return {name: parse_plan(text, name, runtime.layout) for name, text in texts.items()}
    content = json.dumps({each.name: dump(each.plan, as_json=True) for each in predicted}).encode()
    for number in range(1, runtime.world_size):
        box.send(number, content)
    return {each.name: each.plan for each in predicted}


def _measured(runtime: Runtime, blocks: list[tuple[list[float], dict[str, float], float]]) -> dict[str, Any]:
    """Steps of the slowest worker, bytes of all together, and the first worker's components."""
    seconds = torch.tensor([s for block in blocks for s in block[0]], dtype=torch.float64)
    sent = torch.tensor([block[2] for block in blocks], dtype=torch.float64)
    slowest = runtime.all_reduce(seconds, "max").tolist()
    total = runtime.all_reduce(sent, "sum").median().item()
    parts = {name: sum(block[1][name] for block in blocks) / len(blocks) for name in COMPONENTS}
    return {"step_s": slowest, "sent_bytes": total, "parts_s": parts}


@click.command()
@click.option("--case", "number", type=click.IntRange(0, len(CASES) - 1), required=True)
@click.option("--rounds", type=click.IntRange(1), required=True)
@click.option("--steps", type=click.IntRange(1), required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(number: int, rounds: int, steps: int, out: Path) -> None:
    """Predict and measure one case; the first worker writes the result."""
    torch.set_num_threads(1)
    found = run_case(CASES[number], rounds, steps)
    if found is not None:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
