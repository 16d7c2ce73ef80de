"""What any distributed run has to equal: the same model as one dense loop in one process. Shares no code with it.

Loss of a job = mean over its workers of the sum over micro-batches of the worker's own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hybridep_rt.moe.layer import MoELayer, aux_loss
from hybridep_rt.planner.plan import Plan
from hybridep_rt.runtime.session import Runtime

HIDDEN, FFN, IN, OUT = 6, 5, 4, 3
Batches = list[list[torch.Tensor]]
"""[worker][micro-batch] -> tokens [T, IN]; T may be 0 and may differ."""


@dataclass(frozen=True)
class Case:
    """One model and training run."""

    num_experts: int
    top_k: int
    layers: int = 1
    expert: str = "swiglu"
    renormalise: bool = True
    steps: int = 3
    micro_tokens: tuple[tuple[int, ...], ...] = ()
    """[worker][micro-batch] -> number of tokens, used at every step."""
    clip: float | None = None
    router_bias: tuple[float, ...] = ()
    """Added to the router's logits through a constant feature: drives tokens to or away from experts."""
    chunks: int = 1
    seed: int = 0

    def batches(self, step: int) -> Batches:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return [
            [torch.randn(tokens, IN, generator=generator, dtype=torch.float64) for tokens in worker]
            for worker in self.micro_tokens
        ]


class Model(nn.Module):
    """Dense in, MoE layers with residuals, dense out."""

    def __init__(self, case: Case, runtime: Runtime) -> None:
        super().__init__()
        self.inward = nn.Linear(IN, HIDDEN)
        self.layers = nn.ModuleList(
            MoELayer(
                HIDDEN,
                FFN,
                case.num_experts,
                case.top_k,
                expert=case.expert,
                renormalise=case.renormalise,
                z_coefficient=0.001,
                runtime=runtime,
            )
            for _ in range(case.layers)
        )
        self.outward = nn.Linear(HIDDEN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inward(x))
        for layer in self.layers:
            h = h + layer(h)
        return self.outward(h)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A worker's loss of one micro-batch; 0 for no tokens."""
    return output.square().sum() / max(len(output), 1)


