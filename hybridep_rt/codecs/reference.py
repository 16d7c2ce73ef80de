"""What every codec computes, in plain numpy: the oracle that `kernels` and `device` have to agree with, bit for bit.

All values are float32 and flat. Nothing is changed in place. Sums run in the order of `lane_sum` and nothing is fused,
so that every machine finds the same bits. A block with an infinity or a NaN gets the scale NaN and decodes to NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridep_rt.codecs.levels import (
    CHUNK,
    FALLBACK,
    GROUP,
    LANES,
    LOG_STEPS,
    NORMAL_SPREAD,
    SAMPLE_RUN,
    STRIDE_LEAST,
    STRIDE_MOST,
    TINY,
    TRIT_BYTES,
    TRITS,
    Levels,
    Pace,
    Strides,
    fp8_magnitudes,
    fp8_values,
    log_magnitudes,
    log_thresholds,
)

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]
Octets = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_NAN = 0x7FC0


class Coded(NamedTuple):
    """Scales [blocks] in bf16 bits, and packed codes."""

    scales: Words
    codes: Octets


def to_bf16(values: Floats) -> Words:
    """The bits of the nearest bfloat16, ties to even; every infinity and NaN becomes one NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isfinite(values), rounded, _NAN).astype(np.uint16)


def from_bf16(bits: Words) -> Floats:
    """The float32 of the same value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def lane_sum(blocks: Floats) -> Floats:
    """[blocks, block] -> [blocks]. Element i is added to lane i % 16 in order; then lanes are added half onto half."""
    lanes = np.zeros((len(blocks), LANES), np.float32)
    for part in np.split(blocks, blocks.shape[1] // LANES, axis=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def encode_levels(
    values: Floats,
    state: Floats,
    velocity: Floats | None,
    *,
    block: int,
    levels: Levels,
    factor: float,
    rho: float,
    gain: float,
    feedback: bool,
) -> tuple[Coded, Floats, Floats | None]:
    """Code `values - state` (what receivers lack), or `values + state` (with what is owed) where `feedback`.

    Returns the code, the state after it (what receivers hold; what is owed) and the velocity. A velocity predicts: the
    state first moves by `gain` times it, and it becomes `rho` times itself plus what was coded.
    """
    if velocity is not None:
        state = state + np.float32(gain) * velocity
    x = values + state if feedback else values - state
    size_B = _blocks(np.abs(x), block)
    real_B = _real(len(x), block, len(size_B))
    count = np.maximum(real_B.sum(1), 1).astype(np.float32)
    index = np.zeros(size_B.shape, np.uint8)
    if levels.bits == 1:
        scale = lane_sum(size_B) / count
    else:
        spread = np.sqrt(lane_sum(size_B * size_B) / count)
        for threshold in levels.thresholds:
            index += ~(size_B < threshold * spread[:, None])
        index = _never_nothing(index, size_B, spread[:, None], levels)
        level_B = levels.magnitudes[index]
        above, below = lane_sum(size_B * level_B), lane_sum(np.where(real_B, level_B * level_B, np.float32(0)))
        scale = _ratio(above, below)
    scales = to_bf16(scale * np.float32(factor))
    negative = _blocks(np.signbit(x).astype(np.uint8), block)
    coded = Coded(scales, _packed(np.asarray(negative << (levels.bits - 1) | index, np.uint8), levels))
    decoded = _decoded(coded, block, levels)[: len(x)]
    if feedback:
        spoilt = np.isnan(decoded)
        return coded, np.where(spoilt, np.float32(0), x - decoded), velocity
    return coded, state + decoded, None if velocity is None else np.float32(rho) * velocity + decoded


def decode_levels(
    coded: Coded,
    state: Floats,
    velocity: Floats | None,
    *,
    block: int,
    levels: Levels,
    rho: float,
    gain: float,
    add: bool,
) -> tuple[Floats, Floats | None]:
    """The receiver's state and velocity after a code: what it held plus the code, or the code alone."""
    decoded = _decoded(coded, block, levels)[: len(state)]
    if not add:
        return decoded, velocity
    if velocity is None:
        return state + decoded, None
    return (state + np.float32(gain) * velocity) + decoded, np.float32(rho) * velocity + decoded


