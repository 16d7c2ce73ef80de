"""The face of the runtime inside a training loop: one Runtime per worker process."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import EXACT, Rung, parse_rung
from hybridep_rt.codecs.shared import SharedResidual
from hybridep_rt.codecs.update import Step
from hybridep_rt.errors import ConfigError, HybridEPError
from hybridep_rt.metrics import CodecFigures, Metrics
from hybridep_rt.planner.comparison import StepWatch, described, deviations
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.plan import Layout, Plan, check_successor
from hybridep_rt.planner.plan_file import dump, parse_plan
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.adamw import AdamW
from hybridep_rt.runtime.agreement import agree, describe_model, digest
from hybridep_rt.runtime.background import Background
from hybridep_rt.runtime.clock import Clock
from hybridep_rt.runtime.codec_watch import CodecWatch
from hybridep_rt.runtime.collectives import Collectives
from hybridep_rt.runtime.compiled import compile_kernels
from hybridep_rt.runtime.emulated import EmulatedCompute
from hybridep_rt.runtime.gradients import DenseGradients, all_finite
from hybridep_rt.runtime.hybrid_layer import HybridLayer
from hybridep_rt.runtime.mailbox import Mailbox
from hybridep_rt.runtime.ownership import Ownership
from hybridep_rt.runtime.planning import Load, PlanSource
from hybridep_rt.runtime.proposal import shared_plan
from hybridep_rt.runtime.routing_sample import RoutingSample
from hybridep_rt.runtime.tracing import gather
from hybridep_rt.transport.ports import SiteGroup, WanPort
from topology.units import format_size

_LOG = logging.getLogger("hybridep_rt")
FIGURES_EVERY = 100
"""Optimizer steps between two looks at what codecs do to copies."""


@dataclass
class Runtime:
    """One worker of a job. Made by `hybridep_rt.init()`; tests build it from in-memory ports.

    `make_site` is called once, when tensors have to move inside the DC for the first time. `staleness` 1: a forward
    computes with copies of one optimizer step before, so that their transfer hides behind a whole step.
    """

    address: Address
    layout: Layout
    dc_names: tuple[str, ...]
    make_site: Callable[[], SiteGroup]
    wan: WanPort
    plans: PlanSource
    topology_digest: str = ""
    rung: Rung = EXACT
    chunks: int = 1
    staleness: int = 0
    trace_path: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    emulated: EmulatedCompute | None = None

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ConfigError(f"chunks must be at least 1, not {self.chunks}")
        if self.staleness not in (0, 1):
            raise ConfigError(f"staleness is 0 or 1, not {self.staleness}")
        self.clock = Clock()
        self.background = Background()
        self.trace = self.metrics.trace
        self._began_ns = time.monotonic_ns()
        self._step_began_ns = self._began_ns
        self.plan: Plan | None = None
        self._ownership: Ownership | None = None
        self.shapes: list[LayerShape] = []
        self.load = Load()
        self.routing_sample: RoutingSample | None = None
        self.after_step: list[Callable[[], None]] = []
        """Called at the end of every optimizer step, by all workers alike."""
        self.found_nonfinite = False
        self._site: SiteGroup | None = None
        self._collectives: Collectives | None = None
        self._layers: list[HybridLayer] = []
        self._dense: list[nn.Parameter] = []
        self._dense_gradients = DenseGradients((), self.codecs.dense)
        self._codecs_in_use = self.codecs
        self._takes_moments = False
        self._watch: CodecWatch | None = None
        self._synchronise = True
        self._finish_queued = False
        self._step_watch: StepWatch | None = None
        self._closed = False

    @property
    def rank(self) -> int:
        """Global number of this worker."""
        return self.layout.number(*self.address)

    @property
    def world_size(self) -> int:
        """Workers of all DCs."""
        return self.layout.workers

    @property
    def dc(self) -> str:
        """Name of this worker's DC."""
        return self.dc_names[self.address.dc]

    @property
    def local_rank(self) -> int:
        """Local index of this worker in its DC."""
        return self.address.worker

    @property
    def site_size(self) -> int:
        """Workers of this DC."""
        return self.layout.workers_per_dc[self.address.dc]

    @property
    def codecs(self) -> Codecs:
        """The rung's codecs that are due at this step."""
        return self.rung.codecs_at(self.clock.step)

    @property
    def site(self) -> SiteGroup:
        """The workers of this DC. Made on first use, which all of them have to reach."""
        if self._site is None:
            self._site = self.make_site()
        return self._site

    def register(self, layer: HybridLayer, num_experts: int) -> tuple[int, tuple[int, ...]]:
        """Announce a MoE layer, in the order of construction: its number and the home of each expert."""
        if self.plan is not None:
            raise ConfigError("a MoELayer was made after attach(): build the whole model first")
        self._layers.append(layer)
        number = len(self._layers) - 1
        return number, self.plans.homes(number, num_experts)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        tokens_per_step: int | None = None,
        micro_batches: int = 1,
    ) -> Plan:
        """Make `model` and `optimizer` train over all workers; returns the plan.

        Every worker calls it once, after the model is built and moved to its device. Dense parameters and buffers
        become those of worker 0 of the first DC; digests of model, plan, codecs and topology are compared everywhere.
        `tokens_per_step`: tokens of one worker in one optimizer step, all `micro_batches` together, which `plan auto`
        needs.

        Raises ConfigError naming what differs, PlanError, DeadlineExceeded, PeerLost.
        """
        if self.plan is not None:
            raise ConfigError("attach() was called twice")
        shapes = self.shapes = [layer.shape for layer in self._layers]
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self._takes_moments = isinstance(optimizer, AdamW)
        self.rung = self._fitting(self.rung)
        self._codecs_in_use = self.codecs
        compile_kernels(self.rung.specs, with_adamw=isinstance(optimizer, AdamW))
        experts = {id(p) for layer in self._layers for p in layer.expert_parameters()}
        self._dense = [p for p in model.parameters() if id(p) not in experts and p.requires_grad]
        self._dense_gradients = DenseGradients(self._dense, self.codecs.dense)
        dense = sum(p.numel() for p in self._dense)
        load = self.load = Load(tokens_per_step, micro_batches, dtype, self.rung, self._device, dense)
        at = self.clock.collective(Phase.ATTACH)
        self.plan, terms = shared_plan(self.plans, shapes, load, self.address, self.layout, self.wan, at)
        facts = {
            "topology": self.topology_digest,
            "model": describe_model(model, experts, shapes),
            "plan": digest(self.plan),
            "codecs": repr(self.rung),
            "token chunks": str(self.chunks),
            "staleness": str(self.staleness),
            "emulated compute": "none" if self.emulated is None else f"{self.emulated.flops_per_s} FLOP/s",
        }
        agree(facts, self.address, self.layout, self.dc_names, self.wan, self.clock.collective(Phase.ATTACH))
        for layer, layer_plan in zip(self._layers, self.plan.layers, strict=True):
            layer.bind(layer_plan)
        self._ownership = Ownership(model, optimizer)
        self._broadcast_dense(model, experts)
        for parameter in self._dense:
            parameter.register_post_accumulate_grad_hook(self._queue_finish)
        optimizer.register_step_pre_hook(self._before_step)
        if isinstance(optimizer, AdamW):
            optimizer.publish_with(self._publish_step)
        optimizer.register_step_post_hook(self._after_step)
        self.publish()
        memory = self._largest_memory()
        if self.rank == 0:
            _LOG.info("plan: %s", "\n".join((self.plan.reason, *terms, memory)))
            self._watch_steps(self.plan)
            if self.emulated is not None:
                _LOG.info(
                    "compute is emulated at %g FLOP/s: times are those of such a machine", self.emulated.flops_per_s
                )
        return self.plan

    def switch(self, plan: Plan) -> None:
        """Go on under another plan: of the same layers, with an epoch one higher.

        Every worker calls it, between `optimizer.step()` and the next forward. Copies that both plans have go on; new
        ones get weights, others are freed. An expert whose home changes leaves this model and its optimizer here, and
        joins them there with its moments; its `.grad` is None, as after `zero_grad()`. Gradients that lossy codecs
        still owe are part of the next sum.

        Raises ConfigError naming what differs between workers, PlanError, DeadlineExceeded, PeerLost.
        """
        current, ownership = self._attached
        facts = {
            "plan": digest((plan.epoch, plan.layout, plan.layers)),
            "optimizer": ownership.describe(),
            "optimizer steps": str(self.clock.step),
        }
        agree(facts, self.address, self.layout, self.dc_names, self.wan, self.clock.collective(Phase.SWITCH))
        check_successor(current, plan)
        self.settle()
        at = Position(self.clock.step, plan.epoch, -1, Phase.SWITCH)
        for layer, layer_plan in zip(self._layers, plan.layers, strict=True):
            layer.hand_over(layer_plan, at, ownership)
        for layer in self._layers:
            layer.take_over(at, ownership)
        for layer in self._layers:
            layer.catch_up(at)
        self.plan = plan
        if self.rank == 0:
            _LOG.info("plan from step %d on: %s", self.clock.step, plan.reason)
            self._watch_steps(plan)

    def settle(self) -> None:
        """Wait for weights that are on their way. Every worker calls it, between two steps.

        Raises ConfigError where a backward pass is not followed by its optimizer step yet.
        """
        for layer in self._layers:
            layer.settle()

    def state_dict(self) -> dict[str, Any]:
        """All that this worker needs to go on where it is, between two steps: each worker saves its own.

        Model, optimizer, plan, step, and what lossy codecs remember; tensors, numbers and text, so that
        `torch.load(..., weights_only=True)` reads it. As in torch, tensors are not copied. Raises ConfigError for
        weights in `sr`, whose mean is not kept.
        """
        plan, ownership = self._attached
        if self.rung.codecs.weights.partition(":")[0] == SharedResidual.NAME:
            raise ConfigError("a run with weights in sr can't be saved: its layers' means are not kept")
        return {
            "plan": dump(plan, as_json=True),
            "codecs": repr(self.rung),
            "step": self.clock.step,
            "layers": [layer.state() for layer in self._layers],
            "dense": self._dense_gradients.state(),
            **ownership.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, bit for bit: after `attach`, every worker with what it saved.

        Goes over to the plan of that time first, and sends all copies at last. Raises ConfigError, PlanError where the
        job has other codecs, workers or layers than then.
        """
        plan = parse_plan(state["plan"], "the plan of the checkpoint", self.layout)
        if state["codecs"] != repr(self.rung):
            raise ConfigError(f"the checkpoint is of a run with {state['codecs']}, this one has {self.rung!r}")
        current, ownership = self._attached
        self.switch(replace(plan, epoch=current.epoch + 1))
        self.clock.step = state["step"]
        # Codecs that this step is due begin with the next version: their state can be loaded when that is over.
        self._use_codecs(self.codecs)
        self.publish()
        self.settle()
        ownership.load_state(state)
        self._dense_gradients.load_state(state["dense"])
        at = self.clock.collective(Phase.SWITCH)
        for layer, layer_state in zip(self._layers, state["layers"], strict=True):
            layer.load_state(layer_state, at)
        for layer in self._layers:
            layer.catch_up(at)

    def publish(self) -> None:
        """Send all experts to their subscribers again: after weights were changed by anything but the optimizer.

        Every worker has to call it.
        """
        for layer in self._layers:
            layer.publish()

    def set_codec(self, text: str) -> None:
        """Another rung, such as "safe" or "default,gradients=2bit", from the next transfer on: see `parse_rung`.

        Every worker calls it with the same words between two steps. Streams whose codec changes begin anew, weights
        with a key frame; what gradients' error feedback still owes is added to the next ones.

        Raises ConfigError for a rung that doesn't exist, or that other workers don't ask for.
        """
        self._change_rung(self._fitting(parse_rung(text)))

    def _change_rung(self, rung: Rung) -> None:
        position = self.clock.collective(Phase.ATTACH)
        agree({"codecs": repr(rung)}, self.address, self.layout, self.dc_names, self.wan, position)
        self.rung = rung
        self._use_codecs(self.codecs)
        self.load = replace(self.load, rung=rung)
        if self._step_watch is not None and self.plan is not None:
            self._watch_steps(self.plan)

    def memory(self) -> dict[str, int]:
        """Bytes that this worker needs for copies, replicas of others' copies, feedback and what comes back to homes.

        Each as much as the rung's warm-up needs, or the steps after it.
        """
        parts = [self._memory_in(codecs) for codecs in (self.rung.codecs_at(0), self.rung.codecs)]
        return {name: max(part[name] for part in parts) for name in parts[-1]}

    def _memory_in(self, codecs: Codecs) -> Counter[str]:
        total = Counter[str]()
        for layer in self._layers:
            total.update(layer.memory(codecs))
        total["feedback"] += self._dense_gradients.memory(codecs.dense, self.site_size)
        return total

    def codec_figures(self) -> dict[int, CodecFigures]:
        """What codecs did to this worker's experts, by layer; -1 has what dense sums owe. Also kept in `metrics`."""
        figures = {number: layer.codec_figures() for number, layer in enumerate(self._layers)}
        figures[-1] = CodecFigures(0.0, self._dense_gradients.owed_norm())
        self.metrics.coded(figures)
        return figures

    @contextlib.contextmanager
    def exact_copies(self) -> Iterator[None]:
        """Inside, every copy has its home's exact weights, so that you see what coded copies cost; under no_grad.

        All workers enter it between two steps. Costs a transfer of all copies.
        """
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.exact_copies(self.clock.collective(Phase.EXPERTS)))
            yield

    def watch_codec(
        self, loss: Callable[[], torch.Tensor | float], *, every: int = 500, tolerance: float = 0.01
    ) -> None:
        """After every so many steps compare `loss()`, on a small batch, with copies and with exact weights.

        Where copies cost more than `tolerance` in the mean over all workers, the next more faithful rung is used. Every
        worker calls it alike.
        """
        self._watch = CodecWatch(loss, every, tolerance)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward() only accumulates: for all micro-batches of a step but the last."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def after_layer_backward(self, layer: HybridLayer) -> None:
        """A layer's backward pass has run: its copies' gradients are ready to leave."""
        if self._synchronise:
            layer.return_gradients(self.clock.step)
        self._queue_finish()

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """A new tensor with the "sum", "mean" or "max" of `values` over all workers of all DCs; all must call it.

        Raises ConfigError for another `op`.
        """
        if op not in ("sum", "mean", "max"):
            raise ConfigError(f'all_reduce knows "sum", "mean" and "max", not "{op}"')
        combine = torch.maximum if op == "max" else torch.add
        flat = values.detach().reshape(-1).contiguous()
        total = self.collectives.all_reduce(flat, self.clock.collective(), combine, traffic=Traffic.CONTROL)
        return (total / self.world_size if op == "mean" else total).view_as(values)

    def barrier(self) -> None:
        """Return once every worker of every DC has called it."""
        position = self.clock.collective(Phase.BARRIER)
        self.collectives.all_reduce(torch.zeros(self.world_size), position, traffic=Traffic.CONTROL)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their 2-norm over the whole model is at most `max_norm`; returns the norm.

        Dense gradients, which are the same everywhere, and each expert's at its home count once.
        """
        experts = [p for layer in self._layers for p in layer.expert_parameters() if p.grad is not None]
        dense = [p for p in self._dense if p.grad is not None]
        device = self._device
        squares = sum((_square(p) for p in experts), torch.zeros((), dtype=torch.float64, device=device))
        total = self.all_reduce(squares.reshape(1))[0] + sum(map(_square, dense))
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in (*dense, *experts):
            assert parameter.grad is not None
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def kernel(self, module: nn.Module, x: torch.Tensor, flops: float) -> torch.Tensor:
        """`module(x)`; where compute is emulated, `x` after the time of `flops` floating-point operations.

        For parts of a model that keep the shape of their input, so that emulated runs take their time too.
        """
        if self.emulated is None:
            result: torch.Tensor = module(x)
            return result
        return self.emulated.kernel(x, flops, list(module.parameters()))

    def mailbox(self, channel: str) -> Mailbox:
        """Messages of your own between any two workers of any DCs."""
        return Mailbox(channel, self.wan, self.layout, self.dc_names)

    def shutdown(self) -> None:
        """Say goodbye in good order. Idempotent; called at exit if the program didn't."""
        if self._closed:
            return
        self._closed = True
        self.background.close()
        if self.trace.is_on:
            with contextlib.suppress(HybridEPError):
                gather(self.trace, self.trace_path, self.address, self.layout, self.dc_names, self.wan)
        self.wan.close()
        if self._site is not None:
            self._site.close()

    def fail(self, reason: str) -> None:
        """This worker can't go on: tell all others why, in one line. Waits at most a second."""
        if not self._closed:
            self._closed = True
            self.background.close()
            self.wan.fail(reason)

    @property
    def collectives(self) -> Collectives:
        """Sums over all workers, at positions of one's own."""
        if self._collectives is None:
            self._collectives = Collectives(self.address, self.layout, self.site, self.wan)
        return self._collectives

    @property
    def _attached(self) -> tuple[Plan, Ownership]:
        if self.plan is None or self._ownership is None:
            raise ConfigError("call runtime.attach(model, optimizer) first")
        return self.plan, self._ownership

    @property
    def _device(self) -> torch.device:
        return self._dense[0].device if self._dense else torch.device("cpu")

    def _broadcast_dense(self, model: nn.Module, experts: set[int]) -> None:
        tensors = [p for p in model.parameters() if id(p) not in experts] + list(model.buffers())
        with torch.no_grad():
            for tensor in tensors:
                flat = self.collectives.broadcast(tensor.detach().reshape(-1), self.clock.collective(Phase.ATTACH))
                tensor.copy_(flat.view_as(tensor))

    def _queue_finish(self, *_: Any) -> None:
        """Have `_finish_backward` called when the backward pass that is running now ends."""
        if self._finish_queued or not self._synchronise:
            return
        self._finish_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        """Make every gradient final: returned by the copies, summed over all workers, divided by their number."""
        with self.trace.span("compute", "end of backward"):
            self._finish_gradients()

    def _finish_gradients(self) -> None:
        self._finish_queued = False
        for layer in self._layers:
            layer.return_gradients(self.clock.step)
        for layer in self._layers:
            layer.collect(self.clock.step, self.world_size)
        experts = [p for layer in self._layers for p in layer.expert_parameters()]
        finite = all_finite(experts) and all_finite(self._dense)
        position = self.clock.collective()
        self.found_nonfinite = self._dense_gradients.average(
            self.collectives, position, self.world_size, flag=not finite
        )
        if self.found_nonfinite and all_finite(experts) and all_finite(self._dense):
            self._poison()

    def _poison(self) -> None:
        """Another worker's expert has a gradient that isn't finite: let this worker's loop skip the step too."""
        for parameter in (*self._dense, *(p for layer in self._layers for p in layer.expert_parameters())):
            if parameter.grad is not None and parameter.grad.numel():
                parameter.grad.view(-1)[0] = float("inf")
                return

    def _fitting(self, rung: Rung) -> Rung:
        """The rung, with 2 bits for gradients of 1 where the optimizer would divide by what 1 bit tells of them."""
        fitting = rung if self._takes_moments else rung.without_moments()
        if fitting != rung and self.rank == 0:
            _LOG.warning(
                "gradients are sent in %s, not %s, which needs hybridep_rt.AdamW",
                fitting.codecs.gradients,
                rung.codecs.gradients,
            )
        return fitting

    def _use_codecs(self, codecs: Codecs) -> None:
        """Change to these codecs, if they are others than those in use."""
        if codecs == self._codecs_in_use:
            return
        self._codecs_in_use = codecs
        for layer in self._layers:
            layer.change_codecs(codecs)
        self._dense_gradients.change(codecs.dense)

    def _before_step(self, *_: Any) -> None:
        """What is published at the end of this step has the codecs of the next."""
        self._step_began_ns = time.monotonic_ns()
        self._use_codecs(self.rung.codecs_at(self.clock.step + 1))

    def _publish_step(self, step: Step | None) -> None:
        for layer in self._layers:
            layer.publish(step, lag=self.staleness)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.clock.stepped()
        if not isinstance(optimizer, AdamW):
            self._publish_step(None)
        now_ns = time.monotonic_ns()
        self.trace.add("compute", "optimizer", self._step_began_ns, now_ns)
        self.trace.add("compute", f"step {self.clock.step - 1}", self._began_ns, now_ns)
        self._began_ns = now_ns
        if self._step_watch is not None and self.clock.step > self.rung.warm_up_steps:
            self._compare(self._step_watch)
        if self.clock.step % FIGURES_EVERY == 0:
            self._log_figures()
        if self._watch is not None and self._watch.is_due(self.clock.step, self.rung):
            self._judge_codec(self._watch)
        for call in self.after_step:
            call()

    def _watch_steps(self, plan: Plan) -> None:
        """From now on compare steps with what is predicted for this plan, where that is known."""
        predicted = self.plans.predicted(self.shapes, self.load, plan, self.address.dc)
        self._step_watch = None if predicted is None else StepWatch(predicted)

    def _compare(self, watch: StepWatch) -> None:
        """Measured against predicted, at the first worker, every so often."""
        measured = watch.stepped(time.monotonic(), self.metrics.snapshot().waited_s)
        if measured is None:
            return
        _LOG.info("step %d: %s", self.clock.step, described(watch.predicted, measured))
        for line in deviations(watch.predicted, measured):
            _LOG.warning("step %d: the plan's prediction is off; %s", self.clock.step, line)

    def _largest_memory(self) -> str:
        """Each part where it is largest, so that the sum is the most that any worker can need."""
        names = ("copies", "replicas", "feedback", "returns")
        held = self.memory()
        most = self.all_reduce(torch.tensor([float(held.get(name, 0)) for name in names], dtype=torch.float64), "max")
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in zip(names, most.tolist(), strict=True))
        return f"memory for copies, at most per worker: {parts}"

    def _log_figures(self) -> None:
        figures = self.codec_figures()
        if self.rank == 0 and self.codecs != Codecs():
            worst = max(figures, key=lambda layer: figures[layer].copy_error)
            owed = math.hypot(*(each.owed_norm for each in figures.values()))
            _LOG.info(
                "step %d: copies are at most %.2g of their weights off (layer %d); error feedback owes %.2g",
                self.clock.step,
                figures[worst].copy_error,
                worst,
                owed,
            )

    def _judge_codec(self, watch: CodecWatch) -> None:
        with torch.no_grad():
            coded = float(watch.loss())
        with self.exact_copies():
            exact = float(watch.loss())
        cost = float(self.all_reduce(torch.tensor([coded - exact], dtype=torch.float64), "mean"))
        rung = watch.verdict(cost, self.rung)
        if self.rank == 0:
            said = "" if rung == self.rung else f", more than {watch.tolerance:.3g}: from now on rung {rung.name}"
            _LOG.info("step %d: coded copies cost %.3g of loss%s", self.clock.step, cost, said)
        if rung != self.rung:
            self._change_rung(self._fitting(rung))


def _square(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().to(torch.float64).square().sum()
