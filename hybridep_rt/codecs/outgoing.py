"""One stream of gradients at its sender, whose codec may change: what the old one still owes is added to the next."""

from __future__ import annotations

import torch

from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.protocol.messages import Bytes


class Outgoing:
    """The sum of all that was sent, and of what is owed, is the sum of all gradients, whatever codecs came in between.

    `ahead`: the codec that a warm-up leads to. Its second moment, if it has one, sees the gradients meanwhile.
    """

    def __init__(self, spec: str, ahead: str = "") -> None:
        self._spec = spec
        self._codec = make_codec(spec)
        self._ahead_spec = ahead
        self._ahead = make_codec(ahead) if ahead and ahead != spec else None
        self._carried: torch.Tensor | None = None

    def encode(self, values: torch.Tensor) -> Bytes:
        """The gradient, with what earlier codecs owe, in the codec in use."""
        if self._carried is not None:
            values = values + self._carried.view_as(values).to(values.dtype)
            self._carried = None
        if isinstance(self._ahead, Feedback):
            self._ahead.observe(values)
        return self._codec.encode(values)

    def change(self, spec: str) -> None:
        """Use this codec from the next gradient on; where it is the one in use, it simply goes on."""
        if spec == self._spec:
            return
        owed = self._codec.flush() if isinstance(self._codec, Feedback) else None
        if owed is not None:
            self._carried = owed if self._carried is None else self._carried + owed
        prepared = self._ahead if spec == self._ahead_spec else None
        self._codec = make_codec(spec) if prepared is None else prepared
        self._spec, self._ahead = spec, None

    @property
    def carries(self) -> bool:
        """Whether an earlier codec's debt waits, and has to be sent even if there is no gradient."""
        return self._carried is not None

    def owed_norm(self) -> float:
        """Euclidean norm of what receivers are still owed."""
        carried = 0.0 if self._carried is None else float(self._carried.norm())
        return carried + (self._codec.owed_norm() if isinstance(self._codec, Feedback) else 0.0)

    def bytes_held(self) -> int:
        """Memory of what is owed and of second moments."""
        held = sum(codec.bytes_held() for codec in (self._codec, self._ahead) if isinstance(codec, Feedback))
        return held + (0 if self._carried is None else self._carried.nbytes)
