"""The second moment of one tensor's gradients at its home, from all DCs that add to them: what Adam divides by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.codecs.flat import Flat
from hybridep_rt.codecs.moment import SecondMoment


class HomeMoment:
    """The own DC's mean squared gradient plus those that other DCs told, over the square of what gradients are over.

    Terms between DCs are left out, as gradients of different tokens hardly correlate: steps become a little larger.
    """

    def __init__(self, own: SecondMoment) -> None:
        self._own = own
        self._input = Flat()
        self._total: torch.Tensor | None = None
        self._known = False
        self._norm = 0.0

    def observe(self, gradient: torch.Tensor) -> None:
        """The sum of the own DC's gradients in a step."""
        self._own.observe(self._input.of(gradient))

    def add_up(self, senders: Sequence[Codec], divisor: int, gradient: torch.Tensor) -> None:
        """After all gradients of a step have arrived; `gradient` is what they sum up to, over `divisor`."""
        streams = [sender for sender in senders if isinstance(sender, Feedback)]
        self._known = all(stream.knows_moment for stream in streams)
        if not self._known:
            return
        if self._total is None:
            self._total = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        self._total.zero_()
        for part in (self._own.unbiased(), *(stream.second_moment for stream in streams)):
            if part is not None:
                self._total += part
        self._total /= divisor**2
        self._norm = _norm(gradient)

    def of(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """For a gradient that may have been scaled as a whole since, by clipping or a loss scale; once per `add_up`.

        None where a DC has told only a part of its moment yet, or the gradient says nothing: then Adam goes by itself.
        """
        if not self._known or self._total is None or gradient is None:
            return None
        self._known = False
        now = _norm(gradient)
        if not 0 < self._norm < float("inf") or not 0 < now < float("inf"):
            return None
        scale = (now / self._norm) ** 2
        return self._total if scale == 1 else self._total.mul_(scale)

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint between two steps: the own DC's average. What others told is theirs."""
        return self._own.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._own.load_state(state)


def _norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient))
