"""How differences become bytes: as levels of a few bits, or as a few of their entries.

A coder remembers nothing. The two kinds of stream do: `delta` what receivers hold, `feedback` what they are still owed.
All tensors are flat and float32, on any device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from hybridep_rt.codecs import cpu, device
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, NewFrame, check_size, words
from hybridep_rt.codecs.levels import CHUNK, EVEN_EVERY, GROUP, LevelCode
from hybridep_rt.codecs.reference import Coded, Floats, Octets, Positions
from hybridep_rt.codecs.update import Update
from hybridep_rt.errors import CodecError

_LEAST_SAMPLE, _LARGEST_SAMPLE = 16384, 65536
_WANTED_ENTRIES = 160
"""So many of a sample should be entries: then their number is right to 8 %, as their standard deviation goes."""

_COUNTS = struct.Struct("<II")


class Coder(Protocol):
    """Codes a flat tensor against a state: minus what receivers hold, or (`feedback`) plus what they are owed."""

    @property
    def kind(self) -> Kind:
        """Of its frames."""

    @property
    def form(self) -> int:
        """What both ends have to agree on, in 16 bits."""

    def body_bytes(self, elements: int) -> int:
        """Size of a body, or the most it can be."""

    def expected_bytes(self, elements: int) -> float:
        """Mean size of many bodies."""

    def measure(self, body: memoryview, elements: int) -> int:
        """Size of the body that begins here. Raises CodecError where its own words are impossible."""

    def encode(
        self,
        values: torch.Tensor,
        state: torch.Tensor,
        velocity: torch.Tensor | None,
        step: int,
        feedback: bool,
        new_frame: NewFrame,
        update: Update | None = None,
    ) -> Octets:
        """The body, in a frame of `new_frame`. Changes state and velocity to what they are after it.

        `velocity`: how the copies move, or what else both ends remember of each value, such as strides.

        `update`: of the values, to be made first.
        """

    def decode(self, body: Octets, state: torch.Tensor, velocity: torch.Tensor | None, step: int, add: bool) -> None:
        """Add a body to the state, or (not `add`) write what it stands for there. Raises CodecError, then unchanged."""


def engine(values: torch.Tensor) -> ModuleType:
    """The functions for where a tensor lies."""
    return cpu if values.device.type == "cpu" else device


def turn(chunks: int, period: int, step: int) -> tuple[int, int]:
    """First and last + 1 of the chunks whose turn it is: every `period` steps all had one, in parts of equal size."""
    part = -(-chunks // period)
    first = min(step % period * part, chunks - part)
    return first, first + part


@dataclass(frozen=True)
class LevelCoder:
    """Levels of 1, 2 or 4 bits, of the 1 / `period` of the chunks whose turn it is."""

    code: LevelCode
    period: int = 1

    kind = Kind.LEVELS

    @property
    def form(self) -> int:
        """Bits (3 for three levels), whether strides adapt, block and period in 16 bits."""
        levels = self.code.bits | self.code.levels.is_ternary
        return levels | self.code.adapts << 3 | (self.code.block // 64) << 4 | self.period << 8

    def body_bytes(self, elements: int) -> int:
        """Exact."""
        return sum(self.parts(elements))

    def expected_bytes(self, elements: int) -> float:
        """The same."""
        return self.body_bytes(elements)

    def parts(self, elements: int) -> tuple[int, int]:
        """Bytes of scales and of codes in a body."""
        first, last = turn(-(-elements // CHUNK), self.period, 0)
        scales, codes = self.code.sizes(last - first)
        return 2 * scales, codes

    def measure(self, body: memoryview, elements: int) -> int:
        """The size is known beforehand."""
        return self.body_bytes(elements)

    def encode(
        self,
        values: torch.Tensor,
        state: torch.Tensor,
        velocity: torch.Tensor | None,
        step: int,
        feedback: bool,
        new_frame: NewFrame,
        update: Update | None = None,
    ) -> Octets:
        """See `Coder`. An update is made in the same pass over the memory."""
        part = self._part(len(values), step)
        size = self.body_bytes(len(values))
        frame = new_frame(size)
        out = self._split(frame[HEADER_BYTES : HEADER_BYTES + size], copy=False)
        moving = None if velocity is None else velocity[part]
        if self.code.adapts:
            assert moving is not None
            assert feedback
            engine(values).encode_adaptive(values[part], state[part], moving, self.code, self._evens(step), out)
        elif update is None:
            engine(values).encode_levels(values[part], state[part], moving, self.code, feedback, out)
        else:
            changing = update.part(part.start, part.stop)
            cpu.update_and_encode_levels(values[part], state[part], moving, self.code, changing, out)
        for rest in self._rest(part, len(values)):
            if update is not None:
                update.part(rest.start, rest.stop).run()
            if feedback:
                state[rest] += values[rest]
            else:
                self._drift(state[rest], velocity, rest)
        return frame

    def decode(self, body: Octets, state: torch.Tensor, velocity: torch.Tensor | None, step: int, add: bool) -> None:
        """See `Coder`."""
        check_size(len(body), self.body_bytes(len(state)))
        part = self._part(len(state), step)
        moving = None if velocity is None else velocity[part]
        coded = self._split(body, copy=True)
        if self.code.adapts:
            assert not add
            engine(state).decode_adaptive(coded, state[part], moving, self.code, self._evens(step))
        else:
            engine(state).decode_levels(coded, state[part], moving, self.code, add)
        for rest in self._rest(part, len(state)):
            if add:
                self._drift(state[rest], velocity, rest)
            else:
                state[rest] = 0

    def _part(self, elements: int, step: int) -> slice:
        first, last = turn(-(-elements // CHUNK), self.period, step)
        return slice(first * CHUNK, min(last * CHUNK, elements))

    def _evens(self, step: int) -> bool:
        """Whether strides of the chunks whose turn it is get the mean 1: each chunk's do once in so many turns."""
        return step // self.period % EVEN_EVERY == 0

    def _rest(self, part: slice, elements: int) -> Iterator[slice]:
        for rest in (slice(0, part.start), slice(part.stop, elements)):
            if rest.stop > rest.start:
                yield rest

    def _split(self, body: Octets, *, copy: bool) -> Coded:
        scales, codes = self.code.sizes(1)
        scales = len(body) * 2 * scales // (2 * scales + codes)
        return Coded(words(body[:scales]) if copy else body[:scales].view(np.uint16), body[scales:])

    def _drift(self, state: torch.Tensor, velocity: torch.Tensor | None, rest: slice) -> None:
        """What only the velocity moves. Multiplied and added apart, as a fused operation would round otherwise."""
        if velocity is not None:
            engine(state).drift(state, velocity[rest], self.code)


