"""Quantisation levels: which magnitudes a code of 1, 2 or 4 bits stands for, and where one ends and the next begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

CHUNK = 256
"""Elements that are packed together: blocks divide it, and every packed array is padded to whole chunks."""

LANES = 16
"""Partial sums of a block: a sum's order is fixed, and this many values are added at once."""

BLOCKS = (64, 128, 256)
"""Values that may share a scale."""

GROUP = 256
"""Entries of a sparse code that share a scale."""

SAMPLE_RUN = 8
"""Neighbours of which a sample consists: they share a cache line."""

TINY = 2.0**-100
"""Values under this count as zero where a scale is inverted or entries are selected."""

_LLOYD_MAX: dict[int, tuple[list[float], list[float]]] = {
    1: ([1.0], []),
    2: ([0.4528, 1.5104], [0.9816]),
    4: (
        [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
        [0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008],
    ),
}
"""Magnitudes and thresholds between them that have the least mean square error for normal values of variance 1.

Of one magnitude the unit doesn't matter, as a scale is fitted to every block.
"""

LOG_STEPS = 16
"""Codes of a 4-bit logarithm: code c stands for the block's largest value times 2 ** (-c / 2)."""


@dataclass(frozen=True)
class Levels:
    """Symmetric levels; the thresholds are in units of a block's root mean square.

    A code is a sign bit above the index of a magnitude: the number of `thresholds` that the value's magnitude reaches.
    """

    bits: int
    magnitudes: npt.NDArray[np.float32]
    thresholds: npt.NDArray[np.float32]

    @property
    def is_ternary(self) -> bool:
        """Whether zero is a level, without a sign on the wire."""
        return bool(self.magnitudes[0] == 0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's codes: of three levels, 5 values a byte."""
        return TRIT_BYTES if self.is_ternary else CHUNK * self.bits // 8


@cache
def lloyd_max(bits: int) -> Levels:
    """The levels of 1, 2 or 4 bits."""
    magnitudes, thresholds = (np.array(values, np.float32) for values in _LLOYD_MAX[bits])
    return Levels(bits, magnitudes, thresholds)


@cache
def ternary(dead: float) -> Levels:
    """Zero, and one level for what reaches `dead` times the root mean square."""
    return Levels(2, np.array([0, 1], np.float32), np.array([dead], np.float32))


DEAD = 0.6
"""The dead zone of three levels that has the least mean square error for normal values."""

FALLBACK = 0.5
"""The dead zone of a block of three levels in which nothing reaches a wider one, as where all values are as large."""


TRITS = 5
"""Values of three levels in a byte: 3 ** 5 = 243."""

TRIT_BYTES = -(-CHUNK // TRITS)
"""Of a chunk. Byte j holds the values j, j + TRIT_BYTES, ...: the last 4 bytes have one value less."""


@dataclass(frozen=True)
class Strides:
    """How a value's own stride changes with its codes: by `grow` where it was too short, else by `shrink`.

    It was too short where the upper of two levels was needed (Jayant's quantiser), or, of one level, where the sign
    is that of the last code (as in continuously variable slope delta modulation): after a stride that is too long what
    is owed has the other sign. Means of blocks become 1 again every `EVEN_EVERY` codes; then no stride is further from
    it than `STRIDE_MOST`.
    """

    grow: np.float32
    shrink: np.float32


ONE_LEVEL = Strides(np.float32(2**0.125), np.float32(2**-0.0625))
FOUR_LEVELS = Strides(np.float32(2**0.2), np.float32(2**-0.08))
"""Chosen on recorded gradients of a small language model's experts."""

EVEN_EVERY = 16
STRIDE_MOST = 256.0
STRIDE_LEAST = 1 / STRIDE_MOST

NORMAL_SPREAD = 1.2533141
"""Root mean square of normal values in units of their mean magnitude."""


@dataclass(frozen=True)
class Pace:
    """How a value's own stride follows the values, so that over time a part `sent` of its codes isn't zero.

    A value whose magnitude reaches its stride is coded as `level` strides, with its sign, and another as zero; then its
    stride grows, or shrinks. That is even, whatever the values' distribution, where a part `sent` reach theirs
    (stochastic approximation of a quantile, after Robbins and Monro). `level`: the mean of what reaches a stride, in
    strides, as it was for gradients of a small language model's experts with what they are owed; a larger or smaller
    one would leave Adam's second moment too large or too small.
    """

    grow: np.float32
    shrink: np.float32
    level: np.float32


_PACE_OCTAVES = 0.2
"""From a stride after a code that isn't zero to one after zero. More wanders, less follows late."""


@cache
def pace(sent: float) -> Pace:
    """For the part that is to be sent, .02 to .4."""
    grow, shrink = _PACE_OCTAVES * (1 - sent), -_PACE_OCTAVES * sent
    return Pace(np.float32(2**grow), np.float32(2**shrink), np.float32(1.1 + 1.72 * sent))


STRIDE_RANGE = 4096.0
"""No stride stays further than that below the tensor's largest: a value that wakes up is soon followed."""


@dataclass(frozen=True)
class LevelCode:
    """How differences become levels: bits per value, values per scale, a factor on the scale, and the predictor.

    `gain` 0: no predictor. Else a copy's velocity, which keeps `rho` of itself per step, moves it by `gain` times
    itself. `adapts`: levels are in units of a stride of each value's own, which both ends know: see `Strides`.
    `dead`: where above 0, the levels are those of `ternary`, and `bits` is 2.
    """

    bits: int
    block: int
    factor: float = 1.0
    rho: float = 0.9
    gain: float = 0.0
    adapts: bool = False
    dead: float = 0.0

    @property
    def strides(self) -> Strides:
        """Of an adaptive code."""
        return FOUR_LEVELS if self.bits > 1 else ONE_LEVEL

    @property
    def levels(self) -> Levels:
        """The levels of that many bits, or three."""
        return ternary(self.dead) if self.dead else lloyd_max(self.bits)

    def sizes(self, chunks: int) -> tuple[int, int]:
        """Scales and code bytes of that many chunks."""
        return chunks * (CHUNK // self.block), chunks * self.levels.chunk_bytes


@cache
def log_magnitudes() -> npt.NDArray[np.float32]:
    """What the codes of a 4-bit logarithm stand for, as parts of the block's largest value."""
    return (2.0 ** (-np.arange(LOG_STEPS) / 2)).astype(np.float32)


@cache
def log_thresholds() -> npt.NDArray[np.float32]:
    """Parts of the block's largest value: a code is the number of these that a value lies under."""
    return (2.0 ** (-(np.arange(LOG_STEPS - 1) + 0.5) / 2)).astype(np.float32)


@cache
def fp8_magnitudes() -> npt.NDArray[np.float32]:
    """The magnitudes of e4m3 by code: 3 bits of mantissa, 4 of exponent, no infinity; the NaN is left out."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return values.astype(np.float32)


@cache
def fp8_values() -> npt.NDArray[np.float32]:
    """The values of all 256 codes of e4m3."""
    positive = np.append(fp8_magnitudes(), np.float32(np.nan))
    return np.concatenate([positive, -positive])
