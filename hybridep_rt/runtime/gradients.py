"""Gradients of the dense parameters, summed over all workers of all DCs when a backward pass ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hybridep_rt.codecs.sizes import feedback_bytes
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.collectives import Collectives, VectorCodecs


class DenseGradients:
    """The parameters that every worker has, and what each stream of their sums remembers."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], spec: str) -> None:
        self._parameters = parameters
        self._spec = spec
        by_dtype: dict[str, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(str(parameter.dtype), []).append(parameter)
        self._groups = [by_dtype[name] for name in sorted(by_dtype)]
        self._codecs = [VectorCodecs(spec) for _ in self._groups]

    def average(self, collectives: Collectives, position: Position, divisor: int, *, flag: bool) -> bool:
        """Replace every `.grad` by the sum over all workers / `divisor`; return whether any worker's `flag` is set.

        A parameter that has no gradient at any worker keeps None; one that has it at some gets it at all. Presence and
        the flag travel exactly, in the same messages.
        """
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        flags = torch.tensor([flag, *(parameter.grad is not None for parameter in self._parameters)])
        vectors = [(flags.to(device=device, dtype=torch.int32), VectorCodecs())]
        for group, codecs in zip(self._groups, self._codecs, strict=True):
            vectors.append((torch.cat([_flat_gradient(parameter) for parameter in group]), codecs))
        found, *totals = collectives.all_reduce_vectors(vectors, position, traffic=Traffic.GRADIENTS)
        present = dict(zip(map(id, self._parameters), (found[1:] > 0).tolist(), strict=True))
        for group, total in zip(self._groups, totals, strict=True):
            _write_back(group, total, divisor, present)
        return bool(found[0] > 0)

    def change(self, spec: str) -> None:
        """Use another codec from the next sum on; what is still owed is added to it. Every worker has to call it."""
        if spec != self._spec:
            self._spec = spec
            for codecs in self._codecs:
                codecs.change(spec)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """For a checkpoint."""
        return [codecs.state() for codecs in self._codecs]

    def load_state(self, state: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Go on from a checkpoint of the same model."""
        for codecs, each in zip(self._codecs, state, strict=True):
            codecs.load_state(each)

    def owed_norm(self) -> float:
        """Euclidean norm of what this worker owes the others."""
        return math.hypot(*(codecs.owed_norm() for codecs in self._codecs))

    def memory(self, spec: str, workers: int) -> int:
        """Bytes that error feedback needs at one of the DC's workers, who share the units."""
        return feedback_bytes(spec) * -(-sum(parameter.numel() for parameter in self._parameters) // workers)


def all_finite(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether every gradient that there is has finite values only."""
    return all(_is_finite(p.grad) for p in parameters if p.grad is not None)


def _is_finite(values: torch.Tensor) -> bool:
    # A sum reads the values once and `isfinite` makes several temporaries, so ask the sum first. It may overflow though
    # all values are finite; it never is finite if one of them isn't.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _flat_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().reshape(-1)


def _write_back(
    group: Sequence[torch.nn.Parameter], total: torch.Tensor, divisor: int, present: dict[int, bool]
) -> None:
    parts = total.split([parameter.numel() for parameter in group])
    for parameter, part in zip(group, parts, strict=True):
        if not present[id(parameter)]:
            continue
        average = (part / divisor).view_as(parameter)
        if parameter.grad is None:
            parameter.grad = average
        else:
            parameter.grad.copy_(average)
