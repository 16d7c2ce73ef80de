"""The training steps that are compared: one model, over the runtime or over plain torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.plain_ep import PlainMoELayer, average_gradients
from benchmarks.sizes import Size
from hybridep_rt.moe.experts import expert_kind
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.moe.router import Router
from hybridep_rt.runtime.session import Runtime


class Model(nn.Module):
    """Blocks of a dense matrix and a MoE layer, both with residuals. Lean on purpose: it doesn't hide the MoE layer."""

    def __init__(self, size: Size, make_layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(size.hidden, size.hidden) for _ in range(size.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(size.hidden) for _ in range(size.layers))
        self.moe = nn.ModuleList(make_layer() for _ in range(size.layers))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """[T,H] -> [T,H]"""
        for dense, norm, moe in zip(self.dense, self.norms, self.moe, strict=True):
            h = h + torch.tanh(dense(h))
            h = h + moe(norm(h))
        return h


class Arm:
    """One model with its own optimizer, taking steps. `finish` makes the gradients final after backward()."""

    def __init__(self, model: Model, finish: Callable[[], None]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._finish = finish

    def step(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """One optimizer step; the loss before it."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), target)
        for moe in self.model.moe:
            loss = loss + moe.aux_loss
        loss.backward()
        self._finish()
        self.optimizer.step()
        return loss.detach()

    def timed_step(self, x: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        """Seconds, and CPU seconds of this process, of one step that all workers begin together."""
        if dist.is_initialized():
            dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        self.step(x, target)
        return time.perf_counter() - start, time.process_time() - start_cpu


def runtime_arm(size: Size, runtime: Runtime) -> Arm:
    """The model over the runtime: its backward() leaves final gradients."""
    torch.manual_seed(0)
    arm = Arm(Model(size, lambda: _hybrid_layer(size, runtime)), lambda: None)
    runtime.attach(arm.model, arm.optimizer, tokens_per_step=size.tokens)
    return arm


def plain_arm(size: Size, like: Model) -> Arm:
    """The model over plain torch.distributed, with the weights that `like` has now."""
    layers = iter([_plain_layer(layer, size) for layer in like.moe])
    model = Model(size, lambda: next(layers))
    state: dict[str, Any] = {name: value for name, value in like.state_dict().items() if ".experts." not in name}
    model.load_state_dict(state, strict=False)
    experts = [p for layer in model.moe for p in layer.experts.parameters()]
    owned = {id(p) for p in experts}
    dense = [p for p in model.parameters() if id(p) not in owned]
    return Arm(model, lambda: average_gradients(dense, experts, size.workers))


def batch(size: Size, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target [T,H] of one worker."""
    generator = torch.Generator().manual_seed(1 + worker)
    shape = (size.tokens, size.hidden)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _hybrid_layer(size: Size, runtime: Runtime) -> MoELayer:
    return MoELayer(size.hidden, size.ffn, size.experts, size.top_k, runtime=runtime)


def _plain_layer(like: Any, size: Size) -> PlainMoELayer:
    router = Router(size.hidden, size.experts, size.top_k, renormalise=True, seed=0)
    router.load_state_dict(like.router.state_dict())
    names = expert_kind("swiglu").names
    experts = [[nn.Parameter(bank[name].detach().clone()) for name in names] for bank in like.experts.values()]
    return PlainMoELayer(router, experts, size.workers)