@dataclass(frozen=True)
class SparseCoder:
    """About `fraction` of the entries: those that reach a threshold which is taken from a sample of the magnitudes."""

    fraction: float

    kind = Kind.SPARSE

    @property
    def form(self) -> int:
        """Receivers need to know nothing."""
        return 0

    def capacity(self, elements: int) -> int:
        """The most entries that are sent: half as much again as wanted, as a sample may mislead."""
        return min(elements, int(1.5 * self.fraction * elements) + 64)

    def body_bytes(self, elements: int) -> int:
        """The most that the capacity can need."""
        return _largest_body(self.capacity(elements), elements)

    def expected_bytes(self, elements: int) -> float:
        """What a body takes on average where entries lie anywhere: 255 values without one cost a byte."""
        empty = (1 - self.fraction) ** 255
        entries = self.fraction * elements
        return _COUNTS.size + entries * (2 / GROUP + 1 + 1 / (1 - empty))

    def measure(self, body: memoryview, elements: int) -> int:
        """From the two counts that a body begins with."""
        entries, gaps = _counts(body, elements)
        return _COUNTS.size + _scale_bytes(entries) + entries + gaps

    def encode(
        self,
        values: torch.Tensor,
        state: torch.Tensor,
        velocity: torch.Tensor | None,
        step: int,
        feedback: bool,
        new_frame: NewFrame,
        update: Update | None = None,
    ) -> Octets:
        """See `Coder`. There is no predictor for entries. Which are sent depends on all values, updated."""
        if update is not None:
            update.run()
        frame, positions, picked, decoded = self.pick(values, state, feedback, new_frame)
        engine(values).settle(positions, picked, decoded, state, feedback)
        return frame

    def pick(
        self, values: torch.Tensor, state: torch.Tensor, feedback: bool, new_frame: NewFrame
    ) -> tuple[Octets, Positions, Floats, Floats]:
        """A frame, and its entries' positions, values and decoded values."""
        functions = engine(values)
        size = min(max(int(_WANTED_ENTRIES / self.fraction), _LEAST_SAMPLE), _LARGEST_SAMPLE)
        threshold = cpu.threshold_of(functions.sample_sizes(values, state, size, feedback), self.fraction)
        positions, picked = functions.select(values, state, feedback, threshold, self.capacity(len(values)))
        coded, decoded = cpu.encode_entries(picked)
        gaps = cpu.write_gaps(positions, len(values))
        counts = np.frombuffer(_COUNTS.pack(len(picked), len(gaps)), np.uint8)
        parts = [counts, coded.scales.view(np.uint8), coded.codes, gaps]
        size = sum(map(len, parts))
        frame = new_frame(size)
        np.concatenate(parts, out=frame[HEADER_BYTES : HEADER_BYTES + size])
        return frame, positions, picked, decoded

    def decode(self, body: Octets, state: torch.Tensor, velocity: torch.Tensor | None, step: int, add: bool) -> None:
        """See `Coder`."""
        coded, gaps = self.split(body, len(state))
        decoded = cpu.decode_entries(coded)
        if not add:
            state.zero_()
        engine(state).apply_gaps(gaps, decoded, state)

    def split(self, body: Octets, elements: int) -> tuple[Coded, Octets]:
        """Entries and gaps, checked: nothing outside a tensor of that many elements is named. Raises CodecError."""
        entries, gap_bytes = _counts(body.data, elements)
        codes = _COUNTS.size + _scale_bytes(entries)
        check_size(len(body), codes + entries + gap_bytes)
        gaps = body[codes + entries :]
        _check_gaps(gaps, entries, elements)
        return Coded(words(body[_COUNTS.size : codes]), body[codes : codes + entries]), gaps


def _scale_bytes(entries: int) -> int:
    return 2 * -(-entries // GROUP)


def _largest_body(entries: int, elements: int) -> int:
    return _COUNTS.size + _scale_bytes(entries) + 2 * entries + elements // 255


def _counts(body: memoryview, elements: int) -> tuple[int, int]:
    if body.nbytes < _COUNTS.size:
        raise CodecError(f"{body.nbytes} bytes where two counts need {_COUNTS.size}")
    entries, gaps = _COUNTS.unpack_from(body)
    if entries > elements or not entries <= gaps <= entries + elements // 255:
        raise CodecError(f"{entries} entries with {gaps} bytes of gaps can't be of {elements} values")
    return entries, gaps


def _check_gaps(gaps: Octets, entries: int, elements: int) -> None:
    """As many entries as announced, and the last of them inside the tensor."""
    found = int(np.count_nonzero(gaps != 255))
    end = int(gaps.sum(dtype=np.int64)) + found
    if found != entries or end > elements or (len(gaps) and gaps[-1] == 255):
        raise CodecError(f"gaps of {found} entries up to {end}, where {entries} entries of {elements} were announced")
