"""The second moment beside coarse gradients: what Adam divides by, which 1 bit per value would spoil.

Each sender keeps a moving average of its squared gradient and sends the square root of a rotating part of it as 4-bit
logarithms. The home adds up what its senders' averages are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hybridep_rt.codecs import reference
from hybridep_rt.codecs.coders import engine, turn
from hybridep_rt.codecs.frames import words
from hybridep_rt.codecs.levels import CHUNK, LevelCode
from hybridep_rt.codecs.reference import Coded, Octets

_BITS = 4


class SecondMoment:
    """One stream's average, at its sender or as its receiver knows it. A part of 1 / `period` travels per step."""

    def __init__(self, period: int, block: int, beta: float) -> None:
        self._period = period
        self._code = LevelCode(_BITS, block)
        self._beta = beta
        self._average: torch.Tensor | None = None
        self._seen = 0

    def body_bytes(self, elements: int) -> int:
        """Exact size of one step's part."""
        first, last = turn(-(-elements // CHUNK), self._period, 0)
        scales, codes = self._code.sizes(last - first)
        return 2 * scales + codes

    def observe(self, gradient: torch.Tensor) -> None:
        """At the sender, every step: add a flat float32 gradient to the average."""
        average = self._of(gradient)
        engine(gradient).track_moment(gradient, average, self._beta)
        self._seen += 1

    def encode(self, step: int, body: Octets) -> None:
        """The root of the average of the part whose turn it is, without the bias of a young average."""
        average = self._average
        if average is None:
            raise RuntimeError("observe a gradient first")
        part = self._part(len(average), step)
        root = (average[part] / (1 - self._beta**self._seen)).sqrt()
        engine(root).encode_logs(root, self._code.block, self._split(body, copy=False))

    def decode(self, step: int, body: Octets, like: torch.Tensor) -> None:
        """At the receiver: take a part in. `like` is flat and gives size and device."""
        average = self._of(like)
        part = self._part(len(average), step)
        root = torch.from_numpy(reference.decode_logs(self._split(body, copy=True), block=self._code.block))
        average[part] = root.square()[: part.stop - part.start].to(average.device)
        self._seen += 1

    @property
    def average(self) -> torch.Tensor | None:
        """At the receiver: the sender's mean squared gradient, flat; None until every part has arrived once."""
        return self._average if self._seen >= self._period else None

    def unbiased(self) -> torch.Tensor | None:
        """At a sender: what `encode` takes parts of. A new tensor; None before the first gradient."""
        return None if self._average is None else self._average / (1 - self._beta**self._seen)

    @property
    def is_partial(self) -> bool:
        """At the receiver: whether some parts have arrived, and not all."""
        return 0 < self._seen < self._period

    def fresh(self) -> SecondMoment:
        """Another of the same settings that has seen nothing."""
        return SecondMoment(self._period, self._code.block, self._beta)

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint. Empty before the first gradient."""
        return {} if self._average is None else {"average": self._average, "seen": torch.tensor(self._seen)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        if state:
            self._average, self._seen = state["average"].clone(), int(state["seen"])

    def _of(self, like: torch.Tensor) -> torch.Tensor:
        if self._average is None:
            self._average = torch.zeros_like(like, dtype=torch.float32)
        return self._average

    def _part(self, elements: int, step: int) -> slice:
        first, last = turn(-(-elements // CHUNK), self._period, step)
        return slice(first * CHUNK, min(last * CHUNK, elements))

    def _split(self, body: Octets, *, copy: bool) -> Coded:
        scales = len(body) * 16 // (16 + _BITS * self._code.block)
        return Coded(words(body[:scales]) if copy else body[:scales].view(np.uint16), body[scales:])
