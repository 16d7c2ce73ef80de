"""Parameters that come to a worker or leave it, with what its optimizer keeps about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hybridep_rt.codecs.record import Record, Value
from hybridep_rt.errors import ConfigError

_MODEL, _OPTIMIZER = "model", "optimizer"
_GROUP, _TRAINED = "group", "trained"
_NEAR, _HOST = "near.", "host."
"""State on the parameter's device, and state that stays on the CPU (or is a number)."""


class Ownership:
    """One worker's model and optimizer.

    Any torch optimizer will do whose state of a parameter is tensors and numbers. A parameter joins the group that it
    had at its old home, in the model's order, so that `optimizer.state_dict()` numbers parameters as if the model had
    been built that way.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def describe(self) -> str:
        """What has to be the same at all workers."""
        return f"{type(self._optimizer).__name__} with {len(self._optimizer.param_groups)} groups"

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the model's and the optimizer's."""
        return {_MODEL: self._model.state_dict(), _OPTIMIZER: self._optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that was made when the same experts were homed here."""
        self._model.load_state_dict(state[_MODEL])
        self._optimizer.load_state_dict(state[_OPTIMIZER])

    def release(self, parameter: nn.Parameter) -> Record:
        """Forget a parameter; returns its group (None: it had none), whether it is trained, and its state.

        Raises ConfigError, changing nothing, where the state holds anything but tensors and numbers.
        """
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, Value):
                kind = type(value).__name__
                raise ConfigError(
                    f"{type(self._optimizer).__name__} keeps a {kind} ({name}) of an expert, which can't move"
                )
        group = self._leave_group(parameter)
        self._optimizer.state.pop(parameter, None)
        placed = {(_NEAR if _is_near(value, parameter) else _HOST) + name: value for name, value in state.items()}
        return {_GROUP: group, _TRAINED: parameter.requires_grad, **placed}

    def adopt(self, parameter: nn.Parameter, record: Mapping[str, Value]) -> None:
        """Take over a parameter that is in the model already, with what `release` returned elsewhere.

        Raises ConfigError where the optimizer has no such group.
        """
        parameter.requires_grad_(bool(record[_TRAINED]))
        group = record[_GROUP]
        if group is None:
            return
        groups = self._optimizer.param_groups
        if not isinstance(group, int) or not 0 <= group < len(groups):
            raise ConfigError(f"an expert comes from parameter group {group}; the optimizer here has {len(groups)}")
        self._join_group(parameter, groups[group]["params"])
        near = {
            name.removeprefix(_NEAR): value.to(parameter.device)
            for name, value in record.items()
            if name.startswith(_NEAR) and isinstance(value, torch.Tensor)
        }
        host = {name.removeprefix(_HOST): value for name, value in record.items() if name.startswith(_HOST)}
        if near or host:
            self._optimizer.state[parameter] = near | host

    def _leave_group(self, parameter: nn.Parameter) -> int | None:
        for number, group in enumerate(self._optimizer.param_groups):
            for at, member in enumerate(group["params"]):
                if member is parameter:
                    del group["params"][at]
                    return number
        return None

    def _join_group(self, parameter: nn.Parameter, members: list[nn.Parameter]) -> None:
        order = {id(each): number for number, each in enumerate(self._model.parameters())}
        last = len(order)
        at = next((n for n, each in enumerate(members) if order.get(id(each), last) > order[id(parameter)]), None)
        members.insert(len(members) if at is None else at, parameter)


def _is_near(value: Value, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.device == parameter.device
