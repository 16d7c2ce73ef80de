"""One step of AdamW as data, so that a codec can make it while it encodes the weights: one pass over the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import nn

from hybridep_rt.codecs.flat import is_flat
from hybridep_rt.codecs.levels import CHUNK
from hybridep_rt.codecs.reference import Array, Floats
from hybridep_rt.protocol.messages import Bytes

if TYPE_CHECKING:
    from hybridep_rt.codecs.codec import Codec


class Numbers(NamedTuple):
    """What a step multiplies by, in float32 as the kernel takes them."""

    decay: np.float32
    """1 - rate * weight decay."""
    weight: np.float32
    """1 - beta1."""
    beta: np.float32
    """beta2."""
    rest: np.float32
    """1 - beta2."""
    root: np.float32
    """Root of the second moment's bias, 1 - beta2 ** step."""
    epsilon: np.float32
    rate: np.float32
    """Learning rate / (1 - beta1 ** step)."""


def numbers(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> Numbers:
    """The numbers of step 1, 2, ..."""
    beta1, beta2 = betas
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    exact = (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, bias2**0.5, eps, lr / bias1)
    return Numbers(*map(np.float32, exact))


@dataclass(frozen=True, slots=True)
class Update:
    """A step of AdamW that is still to be made, on flat float32 arrays in main memory.

    `moment`: the mean squared gradient as others know it, or no values. It replaces the moving average, so that
    `square` becomes it times the bias, as an average that knew nothing else would have.
    """

    parameter: Floats
    gradient: Floats
    mean: Floats
    square: Floats
    moment: Floats
    numbers: Numbers

    def part(self, first: int, last: int) -> Update:
        """The same for a range of the values."""
        return Update(
            self.parameter[first:last],
            self.gradient[first:last],
            self.mean[first:last],
            self.square[first:last],
            self.moment[first:last],
            self.numbers,
        )

    def run(self) -> None:
        """Make it."""
        from hybridep_rt.codecs import kernels

        whole = len(self.parameter) // CHUNK * CHUNK
        for part, width in ((self.part(0, whole), CHUNK), (self.part(whole, len(self.parameter)), 1)):
            parameter, gradient, mean, square, moment = part.rows(width)
            kernels.adamw(parameter, gradient, mean, square, moment, *self.numbers)

    def rows(self, width: int) -> list[Array]:
        """The arrays as [rows, width], without a rest that fills no row."""
        arrays = (self.parameter, self.gradient, self.mean, self.square, self.moment)
        return [array[: len(array) // width * width].reshape(-1, width) for array in arrays]


Step: TypeAlias = Callable[[nn.Parameter, torch.Tensor | None], Update | None]
"""Asked for a parameter's update, with its second moment where others know it better: hands it over, or makes it.

It answers once per step; then, and for parameters that are not its own, there is nothing left to make.
"""


def update_of(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    moment: torch.Tensor | None,
    numbers: Numbers,
) -> Update | None:
    """The update of a tensor, over its own memory; None where that isn't contiguous float32 in main memory."""
    tensors = (parameter, gradient, mean, square, *([] if moment is None else [moment]))
    if not all(tensor.device.type == "cpu" and is_flat(tensor) for tensor in tensors):
        return None
    flat = [tensor.detach().view(-1).numpy() for tensor in tensors]
    other = np.empty(0, np.float32) if moment is None else flat[4]
    return Update(flat[0], flat[1], flat[2], flat[3], other, numbers)


@runtime_checkable
class Fusing(Protocol):
    """A codec that can make an update on the values while it encodes them."""

    def update_and_encode(self, values: torch.Tensor, update: Update) -> Bytes:
        """The bytes of `encode` after the update, which is made on the memory of `values`."""


def update_and_encode(codec: Codec, values: torch.Tensor, update: Update | None) -> Bytes:
    """The bytes of the values after an update, if there is one: in one pass over the memory where the codec can."""
    if update is None:
        return codec.encode(values)
    if isinstance(codec, Fusing):
        return codec.update_and_encode(values, update)
    update.run()
    return codec.encode(values)
