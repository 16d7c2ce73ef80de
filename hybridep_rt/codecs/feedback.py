"""Gradients in few bits, with what each payload lost added to the next: the sum of all that is sent stays right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from hybridep_rt.codecs.coders import Coder
from hybridep_rt.codecs.flat import Flat, check_elements, is_flat
from hybridep_rt.codecs.frames import HEADER_BYTES, FramePool, expect, octets, read_header
from hybridep_rt.codecs.moment import SecondMoment
from hybridep_rt.codecs.reference import Octets
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes

if TYPE_CHECKING:
    from hybridep_rt.codecs.codec import Codec

_MOMENT = "moment."


class Feedback:
    """One stream of one tensor's gradients, at its sender or at its receiver.

    The sender's instance keeps what is still owed; a gradient that isn't finite is passed on and owes nothing. With a
    `moment`, or where strides adapt, a receiver needs an instance for each sender; else one instance may decode any
    number of streams.

    `adapts`: every value has a stride, which both ends change by each payload alike, from 1 at a stream's first on, or
    from those of the stream that it follows.
    """

    def __init__(self, name: str, coder: Coder, moment: SecondMoment | None = None, *, adapts: bool = False) -> None:
        self.name = name
        self._coder = coder
        self._moment = moment
        self._adapts = adapts
        self._strides: torch.Tensor | None = None
        self._frames = FramePool()
        self._input = Flat()
        self._output = Flat()
        self._owed: torch.Tensor | None = None
        self._number = 0

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Size of a payload; of entries, the most it can be."""
        return HEADER_BYTES + self._coder.body_bytes(elements) + self._moment_bytes(elements)

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """Size of the payload that begins here, from its first bytes. Raises CodecError as `Delta.frame_bytes`."""
        expect(read_header(payload), self._coder.kind, self._coder.form)
        body = self._coder.measure(memoryview(payload)[HEADER_BYTES:], elements)
        return HEADER_BYTES + body + self._moment_bytes(elements)

    def observe(self, values: torch.Tensor) -> None:
        """Let the second moment see a gradient that another codec sends, as in a warm-up."""
        if self._moment is not None:
            self._moment.observe(self._input.of(values))

    def encode(self, values: torch.Tensor) -> Bytes:
        """The gradient with what is owed, coded; the rest is owed from now on."""
        flat = self._input.of(values)
        if self._owed is None:
            self._owed = torch.zeros_like(flat)
        check_elements(len(flat), len(self._owed))
        self._number += 1
        side = self._moment_bytes(len(flat))

        def frame_for(body_bytes: int) -> Octets:
            return self._frames.new_frame(self._coder.kind, self._coder.form, self._number, body_bytes + side)

        strides = self._strides_like(flat)
        frame = self._coder.encode(flat, self._owed, strides, self._number, True, frame_for)
        if self._moment is not None:
            self._moment.observe(flat)
            self._moment.encode(self._number, frame[len(frame) - side :])
        return frame.data

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Overwrite `into` with a payload's gradient. Raises CodecError for what no codec of these settings writes."""
        header = read_header(payload)
        expect(header, self._coder.kind, self._coder.form)
        body = octets(payload)[HEADER_BYTES:]
        side = self._moment_bytes(into.numel())
        if len(body) < side:
            raise CodecError(f"{len(body)} bytes where a second moment alone needs {side}")
        flat = into.detach().view(-1) if is_flat(into) else self._output.of(into)
        levels = body[: len(body) - side]
        if self._adapts and header.number != self._number + 1:
            raise CodecError(f"payload {header.number} of a stream, where {self._number + 1} was expected")
        self._coder.decode(levels, flat, self._strides_like(flat), header.number, add=False)
        if self._adapts:
            self._number = header.number
        if self._moment is not None:
            self._moment.decode(header.number, body[len(body) - side :], flat)
        if not is_flat(into):
            into.copy_(flat.view(into.shape))

    def follow(self, before: Codec) -> None:
        """Begin with the strides of the stream that this one takes over from, as both ends know them, if it has any.

        What it owes is another matter: see `Outgoing`.
        """
        if self._adapts and isinstance(before, Feedback) and before._strides is not None:
            self._strides = before._strides.abs()

    def _strides_like(self, like: torch.Tensor) -> torch.Tensor | None:
        """The strides that the next payload is coded in, if there are any."""
        if not self._adapts:
            return None
        if self._strides is None:
            self._strides = torch.ones_like(like, dtype=torch.float32)
        check_elements(len(like), len(self._strides))
        return self._strides

    @property
    def second_moment(self) -> torch.Tensor | None:
        """At a receiver: the sender's mean squared gradient, flat; None without the channel or before all is known."""
        return None if self._moment is None else self._moment.average

    @property
    def knows_moment(self) -> bool:
        """At a receiver: whether `second_moment` says all; also where the sender never had a gradient."""
        return self._moment is not None and not self._moment.is_partial

    def new_moment(self) -> SecondMoment | None:
        """One that has seen nothing, for gradients that don't need to be sent; None without the channel."""
        return None if self._moment is None else self._moment.fresh()

    def flush(self) -> torch.Tensor | None:
        """What is still owed, flat, to be sent exactly; nothing is owed afterwards. None before the first gradient."""
        owed, self._owed = self._owed, None
        return owed

    def owed_norm(self) -> float:
        """Euclidean norm of what is owed."""
        return 0.0 if self._owed is None else float(self._owed.norm())

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: what is owed, the number of the last payload, strides, the second moment."""
        moment = {} if self._moment is None else self._moment.state()
        state = {_MOMENT + name: value for name, value in moment.items()}
        state["number"] = torch.tensor(self._number)
        if self._strides is not None:
            state["strides"] = self._strides
        return state if self._owed is None else {**state, "owed": self._owed}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._number = int(state["number"])
        self._owed = state["owed"].clone() if "owed" in state else None
        self._strides = state["strides"].clone() if "strides" in state else None
        if self._moment is not None:
            prefix = len(_MOMENT)
            self._moment.load_state({name[prefix:]: part for name, part in state.items() if name.startswith(_MOMENT)})

    def bytes_held(self) -> int:
        """Memory of what is owed, of strides and of the second moment."""
        return sum(part.nbytes for part in self.state().values() if part.dim() > 0)

    def _moment_bytes(self, elements: int) -> int:
        return 0 if self._moment is None else self._moment.body_bytes(elements)
