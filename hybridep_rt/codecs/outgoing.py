"""One stream of gradients at its sender, whose codec may change: what the old one still owes is added to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridep_rt.codecs.codec import follow, make_codec
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.protocol.messages import Bytes

_CODEC, _AHEAD, _CARRIED = "codec.", "ahead.", "carried"


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
        before, prepared = self._codec, self._ahead if spec == self._ahead_spec else None
        self._codec = make_codec(spec) if prepared is None else prepared
        follow(self._codec, before)
        self._spec, self._ahead = spec, None

    def flush(self) -> torch.Tensor | None:
        """All that is owed, flat, to be sent exactly: nothing is owed afterwards. None where nothing ever was."""
        owed = self._codec.flush() if isinstance(self._codec, Feedback) else None
        carried, self._carried = self._carried, None
        if owed is None or carried is None:
            return carried if owed is None else owed
        return owed + carried

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint. The codec in use is the one of the step that is resumed."""
        parts = {_CODEC: self._codec, _AHEAD: self._ahead}
        found = {
            prefix + name: value
            for prefix, codec in parts.items()
            if isinstance(codec, Feedback)
            for name, value in codec.state().items()
        }
        return found if self._carried is None else {**found, _CARRIED: self._carried}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint of a stream that used the same codecs."""
        for prefix, codec in ((_CODEC, self._codec), (_AHEAD, self._ahead)):
            found = {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
            if isinstance(codec, Feedback) and found:
                codec.load_state(found)
        self._carried = state.get(_CARRIED)

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