def encode_adaptive(
    values: Floats, owed: Floats, strides: Floats, *, block: int, levels: Levels, pace: Strides, even: bool
) -> tuple[Coded, Floats, Floats]:
    """Code `values + owed` in levels of 1 or 2 bits that are in units of each value's stride.

    A scale makes the sum of the levels' magnitudes that of the values. Returns the code, what is owed after it and the
    strides, whose sign is that of the last code. `even`: their blocks' means become 1.
    """
    x = values + owed
    size_B, stride_B = _blocks(np.abs(x), block), _blocks(np.abs(strides), block)
    total, reach = lane_sum(size_B), lane_sum(stride_B)
    index = np.zeros(size_B.shape, np.uint8)
    if levels.bits > 1:
        mean = _ratio(total, reach)
        bound = mean * np.float32(NORMAL_SPREAD) * levels.thresholds[0]
        index += ~(size_B < bound[:, None] * stride_B)
        reach = lane_sum(levels.magnitudes[index] * stride_B)
    scales = to_bf16(_ratio(total, reach))
    negative = _blocks(np.signbit(x).astype(np.uint8), block)
    coded = Coded(scales, _packed(np.asarray(negative << (levels.bits - 1) | index, np.uint8), levels))
    decoded, strides = decode_adaptive(coded, strides, block=block, levels=levels, pace=pace, even=even)
    return coded, np.where(np.isnan(decoded), np.float32(0), x - decoded), strides


def decode_adaptive(
    coded: Coded, strides: Floats, *, block: int, levels: Levels, pace: Strides, even: bool
) -> tuple[Floats, Floats]:
    """The values of a code, and the strides after it."""
    elements = len(strides)
    index, negative = _split(coded, block, levels)
    stride_B, before = _blocks(np.abs(strides), block), _blocks(strides < 0, block)
    signs = np.where(negative, np.float32(-1), np.float32(1))
    decoded = levels.magnitudes[index] * stride_B * from_bf16(coded.scales)[:, None] * signs
    longer = index > 0 if levels.bits > 1 else negative == before
    stride_B = stride_B * np.where(longer, pace.grow, pace.shrink)
    if even:
        count = np.maximum(_real(elements, block, len(stride_B)).sum(1), 1).astype(np.float32)
        mean = (lane_sum(stride_B) / count)[:, None]
        even_B = np.divide(stride_B, mean, out=np.zeros_like(stride_B), where=mean > 0)
        stride_B = np.clip(even_B, np.float32(STRIDE_LEAST), np.float32(STRIDE_MOST))
    return decoded.reshape(-1)[:elements], (stride_B * signs).reshape(-1)[:elements]


def encode_paced(values: Floats, owed: Floats, strides: Floats, *, pace: Pace) -> tuple[Octets, Floats, Floats]:
    """Code `values + owed` in three levels, of which zero is what doesn't reach a value's stride.

    Returns the codes as `pack_trits` packs them, what is owed after it, and the strides.
    """
    x = values + owed
    reached = ~(np.abs(x) < strides)
    codes = np.where(reached, 1 + 2 * np.signbit(x), 0).astype(np.uint8)
    packed = pack_trits(np.pad(codes, (0, -len(x) % CHUNK)))
    decoded, strides = decode_paced(packed, strides, pace=pace)
    return packed, x - decoded, strides


def decode_paced(packed: Octets, strides: Floats, *, pace: Pace) -> tuple[Floats, Floats]:
    """The values of a code, and the strides after it."""
    codes = unpack_trits(packed)[: len(strides)]
    reached, sign = codes > 0, np.where(codes > 1, np.float32(-1), np.float32(1))
    decoded = np.where(reached, pace.level * strides * sign, np.float32(0))
    return decoded, strides * np.where(reached, pace.grow, pace.shrink)


