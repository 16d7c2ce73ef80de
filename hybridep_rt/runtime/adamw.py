"""AdamW that sends experts as it updates them: the update and the coding of an expert are one pass over its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from hybridep_rt.codecs.update import Step, Update, numbers, update_of
from hybridep_rt.errors import ConfigError

_UNKNOWN = ("amsgrad", "maximize", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """The steps of `torch.optim.AdamW`, and its state: either loads what the other saved.

    Once it was given to `Runtime.attach`, a step updates the experts first, layer by layer, and sends each to its
    subscribers before it goes on to the next. Contiguous float32 tensors in main memory take one pass of our own
    kernel, which rounds within one unit of the last place of torch's; for others torch's operators are used.

    Where senders of gradients tell their second moment (`1bit:vs=16`), an expert's `exp_avg_sq` is the sum of those.

    Raises ConfigError at the first step for a loaded state that asks for amsgrad or maximize.
    """

    takes_second_moments = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._publish: Callable[[Step], None] | None = None

    def publish_with(self, publish: Callable[[Step], None]) -> None:
        """Have every step call `publish`, which sends all experts and has the update of each made."""
        self._publish = publish

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One optimizer step; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = {id(p): group for group in self.param_groups for p in group["params"] if p.grad is not None}

        def update(parameter: nn.Parameter, moment: torch.Tensor | None) -> Update | None:
            group = due.pop(id(parameter), None)
            return None if group is None else self._update(parameter, group, moment)

        if self._publish is not None:
            self._publish(update)
        for group in self.param_groups:
            for parameter in group["params"]:
                if (rest := update(parameter, None)) is not None:
                    rest.run()
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], moment: torch.Tensor | None) -> Update | None:
        """The update that is still to be made; None where it has been made with torch's operators."""
        if any(group[option] for option in _UNKNOWN):
            raise ConfigError(f"hybridep_rt.AdamW knows none of {', '.join(_UNKNOWN)}")
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        settings = float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"]
        found = update_of(parameter, gradient, mean, square, moment, numbers(*settings, int(state["step"]) + 1))
        if found is None and moment is None:
            _step_with_torch(parameter, gradient, state, *settings)
            return None
        state["step"] += 1
        if found is None and moment is not None:
            _step_with_moment(parameter, gradient, state, moment.view_as(parameter), *settings)
        return found


def _step_with_torch(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    adamw(
        [parameter], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        foreach=False, amsgrad=False, beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
        maximize=False,
    )  # fmt: skip


def _step_with_moment(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    moment: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    bias1, bias2 = (1 - beta ** int(state["step"]) for beta in betas)
    parameter.mul_(1 - lr * weight_decay)
    mean = state["exp_avg"].lerp_(gradient, 1 - betas[0])
    square = state["exp_avg_sq"].copy_(moment).mul_(bias2)
    parameter.addcdiv_(mean, (square.sqrt() / bias2**0.5).add_(eps), value=-lr / bias1)
