"""Which codec each stream of a layer's experts uses, and the changes from one to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from hybridep_rt.codecs.codec import Codec, follow, make_codec
from hybridep_rt.codecs.shared import SharedResidual

Streams = list[Codec]
"""One codec for each tensor of an expert."""


class WeightStreams:
    """The codecs of the weights that pass through this worker, by expert.

    A change takes effect with a version, expert by expert: what was sent before is decoded by the codec it was sent
    with, however late it is asked for. New streams begin with a key frame where their codec has one, unless that can
    follow the one before.
    """

    def __init__(self, spec: str, experts: Iterable[int], tensors: int) -> None:
        self._spec = spec
        self._specs = [(0, spec)]
        self._tensors = tensors
        self._current = {expert: self._made(spec) for expert in experts}
        self._coming: dict[int, list[tuple[int, Streams]]] = {expert: [] for expert in self._current}

    def of(self, expert: int, version: int) -> Streams:
        """The codecs of an expert's version. Versions of one expert have to be asked for in their order."""
        coming = self._coming[expert]
        while coming and coming[0][0] <= version:
            before, self._current[expert] = self._current[expert], coming.pop(0)[1]
            for codec, other in zip(self._current[expert], before, strict=True):
                follow(codec, other)
        return self._current[expert]

    def change(self, spec: str, first_version: int) -> bool:
        """Use another codec from a version on; False where it is the one in use, and the streams simply go on."""
        if spec == self._spec:
            return False
        self._spec = spec
        self._specs.append((first_version, spec))
        for coming in self._coming.values():
            coming.append((first_version, self._made(spec)))
        return True

    def share(self, tensors: list[torch.Tensor], number: int) -> None:
        """Give the layer's mean of that number to the streams that tell experts apart from it."""
        coming = (streams for changes in self._coming.values() for _, streams in changes)
        for streams in (*self._current.values(), *coming):
            for codec, tensor in zip(streams, tensors, strict=True):
                if isinstance(codec, SharedResidual):
                    codec.set_shared(tensor, number)

    def rebind(self, experts: Iterable[int], staying: Collection[int], version: int) -> None:
        """Have the codecs of these experts, in use since `version`: those that stay go on, the others begin anew."""
        while len(self._specs) > 1 and self._specs[1][0] <= version:
            del self._specs[0]
        (_, in_use), *later = self._specs
        kept = {e: (self.of(e, version), self._coming[e]) for e in experts if e in staying}
        self._current, self._coming = {}, {}
        for expert in experts:
            new = self._made(in_use), [(first, self._made(spec)) for first, spec in later]
            self._current[expert], self._coming[expert] = kept.get(expert, new)

    def _made(self, spec: str) -> Streams:
        return [make_codec(spec) for _ in range(self._tensors)]
