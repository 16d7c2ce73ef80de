"""Weights as differences to what the receivers hold: R += C(W - R), at the home and at every receiver, bit for bit.

The home keeps what receivers hold, too. What a code loses stays in the difference, so that copies converge to the exact
weights. A stream begins with a key frame, and who joins later gets one of the same moment.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridep_rt.codecs.buffers import as_bytes, as_tensor
from hybridep_rt.codecs.coders import Coder
from hybridep_rt.codecs.flat import Flat, check_elements, is_flat
from hybridep_rt.codecs.frames import (
    HEADER_BYTES,
    FramePool,
    Header,
    Kind,
    check_size,
    expect,
    new_frame,
    octets,
    read_header,
)
from hybridep_rt.codecs.levels import TINY
from hybridep_rt.codecs.reference import Octets
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes

if TYPE_CHECKING:
    from hybridep_rt.codecs.codec import Codec

_RANGE = struct.Struct("<II")
_KEY_BYTES = HEADER_BYTES + _RANGE.size
_WITH_VELOCITY = 1
DIGEST_EVERY = 256
"""Payloads from one that carries a digest of the state before it to the next."""
_DIGEST_BYTES = 8


class Delta:
    """One stream of one tensor: at its home it encodes, at a receiver it decodes. The state is the same at both.

    `predict`: keep a velocity per copy, for coders that move copies by it.
    """

    def __init__(self, name: str, coder: Coder, *, predict: bool = False) -> None:
        self.name = name
        self._coder = coder
        self._predict = predict
        self._frames = FramePool()
        self._input = Flat()
        self._copy: torch.Tensor | None = None
        self._velocity: torch.Tensor | None = None
        self._number = 0
        self._known = 0

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Size of a payload that is neither key frame nor has a digest; of entries, the most it can be."""
        return HEADER_BYTES + self._coder.body_bytes(elements)

    def key_bytes(self, elements: int) -> int:
        """Size of a key frame of the whole tensor, without velocity as at a stream's start."""
        return _KEY_BYTES + 4 * elements

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """Size of the payload that begins here, read from its first bytes. Needs no state: relays may ask.

        Raises CodecError for a header that no codec of these settings writes.
        """
        header = read_header(payload)
        if header.kind is Kind.KEY:
            _, count = _range(payload, elements)
            return _KEY_BYTES + 4 * count * (2 if header.form & _WITH_VELOCITY else 1)
        expect(header, self._coder.kind, self._coder.form)
        body = self._coder.measure(memoryview(payload)[HEADER_BYTES:], elements)
        return HEADER_BYTES + body + _digest_bytes(header.number)

    def encode(self, values: torch.Tensor) -> Bytes:
        """A key frame the first time, then what changes the receivers' copies towards `values`."""
        return self._encode(values, None)

    def update_and_encode(self, values: torch.Tensor, update: Update) -> Bytes:
        """See `Fusing`."""
        return self._encode(values, update)

    def _encode(self, values: torch.Tensor, update: Update | None) -> Bytes:
        flat = self._input.of(values)
        if self._copy is None:
            if update is not None:
                update.run()
            self._adopt(flat.clone())
            return self.key_frame()
        check_elements(len(flat), len(self._copy))
        digest = self.digest() if _digest_bytes(self._number + 1) else b""
        self._number += 1

        def frame_for(body_bytes: int) -> Octets:
            size = body_bytes + len(digest)
            return self._frames.new_frame(self._coder.kind, self._coder.form, self._number, size)

        frame = self._coder.encode(flat, self._copy, self._velocity, self._number, False, frame_for, update)
        frame[len(frame) - len(digest) :] = np.frombuffer(digest, np.uint8)
        return frame.data

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """Bring `into` to the payload's moment. It has to be the same tensor every time, written by nobody else.

        Raises CodecError, and leaves the copy as it was, for anything but the next payload of the stream; so too where
        a payload's digest says that the copy isn't what the home thinks it is.
        """
        header = read_header(payload)
        if header.kind is Kind.KEY:
            self._take_key(header, payload, into)
        else:
            self._take_step(header, payload, into)
        if self._copy is not None and not is_flat(into):
            into.copy_(self._copy.view(into.shape))

    def key_frame(self, first: int = 0, count: int | None = None) -> Bytes:
        """What receivers hold now, for a new one. It may come in ranges, in order, each sent after a step's payload.

        A receiver gets that step's payload or a key frame of the whole tensor, never both; one that gets ranges gets
        the payloads of the steps after its first range as well. Raises CodecError before the first `encode`.
        """
        copy = self._held()
        part = slice(first, len(copy) if count is None else first + count)
        moving = self._velocity is not None and bool(self._velocity.any())
        form = _WITH_VELOCITY if moving else 0
        values = [copy[part]]
        if self._velocity is not None and moving:
            values.append(self._velocity[part])
        head = new_frame(Kind.KEY, form, self._number, _RANGE.size)
        _RANGE.pack_into(head.data, HEADER_BYTES, first, len(values[0]))
        return b"".join([head.data, *(as_bytes(part) for part in values)])

    def adopt(self, copy: torch.Tensor) -> None:
        """Begin without a key frame, from weights that both ends hold: the home a clone, a receiver its own copy."""
        self._adopt(copy.detach().reshape(-1) if is_flat(copy) else self._input.of(copy).clone())

    def follow(self, before: Codec) -> None:
        """Take over from another delta stream of the same tensor, at both ends: no key frame is needed."""
        if isinstance(before, Delta) and before._copy is not None and before.ready:
            velocity = before._velocity
            self._adopt(before._copy)
            if self._velocity is not None and velocity is not None:
                self._velocity = velocity

    @property
    def ready(self) -> bool:
        """Whether the copy is whole."""
        return self._copy is not None and self._known == len(self._copy)

    def digest(self) -> bytes:
        """8 bytes that are equal at both ends whenever their states are. Raises CodecError before the first payload."""
        digest = hashlib.blake2b(self._number.to_bytes(8, "little"), digest_size=8)
        digest.update(as_bytes(self._held()))
        if self._velocity is not None:
            digest.update(as_bytes(self._velocity))
        return digest.digest()

    def distance(self, values: torch.Tensor) -> float:
        """At the home: how far the receivers' copies are from the weights, as a part of the weights' norm."""
        flat = self._input.of(values)
        return float((flat - self._held()).norm() / flat.norm().clamp(min=TINY))

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint: the copy, its velocity and the number of the last payload. Empty before the first."""
        if self._copy is None:
            return {}
        state = {"copy": self._copy, "number": torch.tensor(self._number)}
        return state if self._velocity is None else {**state, "velocity": self._velocity}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """At a home: go on as if nothing had happened. Receivers that lost theirs need a key frame."""
        if not state:
            return
        self._adopt(state["copy"].clone())
        self._number = int(state["number"])
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])

    def bytes_held(self) -> int:
        """Memory of the copy and its velocity."""
        return sum(part.nbytes for part in (self._copy, self._velocity) if part is not None)

    def _take_key(self, header: Header, payload: Bytes, into: torch.Tensor) -> None:
        first, count = _range(payload, into.numel())
        moving = bool(header.form & _WITH_VELOCITY)
        check_size(memoryview(payload).nbytes, self.frame_bytes(payload, into.numel(), into.dtype))
        if moving and not self._predict:
            raise CodecError("a key frame with a velocity, in a stream without predictor")
        if first not in (0, self._known):
            raise CodecError(f"values from {first} of a key frame, where those from {self._known} were expected")
        if first == 0:
            self._adopt(into.detach().view(-1) if is_flat(into) else into.new_zeros(into.numel(), dtype=torch.float32))
            self._number = header.number
        copy = self._held_in(into)
        self._check_number(header, 0)
        body = memoryview(payload)[_KEY_BYTES:]
        copy[first : first + count] = as_tensor(body[: 4 * count], torch.float32, (count,))
        if self._velocity is not None:
            velocity = as_tensor(body[4 * count :], torch.float32, (count,)) if moving else 0
            self._velocity[first : first + count] = velocity
        self._known = first + count

    def _take_step(self, header: Header, payload: Bytes, into: torch.Tensor) -> None:
        expect(header, self._coder.kind, self._coder.form)
        copy = self._held_in(into)
        self._check_number(header, 1)
        body = octets(payload)[HEADER_BYTES:]
        if size := _digest_bytes(header.number):
            # A copy that is still arriving in ranges isn't what the home has yet.
            if self.ready and body[-size:].tobytes() != self.digest():
                raise CodecError(f"this copy and its home's differ before payload {header.number}")
            body = body[:-size]
        self._coder.decode(body, copy, self._velocity, header.number, add=True)
        self._number = header.number

    def _check_number(self, header: Header, ahead: int) -> None:
        if header.number != self._number + ahead:
            raise CodecError(f"payload {header.number} of a stream, where {self._number + ahead} was expected")

    def _adopt(self, copy: torch.Tensor) -> None:
        self._copy = copy
        self._known = len(copy)
        self._number = 0
        self._velocity = torch.zeros_like(copy) if self._predict else None

    def _held(self) -> torch.Tensor:
        if self._copy is None:
            raise CodecError("a stream without a key frame yet")
        return self._copy

    def _held_in(self, into: torch.Tensor) -> torch.Tensor:
        """The copy, which has to lie in `into` where that is flat float32."""
        copy = self._held()
        check_elements(into.numel(), len(copy))
        if is_flat(into) and copy.data_ptr() != into.data_ptr():
            raise CodecError("a stream's copy was replaced by another tensor")
        return copy


def _digest_bytes(number: int) -> int:
    """What a payload of that number has behind its body."""
    return 0 if number % DIGEST_EVERY else _DIGEST_BYTES


def _range(payload: Bytes, elements: int) -> tuple[int, int]:
    if memoryview(payload).nbytes < _KEY_BYTES:
        raise CodecError(f"{memoryview(payload).nbytes} bytes where a key frame needs at least {_KEY_BYTES}")
    first, count = _RANGE.unpack_from(payload, HEADER_BYTES)
    if first + count > elements:
        raise CodecError(f"a key frame of the values {first} to {first + count} of {elements}")
    return first, count