def pack(codes: Octets, bits: int) -> Octets:
    """Codes of `bits` bits into bytes, chunk by chunk: byte j holds the codes j, j + width, ..., lowest bits first."""
    width = CHUNK * bits // 8
    parts = codes.reshape(-1, CHUNK // width, width)
    packed = np.zeros((len(parts), width), np.uint8)
    for k in range(parts.shape[1]):
        packed |= parts[:, k] << (k * bits)
    return packed.reshape(-1)


def unpack(packed: Octets, bits: int) -> Octets:
    """The codes that `pack` packed."""
    width = CHUNK * bits // 8
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Octets = packed.reshape(-1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(-1)


def pack_trits(codes: Octets) -> Octets:
    """2-bit codes of three levels as digits of base 3, 5 in a byte: 0 for zero, 1 for plus, 2 for minus."""
    trits = np.where(codes & 1, 1 + (codes >> 1), 0).reshape(-1, CHUNK)
    digits = np.pad(trits, ((0, 0), (0, TRITS * TRIT_BYTES - CHUNK))).reshape(-1, TRITS, TRIT_BYTES)
    return np.asarray((digits * 3 ** np.arange(TRITS)[:, None]).sum(1), np.uint8).reshape(-1)


def unpack_trits(packed: Octets) -> Octets:
    """The codes that `pack_trits` packed, zero without a sign. A byte over 242 stands for what it is without 243."""
    digits = packed.reshape(-1, 1, TRIT_BYTES) // 3 ** np.arange(TRITS)[:, None] % 3
    digits = digits.reshape(-1, TRITS * TRIT_BYTES)[:, :CHUNK].reshape(-1)
    return np.where(digits == 2, 3, digits).astype(np.uint8)


def encode_scaled(values: Floats, *, block: int, fp8: bool) -> Coded:
    """Each block's values as int8 or fp8 (e4m3) multiples of its scale, so that the largest just fits."""
    padded = np.pad(values, (0, -len(values) % block)).reshape(-1, block)
    scales = _top_scale(_largest(padded), 448 if fp8 else 127)
    inverse = _inverse(from_bf16(scales))[:, None]
    x = np.where(inverse > 0, padded, np.float32(0)) * inverse
    codes = _to_fp8(x) if fp8 else np.clip(np.rint(x), -127, 127).astype(np.int8).view(np.uint8)
    return Coded(scales, codes.reshape(-1)[: len(values)])


def decode_scaled(coded: Coded, *, block: int, fp8: bool) -> Floats:
    """Values of the codes times their block's scale."""
    values: Floats = fp8_values()[coded.codes] if fp8 else coded.codes.view(np.int8).astype(np.float32)
    return values * np.repeat(from_bf16(coded.scales), block)[: len(values)]


class Sparse(NamedTuple):
    """Some entries of a tensor: a scale for each 256 of them, a signed byte for each, and gaps between positions.

    A gap byte under 255 skips that many positions and then stands for an entry; 255 skips 255 and no entry follows.
    """

    scales: Words
    codes: Octets
    gaps: Octets


def sample(elements: int, size: int) -> Positions:
    """At most `size` positions, evenly spread in short runs: where a threshold is taken from."""
    if elements <= size:
        return np.arange(elements)
    runs = size // SAMPLE_RUN
    starts = np.arange(runs, dtype=np.int64) * (elements - SAMPLE_RUN) // runs
    return (starts[:, None] + np.arange(SAMPLE_RUN)).reshape(-1)


def threshold_of(sizes: Floats, fraction: float) -> np.float32:
    """The magnitude that the wanted fraction of a sample reaches, above 0 so that no zero is ever sent."""
    if len(sizes) == 0:
        return np.float32(TINY)
    kept = max(1, round(fraction * len(sizes)))
    return max(np.partition(sizes, len(sizes) - kept)[len(sizes) - kept], np.float32(TINY))


def select(x: Floats, threshold: np.float32, capacity: int) -> Positions:
    """Positions of the first `capacity` values that reach the threshold or are NaN."""
    return np.flatnonzero(~(np.abs(x) < threshold))[:capacity]


def encode_sparse(picked: Floats, positions: Positions) -> tuple[Sparse, Floats]:
    """The entries' bytes, and what they decode to."""
    coded = encode_scaled(picked, block=GROUP, fp8=False)
    decoded = decode_scaled(coded, block=GROUP, fp8=False)
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // 255
    packed = np.full(len(gaps) + int(escapes.sum()), 255, np.uint8)
    packed[np.cumsum(escapes + 1) - 1] = gaps % 255
    return Sparse(coded.scales, coded.codes, packed), decoded


def decode_sparse(sparse: Sparse) -> tuple[Floats, Positions]:
    """Values and positions of the entries."""
    entry = sparse.gaps != 255
    positions = np.cumsum(sparse.gaps.astype(np.int64) + entry)[entry] - 1
    return decode_scaled(Coded(sparse.scales, sparse.codes), block=GROUP, fp8=False), positions


def encode_logs(values: Floats, *, block: int) -> Coded:
    """Values >= 0 as 4-bit logarithms in steps of half a power of two, down from their block's largest."""
    values_B = _blocks(values, block)
    scales = to_bf16(_largest(values_B))
    largest = from_bf16(scales)[:, None]
    codes = np.zeros(values_B.shape, np.uint8)
    for threshold in log_thresholds():
        codes += values_B < threshold * largest
    return Coded(scales, pack(codes, 4))


def decode_logs(coded: Coded, *, block: int) -> Floats:
    """The values of the codes, padded to whole chunks."""
    magnitudes = log_magnitudes()[unpack(coded.codes, LOG_STEPS.bit_length() - 1)].reshape(-1, block)
    return (magnitudes * from_bf16(coded.scales)[:, None]).reshape(-1)


def _blocks(values: Array, block: int) -> Array:
    """[blocks, block], padded with zeros to whole chunks."""
    return np.pad(values, (0, -len(values) % CHUNK)).reshape(-1, block)


def _real(elements: int, block: int, blocks: int) -> npt.NDArray[np.bool_]:
    return (np.arange(blocks * block) < elements).reshape(blocks, block)


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where there is nothing below."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _never_nothing(index: Octets, size_B: Floats, unit_B: Floats, levels: Levels) -> Octets:
    """The indices, by a narrower dead zone where a block of three levels would be coded as zeros alone."""
    nothing = ~((index > 0) & (unit_B != 0)).any(1, keepdims=True) & levels.is_ternary
    return np.where(nothing, ~(size_B < np.float32(FALLBACK) * unit_B), index).astype(np.uint8)


def _packed(codes: Octets, levels: Levels) -> Octets:
    return pack_trits(codes) if levels.is_ternary else pack(codes, levels.bits)


def _split(coded: Coded, block: int, levels: Levels) -> tuple[Octets, npt.NDArray[np.bool_]]:
    """Indices of magnitudes [blocks, block], and which values are negative."""
    codes = (unpack_trits(coded.codes) if levels.is_ternary else unpack(coded.codes, levels.bits)).reshape(-1, block)
    return codes & np.uint8(2 ** (levels.bits - 1) - 1), codes >> (levels.bits - 1) > 0


def _decoded(coded: Coded, block: int, levels: Levels) -> Floats:
    index, negative = _split(coded, block, levels)
    scale = from_bf16(coded.scales)[:, None]
    size = levels.magnitudes[index] * scale if levels.bits > 1 else np.broadcast_to(scale, index.shape)
    return (size * np.where(negative, np.float32(-1), np.float32(1))).reshape(-1)


def _largest(blocks: Floats) -> Floats:
    """Each block's largest magnitude, or NaN where there is one: as integers a NaN is larger than any number."""
    bits = blocks.view(np.int32) & 0x7FFFFFFF
    return np.asarray(bits.max(axis=1, initial=0), np.int32).view(np.float32)


def _top_scale(largest: Floats, top: int) -> Words:
    """What `top` stands for; 0 for blocks so small that the scale's inverse would overflow."""
    scale = largest / np.float32(top)
    return to_bf16(np.where(scale < np.float32(TINY), np.float32(0), scale))


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for the scales 0 and NaN."""
    usable = scale > 0
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)


def _to_fp8(x: Floats) -> Octets:
    """The nearest of the 127 magnitudes of e4m3, ties to the even code, with a sign bit."""
    magnitudes = fp8_magnitudes()
    size = np.minimum(np.abs(x), magnitudes[-1])
    low = np.minimum(np.searchsorted(magnitudes, size, side="right") - 1, len(magnitudes) - 2)
    middle = (magnitudes[low] + magnitudes[low + 1]) / 2
    code = low + ((size > middle) | ((size == middle) & (low % 2 == 1)))
    return np.asarray(code | np.where(np.signbit(x), 128, 0), np.uint8)