@dataclass
class Result:
    """Everything compared: outputs and input gradients of the first step, gradients and parameters."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    input_gradients: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    start: dict[str, torch.Tensor] = field(default_factory=dict)


Optimize = Callable[..., torch.optim.Optimizer]


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def train_distributed(
    case: Case,
    runtime: Runtime,
    device: str = "cpu",
    after_step: Callable[[int], None] = lambda step: None,
    switches: Sequence[Plan] = (),
    optimize: Optimize = adamw,
) -> Result:
    """One worker's part, written as a user would, going over to a plan of `switches` after each of the first steps.

    The result is on the CPU.
    """
    torch.manual_seed(runtime.rank)
    model = Model(case, runtime).double().to(device)
    with torch.no_grad():
        for layer in model.layers:
            for e, bias in enumerate(case.router_bias):
                layer.router.weight[e] += bias
    optimizer = optimize(model.parameters())
    runtime.attach(model, optimizer, tokens_per_step=8)
    result = Result(start={name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    for step in range(case.steps):
        optimizer.zero_grad()
        micro_batches = case.batches(step)[runtime.rank]
        for number, x in enumerate(micro_batches):
            x = x.to(device).requires_grad_()
            if number < len(micro_batches) - 1:
                with runtime.no_sync():
                    output = _backward(model, x)
            else:
                output = _backward(model, x)
            if step == 0:
                result.outputs.append(output.cpu())
                result.input_gradients.append(x.grad.cpu())
        if case.clip is not None:
            result.norms.append(runtime.clip_grad_norm_(case.clip).cpu())
        if step == 0:
            result.gradients = {
                n: None if p.grad is None else p.grad.cpu().clone() for n, p in model.named_parameters()
            }
        optimizer.step()
        after_step(step)
        if step < len(switches):
            runtime.switch(switches[step])
    with torch.no_grad():
        result.outputs.append(model(case.batches(case.steps)[runtime.rank][0].to(device)).cpu())
    result.parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return result


def _backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    (loss_of(output) + aux_loss(model)).backward()
    return output.detach()


class DenseModel:
    """The reference: every expert over every token, masked by the gate."""

    def __init__(self, case: Case, start: dict[str, torch.Tensor]) -> None:
        self.case = case
        self.p = {name: value.clone().requires_grad_() for name, value in start.items()}

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        case, p = self.case, self.p
        h = torch.tanh(x @ p["inward.weight"].T + p["inward.bias"])
        losses = torch.zeros((), dtype=torch.float64)
        for number in range(case.layers):
            prefix = f"layers.{number}."
            logits = h @ p[prefix + "router.weight"].T
            probability = logits.softmax(-1)
            threshold = probability.sort(-1, descending=True).values[:, case.top_k - 1 : case.top_k]
            chosen = probability >= threshold
            gate = torch.where(chosen, probability, torch.zeros_like(probability))
            if case.renormalise:
                gate = gate / gate.sum(-1, keepdim=True)
            mixed = torch.zeros_like(h)
            for e in range(case.num_experts):
                mixed = mixed + gate[:, e : e + 1] * self.expert(prefix + f"experts.{e}.", h)
            tokens = max(len(h), 1)
            fraction = chosen.double().sum(0) / tokens
            losses = losses + 0.01 * case.num_experts * (fraction * (probability.sum(0) / tokens)).sum()
            losses = losses + 0.001 * torch.log(logits.exp().sum(-1)).pow(2).sum() / tokens
            h = h + mixed
        return h @ p["outward.weight"].T + p["outward.bias"], losses

    def expert(self, prefix: str, h: torch.Tensor) -> torch.Tensor:
        if self.case.expert == "swiglu":
            gate_up, down = self.p[prefix + "gate_up"], self.p[prefix + "down"]
            a, b = h @ gate_up[:FFN].T, h @ gate_up[FFN:].T
            return (a * torch.sigmoid(a) * b) @ down.T
        a = h @ self.p[prefix + "up"].T
        return (0.5 * a * (1 + torch.erf(a / 2**0.5))) @ self.p[prefix + "down"].T


def train_dense(case: Case, workers: int, start: dict[str, torch.Tensor], optimize: Optimize = adamw) -> list[Result]:
    """The whole job in one process; one Result per worker, whose gradients and parameters are the whole model's."""
    model = DenseModel(case, start)
    optimizer = optimize(model.p.values())
    results = [Result() for _ in range(workers)]
    for step in range(case.steps):
        optimizer.zero_grad()
        for result, micro_batches in zip(results, case.batches(step), strict=True):
            for x in micro_batches:
                x = x.requires_grad_()
                output, losses = model.forward(x)
                ((loss_of(output) + losses) / workers).backward()
                if step == 0:
                    result.outputs.append(output.detach())
                    result.input_gradients.append(x.grad * workers)
        if case.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.p.values(), case.clip)
            for result in results:
                result.norms.append(norm)
        if step == 0:
            for result in results:
                result.gradients = {n: p.grad.clone() for n, p in model.p.items()}
        optimizer.step()
    for result, micro_batches in zip(results, case.batches(case.steps), strict=True):
        result.outputs.append(model.forward(micro_batches[0])[0].detach())
        result.parameters = {n: p.detach().clone() for n, p in model.p.items()}
    return results


def compare(
    case: Case, plan: Plan, results: list[Result], tolerance: float = 1e-10, optimize: Optimize = adamw
) -> None:
    """Assert that the workers' results equal the dense run's."""
    start: dict[str, torch.Tensor] = {}
    for result in results:
        start.update(result.start)
    dense = train_dense(case, plan.layout.workers, start, optimize)
    for kind in ("gradients", "parameters"):
        names = {name for result in results for name in getattr(result, kind)}
        assert names == set(start), "some expert is homed nowhere"
    for number, (result, expected) in enumerate(zip(results, dense, strict=True)):
        for kind in ("outputs", "input_gradients", "norms"):
            for mine, theirs in zip(getattr(result, kind), getattr(expected, kind), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance, msg=f"worker {number}: {kind}")
        for kind in ("gradients", "parameters"):
            for name, value in getattr(result, kind).items():
                message = f"worker {number}: {name} in {kind}"
                assert value is not None, message
                torch.testing.assert_close(value, getattr(expected, kind)[name], rtol=0, atol=tolerance, msg=message)
