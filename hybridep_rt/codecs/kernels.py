"""The codecs' inner loops for the CPU, compiled by numba: no interpreter lock, no memory allocated per block.

Each computes bit for bit what the function of the same name in `reference` does, which says what the arrays mean. So
sums run in the order of `lane_sum`, and nothing may be compiled with fast-math. Loops over a chunk have a constant
length, and arrays are indexed by row rather than sliced: else the compiler finds no vector instructions for them.
One file, long as it is: numba's cache would go on using a kernel after a change to what it calls in another file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from hybridep_rt.codecs.lanes import lane_sum
from hybridep_rt.codecs.levels import (
    CHUNK,
    FALLBACK,
    NORMAL_SPREAD,
    SAMPLE_RUN,
    STRIDE_LEAST,
    STRIDE_MOST,
    TINY,
    TRIT_BYTES,
    TRITS,
)

Function = TypeVar("Function", bound=Callable[..., Any])

_compiled: Callable[[Function], Function] = numba.njit(nogil=True, cache=True, error_model="numpy")
_SIGN = np.int32(-(2**31))
_MAGNITUDE = np.int32(2**31 - 1)
_NAN = 0x7FC0
_TINY = np.float32(TINY)
_FALLBACK = np.float32(FALLBACK)
_SPREAD, _LEAST, _MOST = np.float32(NORMAL_SPREAD), np.float32(STRIDE_LEAST), np.float32(STRIDE_MOST)
_LEAST_NORMAL = np.int32(np.float32(2.0**-6).view(np.int32))
_ROUND = np.float32(1.5 * 2**23)
"""Added to a small float and subtracted again, it leaves the nearest integer, ties to even."""


@_compiled
def _bf16(bits: int) -> int:
    """The 16 bits of a float32, given as its bits, rounded to nearest even; an infinity becomes NaN too."""
    if (bits & 0x7F800000) == 0x7F800000:
        return _NAN
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@_compiled
def _difference(x: Any, size: Any, values: Any, state: Any, velocity: Any, row: int, gain: Any, feedback: bool) -> None:
    """What has to be coded of one chunk: values plus what is owed, or minus what receivers hold."""
    if feedback:
        for i in range(CHUNK):
            x[i] = values[row, i] + state[row, i]
    elif len(velocity) > 0:
        for i in range(CHUNK):
            state[row, i] += gain * velocity[row, i]
            x[i] = values[row, i] - state[row, i]
    else:
        for i in range(CHUNK):
            x[i] = values[row, i] - state[row, i]
    for i in range(CHUNK):
        size[i] = abs(x[i])


@_compiled
def _spreads(square: Any, real: int, spread: Any) -> None:
    """The root of the mean square of the real values of each block, at every one of its values."""
    blocks, block = spread.shape
    for b in range(blocks):
        count = max(1, min(block, real - b * block))
        value = np.sqrt(lane_sum(square, b) / np.float32(count))
        for i in range(block):
            spread[b, i] = value


@_compiled
def _choose(size: Any, spread: Any, magnitudes: Any, thresholds: Any, index: Any, level: Any) -> None:
    """Index and magnitude of each value."""
    for i in range(CHUNK):
        index[i] = 0
        level[i] = magnitudes[0]
    for k in range(len(thresholds)):
        threshold = thresholds[k]
        magnitude = magnitudes[k + 1]
        for i in range(CHUNK):
            reached = not (size[i] < threshold * spread[i])
            index[i] += np.int32(reached)
            level[i] = magnitude if reached else level[i]


@_compiled
def _never_nothing(size: Any, spread: Any, index: Any, level: Any) -> None:
    """A narrower dead zone where a block of three levels would be coded as zeros alone."""
    blocks, block = size.shape
    for b in range(blocks):
        reached = np.int32(0)
        for i in range(block):
            reached |= index[b, i]
        if reached == 0:
            for i in range(block):
                index[b, i] = np.int32(not (size[b, i] < _FALLBACK * spread[b, i]))
                level[b, i] = np.float32(index[b, i])


@_compiled
def _fit(size: Any, level: Any, real: int, above: Any, below: Any) -> None:
    """Numerators and denominators of the least-squares scales."""
    for i in range(CHUNK):
        above[i] = size[i] * level[i]
        below[i] = level[i] * level[i]
    for i in range(real, CHUNK):
        below[i] = 0


@_compiled
def _fitted(above: Any, below: Any, scale: Any) -> None:
    """The least-squares scale of each block, at every one of its values."""
    blocks, block = scale.shape
    for b in range(blocks):
        square = lane_sum(below, b)
        value = lane_sum(above, b) / square if square > 0 else np.float32(0)
        for i in range(block):
            scale[b, i] = value


@_compiled
def _round_scales(scale: Any, scale_bits: Any, factor: Any, scales: Any, row: int) -> bool:
    """Each block's scale times the factor as bf16, on the wire and in `scale`. Whether one of them is NaN."""
    blocks, block = scale.shape
    spoilt = False
    for b in range(blocks):
        scale[b, 0] *= factor
        short = _bf16(scale_bits[b, 0])
        spoilt |= short == _NAN
        scales[row, b] = short
        bits = np.int32(short << 16)
        for i in range(block):
            scale_bits[b, i] = bits
    return spoilt


@_compiled
def _sign(bits: Any) -> Any:
    """-1 where the lowest bit is set, else 1."""
    return np.float32(1 - 2 * (bits & 1))


_RUNS = 8
"""Runs of a chunk whose signs share bytes: bit k of byte j is the sign of value k * 32 + j. Blocks are whole runs."""
_RUN = CHUNK // _RUNS


@_compiled
def _sign_scales(size: Any, real: int, factor: Any, scales: Any, row: int, scale: Any, scale_bits: Any) -> bool:
    """1 bit per value: each block's mean magnitude as bf16, on the wire and at its runs. Whether one of them is NaN."""
    blocks, block = size.shape
    spoilt = False
    for b in range(blocks):
        first = b * block // _RUN
        scale[first] = lane_sum(size, b) / np.float32(max(1, min(block, real - b * block))) * factor
        short = _bf16(scale_bits[first])
        spoilt |= short == _NAN
        scales[row, b] = short
        for k in range(first, (b + 1) * block // _RUN):
            scale_bits[k] = short << 16
    return spoilt


@_compiled
def _code_signs(
    x: Any, x_bits: Any, scale: Any, packed: Any, state: Any, velocity: Any, row: int, rho: Any, feedback: bool
) -> None:
    """Signs, and what they leave in the state, in one loop: an array between costs as much as all the rest."""
    for j in range(_RUN):
        packed[j] = 0
    for k in range(_RUNS):
        step, shift = scale[k], np.int32(k)
        if feedback:
            for j in range(_RUN):
                i = k * _RUN + j
                negative = (x_bits[i] >> 31) & 1
                packed[j] |= negative << shift
                state[row, i] = x[i] - step * _sign(negative)
        elif len(velocity) > 0:
            for j in range(_RUN):
                i = k * _RUN + j
                negative = (x_bits[i] >> 31) & 1
                packed[j] |= negative << shift
                state[row, i] += step * _sign(negative)
                velocity[row, i] = rho * velocity[row, i] + step * _sign(negative)
        else:
            for j in range(_RUN):
                i = k * _RUN + j
                negative = (x_bits[i] >> 31) & 1
                packed[j] |= negative << shift
                state[row, i] += step * _sign(negative)


@_compiled
def _forget_signs(scale: Any, state: Any, row: int) -> None:
    """Nothing is owed of blocks that aren't finite."""
    for k in range(_RUNS):
        if np.isnan(scale[k]):
            for i in range(k * _RUN, (k + 1) * _RUN):
                state[row, i] = 0


@_compiled
def _code_levels(x_bits: Any, scale: Any, bits: int, signed_zero: Any, level: Any, level_bits: Any, index: Any) -> None:
    """Signs above the indices; magnitudes become decoded values. `signed_zero`: 1 where the lowest index has a sign."""
    sign_bit = np.int32(bits - 1)
    for i in range(CHUNK):
        level[i] = level[i] * scale[i]
    for i in range(CHUNK):
        negative = (x_bits[i] >> 31) & (index[i] | signed_zero) & 1
        level_bits[i] |= np.int32(negative << 31)
        index[i] |= np.int32(negative << sign_bit)


@_compiled
def _spoil(scale: Any, x: Any, decoded: Any, feedback: bool) -> None:
    """Nothing is owed of blocks that aren't finite; receivers find one and the same NaN there."""
    for i in range(CHUNK):
        if np.isnan(scale[i]):
            x[i] = 0
            decoded[i] = np.float32(0) if feedback else scale[i]


@_compiled
def _settle(x: Any, decoded: Any, state: Any, velocity: Any, row: int, rho: Any, feedback: bool) -> None:
    """What a chunk leaves behind: what is still owed, or what the receivers hold now and how it moves."""
    if feedback:
        for i in range(CHUNK):
            state[row, i] = x[i] - decoded[i]
        return
    for i in range(CHUNK):
        state[row, i] += decoded[i]
    if len(velocity) > 0:
        for i in range(CHUNK):
            velocity[row, i] = rho * velocity[row, i] + decoded[i]


@_compiled
def _pack(index: Any, bits: int, codes: Any, row: int) -> None:
    """Byte j holds the codes j, j + width, j + 2 * width, ..., lowest bits first."""
    width = CHUNK * bits // 8
    for j in range(width):
        byte = np.int32(0)
        for k in range(8 // bits):
            byte |= np.int32(index[k * width + j] << np.int32(k * bits))
        codes[row, j] = np.uint8(byte)


@_compiled
def _pack_trits(index: Any, rest: Any, codes: Any, row: int) -> None:
    """Three levels as digits of base 3; see `reference.pack_trits`. Zeros have no sign here. `rest` is scratch."""
    for j in range(TRIT_BYTES):
        rest[j] = 0
    for k in range(TRITS - 1, -1, -1):
        first = k * TRIT_BYTES
        for j in range(min(TRIT_BYTES, CHUNK - first)):
            code = index[first + j]
            rest[j] = rest[j] * 3 + (code & 1) + (code >> 1)
    for j in range(TRIT_BYTES):
        codes[row, j] = np.uint8(rest[j])


@_compiled
def _unpack_trits(codes: Any, row: int, rest: Any, index: Any) -> None:
    """The inverse of `_pack_trits`. x * 171 >> 9 is x // 3 for a byte."""
    for j in range(TRIT_BYTES):
        rest[j] = np.int32(codes[row, j])
    for k in range(TRITS):
        first = k * TRIT_BYTES
        for j in range(min(TRIT_BYTES, CHUNK - first)):
            third = (rest[j] * np.int32(171)) >> np.int32(9)
            digit = rest[j] - third * np.int32(3)
            rest[j] = third
            index[first + j] = digit | (digit >> np.int32(1))


@_compiled
def drift(state: Any, velocity: Any, rho: Any, gain: Any) -> None:
    """What only the velocity moves, in rows of a chunk."""
    for row in range(len(state)):
        for i in range(state.shape[1]):
            state[row, i] += gain * velocity[row, i]
            velocity[row, i] *= rho


@_compiled
def encode_levels(
    values: Any,
    state: Any,
    velocity: Any,
    real: int,
    bits: int,
    three: bool,
    magnitudes: Any,
    thresholds: Any,
    factor: Any,
    rho: Any,
    gain: Any,
    feedback: bool,
    scales: Any,
    codes: Any,
) -> None:
    """Changes `state` and `velocity`, in rows of a chunk, of each of which the first `real` values count."""
    blocks = scales.shape[1]
    x, size, scale = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    level, above, below = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    x_bits, scale_bits, level_bits = x.view(np.int32), scale.view(np.int32), level.view(np.int32)
    shape = (blocks, CHUNK // blocks)
    size_B, scale_B, scale_bits_B = size.reshape(shape), scale.reshape(shape), scale_bits.reshape(shape)
    above_B, below_B = above.reshape(shape), below.reshape(shape)
    index = np.empty(CHUNK, np.int32)
    index_B, level_B = index.reshape(shape), level.reshape(shape)
    run_scale, packed = np.empty(_RUNS, np.float32), np.empty(_RUN, np.int32)
    run_scale_bits = run_scale.view(np.int32)
    rest = np.empty(TRIT_BYTES, np.int32)
    for row in range(len(values)):
        _difference(x, size, values, state, velocity, row, gain, feedback)
        if bits == 1:
            spoilt = _sign_scales(size_B, real, factor, scales, row, run_scale, run_scale_bits)
            _code_signs(x, x_bits, run_scale, packed, state, velocity, row, rho, feedback)
            for j in range(_RUN):
                codes[row, j] = np.uint8(packed[j])
            if feedback and spoilt:
                _forget_signs(run_scale, state, row)
            continue
        for i in range(CHUNK):
            above[i] = size[i] * size[i]
        _spreads(above_B, real, scale_B)
        _choose(size, scale, magnitudes, thresholds, index, level)
        if three:
            _never_nothing(size_B, scale_B, index_B, level_B)
        _fit(size, level, real, above, below)
        _fitted(above_B, below_B, scale_B)
        spoilt = _round_scales(scale_B, scale_bits_B, factor, scales, row)
        if three:
            _code_levels(x_bits, scale, 2, np.int32(0), level, level_bits, index)
            _pack_trits(index, rest, codes, row)
        elif bits == 2:
            _code_levels(x_bits, scale, 2, np.int32(1), level, level_bits, index)
            _pack(index, 2, codes, row)
        else:
            _code_levels(x_bits, scale, 4, np.int32(1), level, level_bits, index)
            _pack(index, 4, codes, row)
        if spoilt:
            _spoil(scale, x, level, feedback)
        _settle(x, level, state, velocity, row, rho, feedback)


@_compiled
def _spread_scales(scales: Any, row: int, scale_bits: Any) -> None:
    """Each block's scale at every one of its values, or runs of values."""
    blocks, block = scale_bits.shape
    for b in range(blocks):
        bits = np.int32(np.int32(scales[row, b]) << 16)
        for i in range(block):
            scale_bits[b, i] = bits


@_compiled
def _take_signs(
    scale: Any, codes: Any, packed: Any, state: Any, velocity: Any, row: int, rho: Any, gain: Any, add: bool
) -> None:
    """1 bit per value, each decoded where it is used: an array between costs as much as all the rest.

    `packed` is scratch: what reads bytes where it writes floats isn't compiled to vector instructions.
    """
    for j in range(_RUN):
        packed[j] = np.int32(codes[row, j])
    for k in range(_RUNS):
        step, shift = scale[k], np.int32(k)
        if not add:
            for j in range(_RUN):
                state[row, k * _RUN + j] = step * _sign(packed[j] >> shift)
        elif len(velocity) > 0:
            for j in range(_RUN):
                i = k * _RUN + j
                decoded = step * _sign(packed[j] >> shift)
                state[row, i] = (state[row, i] + gain * velocity[row, i]) + decoded
                velocity[row, i] = rho * velocity[row, i] + decoded
        else:
            for j in range(_RUN):
                state[row, k * _RUN + j] += step * _sign(packed[j] >> shift)


@_compiled
def _take(decoded: Any, state: Any, velocity: Any, row: int, rho: Any, gain: Any, add: bool) -> None:
    """Decoded values onto a copy, or in its place."""
    if not add:
        for i in range(CHUNK):
            state[row, i] = decoded[i]
    elif len(velocity) > 0:
        for i in range(CHUNK):
            state[row, i] = (state[row, i] + gain * velocity[row, i]) + decoded[i]
            velocity[row, i] = rho * velocity[row, i] + decoded[i]
    else:
        for i in range(CHUNK):
            state[row, i] += decoded[i]


@_compiled
def _unpack(codes: Any, row: int, bits: int, index: Any) -> None:
    """The inverse of `_pack`."""
    width = CHUNK * bits // 8
    mask = np.int32((1 << bits) - 1)
    for k in range(8 // bits):
        shift = np.int32(k * bits)
        for j in range(width):
            index[k * width + j] = (np.int32(codes[row, j]) >> shift) & mask


@_compiled
def _decode(index: Any, bits: int, magnitudes: Any, scale: Any, decoded: Any) -> None:
    """Levels times scales, with their signs."""
    for i in range(CHUNK):
        decoded[i] = magnitudes[0]
    mask = np.int32((1 << (bits - 1)) - 1)
    for k in range(1, len(magnitudes)):
        magnitude = magnitudes[k]
        for i in range(CHUNK):
            decoded[i] = magnitude if (index[i] & mask) >= k else decoded[i]
    sign_bit = np.int32(bits - 1)
    for i in range(CHUNK):
        decoded[i] = decoded[i] * scale[i] * _sign(index[i] >> sign_bit)


@_compiled
def decode_levels(
    scales: Any,
    codes: Any,
    state: Any,
    velocity: Any,
    bits: int,
    three: bool,
    magnitudes: Any,
    rho: Any,
    gain: Any,
    add: bool,
) -> None:
    """Changes `state` and `velocity`, in rows of a chunk."""
    blocks = scales.shape[1]
    scale, decoded = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    scale_bits_B = scale.view(np.int32).reshape((blocks, CHUNK // blocks))
    index, rest = np.empty(CHUNK, np.int32), np.empty(TRIT_BYTES, np.int32)
    run_scale, packed = np.empty(_RUNS, np.float32), np.empty(_RUN, np.int32)
    run_scale_bits_B = run_scale.view(np.int32).reshape((blocks, _RUNS // blocks))
    for row in range(len(state)):
        if bits == 1:
            _spread_scales(scales, row, run_scale_bits_B)
            _take_signs(run_scale, codes, packed, state, velocity, row, rho, gain, add)
            continue
        _spread_scales(scales, row, scale_bits_B)
        if three:
            _unpack_trits(codes, row, rest, index)
            _decode(index, 2, magnitudes, scale, decoded)
        elif bits == 2:
            _unpack(codes, row, 2, index)
            _decode(index, 2, magnitudes, scale, decoded)
        else:
            _unpack(codes, row, 4, index)
            _decode(index, 4, magnitudes, scale, decoded)
        _take(decoded, state, velocity, row, rho, gain, add)


@_compiled
def _even_out(strides: Any, row: int, real: int, stride: Any, stride_B: Any) -> None:
    """Give the blocks of a row of strides the mean 1, within bounds. `stride`, also as [blocks, block], is scratch."""
    blocks, block = stride_B.shape
    for i in range(CHUNK):
        stride[i] = abs(strides[row, i])
    for b in range(blocks):
        mean = lane_sum(stride_B, b) / np.float32(max(1, min(block, real - b * block)))
        if mean > 0:
            for i in range(block):
                stride_B[b, i] /= mean
        else:
            for i in range(block):
                stride_B[b, i] = 0
    for i in range(CHUNK):
        even = stride[i]
        even = _LEAST if even < _LEAST else even
        stride[i] = _MOST if even > _MOST else even
    for i in range(CHUNK):
        strides[row, i] = -stride[i] if strides[row, i] < 0 else stride[i]


@_compiled
def _reach(size: Any, b: int, bound: Any, low: Any, high: Any, stride: Any, index: Any, level: Any) -> None:
    """Which values of a block reach a bound in units of their strides; levels become magnitudes times strides."""
    for i in range(size.shape[1]):
        reached = not (size[b, i] < bound * stride[b, i])
        index[b, i] = np.int32(reached)
        level[b, i] = (high if reached else low) * stride[b, i]


@_compiled
def _adaptive_scales(
    size: Any, level: Any, index: Any, stride: Any, magnitudes: Any, thresholds: Any, scale: Any
) -> None:
    """The scale that makes levels as large as values; `level` becomes magnitudes times strides, `index` theirs."""
    blocks, block = size.shape
    for b in range(blocks):
        total, reach = lane_sum(size, b), lane_sum(stride, b)
        value = total / reach if reach > 0 else np.float32(0)
        if len(thresholds) > 0:
            low, high = magnitudes[0], magnitudes[1]
            _reach(size, b, value * _SPREAD * thresholds[0], low, high, stride, index, level)
            reach = lane_sum(level, b)
            value = total / reach if reach > 0 else np.float32(0)
        for i in range(block):
            scale[b, i] = value


@_compiled
def encode_adaptive(
    values: Any,
    owed: Any,
    strides: Any,
    real: int,
    bits: int,
    magnitudes: Any,
    thresholds: Any,
    grow: Any,
    shrink: Any,
    even: bool,
    scales: Any,
    codes: Any,
) -> None:
    """Changes `owed` and `strides`, in rows of a chunk, of each of which the first `real` values count."""
    shape = (scales.shape[1], CHUNK // scales.shape[1])
    x, size, scale = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    level, stride = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    index, before = np.zeros(CHUNK, np.int32), np.empty(CHUNK, np.int32)
    x_bits = x.view(np.int32)
    size_B, level_B, stride_B = size.reshape(shape), level.reshape(shape), stride.reshape(shape)
    index_B, scale_B, scale_bits_B = index.reshape(shape), scale.reshape(shape), scale.view(np.int32).reshape(shape)
    for row in range(len(values)):
        for i in range(CHUNK):
            x[i] = values[row, i] + owed[row, i]
            size[i] = abs(x[i])
            stride[i] = abs(strides[row, i])
            before[i] = np.int32(strides[row, i] < 0)
        _adaptive_scales(size_B, level_B, index_B, stride_B, magnitudes, thresholds, scale_B)
        spoilt = _round_scales(scale_B, scale_bits_B, np.float32(1), scales, row)
        if bits == 1:
            for i in range(CHUNK):
                negative = (x_bits[i] >> 31) & 1
                owed[row, i] = x[i] - stride[i] * scale[i] * _sign(negative)
                strides[row, i] = stride[i] * (grow if negative == before[i] else shrink) * _sign(negative)
                index[i] = negative
            _pack(index, 1, codes, row)
        else:
            for i in range(CHUNK):
                reached = index[i]
                negative = (x_bits[i] >> 31) & 1
                owed[row, i] = x[i] - level[i] * scale[i] * _sign(negative)
                strides[row, i] = stride[i] * (grow if reached == 1 else shrink) * _sign(negative)
                index[i] = reached | (negative << np.int32(1))
            _pack(index, 2, codes, row)
        if even:
            _even_out(strides, row, real, stride, stride_B)
        if spoilt:
            for i in range(CHUNK):
                if np.isnan(scale[i]):
                    owed[row, i] = 0


@_compiled
def decode_adaptive(
    scales: Any,
    codes: Any,
    into: Any,
    strides: Any,
    real: int,
    bits: int,
    magnitudes: Any,
    grow: Any,
    shrink: Any,
    even: bool,
) -> None:
    """Changes `into` and `strides`, in rows of a chunk, of each of which the first `real` values count."""
    shape = (scales.shape[1], CHUNK // scales.shape[1])
    scale, stride = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    index = np.empty(CHUNK, np.int32)
    scale_bits_B, stride_B = scale.view(np.int32).reshape(shape), stride.reshape(shape)
    low, high = magnitudes[0], magnitudes[len(magnitudes) - 1]
    for row in range(len(into)):
        _spread_scales(scales, row, scale_bits_B)
        if bits == 1:
            _unpack(codes, row, 1, index)
            for i in range(CHUNK):
                before = strides[row, i]
                into[row, i] = abs(before) * scale[i] * _sign(index[i])
                same = index[i] == np.int32(before < 0)
                strides[row, i] = abs(before) * (grow if same else shrink) * _sign(index[i])
        else:
            _unpack(codes, row, 2, index)
            for i in range(CHUNK):
                before, reached = abs(strides[row, i]), index[i] & 1
                sign = _sign(index[i] >> np.int32(1))
                into[row, i] = (high if reached == 1 else low) * before * scale[i] * sign
                strides[row, i] = before * (grow if reached == 1 else shrink) * sign
        if even:
            _even_out(strides, row, real, stride, stride_B)


@_compiled
def encode_paced(values: Any, owed: Any, strides: Any, grow: Any, shrink: Any, level: Any, codes: Any) -> bool:
    """Changes `owed` and `strides`, in rows of a chunk. Whether all values are finite."""
    x, index, rest = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int32), np.empty(TRIT_BYTES, np.int32)
    x_bits = x.view(np.int32)
    infinite = np.int32(0)
    for row in range(len(values)):
        for i in range(CHUNK):
            x[i] = values[row, i] + owed[row, i]
        for i in range(CHUNK):
            stride = strides[row, i]
            reached = np.int32(not (abs(x[i]) < stride))
            negative = (x_bits[i] >> 31) & reached
            infinite |= np.int32((x_bits[i] & np.int32(0x7F800000)) == np.int32(0x7F800000))
            decoded = level * stride * _sign(negative)
            owed[row, i] = x[i] - (decoded if reached == 1 else np.float32(0))
            strides[row, i] = stride * (grow if reached == 1 else shrink)
            index[i] = reached | (negative << np.int32(1))
        _pack_trits(index, rest, codes, row)
    return bool(infinite == 0)


@_compiled
def decode_paced(codes: Any, into: Any, strides: Any, grow: Any, shrink: Any, level: Any) -> None:
    """Changes `into` and `strides`, in rows of a chunk."""
    index, rest = np.empty(CHUNK, np.int32), np.empty(TRIT_BYTES, np.int32)
    for row in range(len(into)):
        _unpack_trits(codes, row, rest, index)
        for i in range(CHUNK):
            stride, reached = strides[row, i], index[i] & 1
            decoded = level * stride * _sign(index[i] >> np.int32(1))
            into[row, i] = decoded if reached == 1 else np.float32(0)
            strides[row, i] = stride * (grow if reached == 1 else shrink)


@_compiled
def _largest(bits: Any, row: int) -> Any:
    """The bits of the largest magnitude of a row; those of a NaN are larger than any number's."""
    found = np.int32(0)
    for i in range(bits.shape[1]):
        found = max(found, np.int32(bits[row, i] & _MAGNITUDE))
    return found


@_compiled
def _fp8(x: Any, bits: int) -> Any:
    """The e4m3 code of a value, also given as its bits, whose magnitude is at most 448."""
    sign = (bits >> 24) & 128
    size = bits & _MAGNITUDE
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    small = np.int32((abs(x) * np.float32(512) + _ROUND) - _ROUND)
    return sign | (small if size < _LEAST_NORMAL else rounded - (120 << 3))


@_compiled
def encode_scaled(values: Any, bits: Any, fp8: bool, scales: Any, codes: Any) -> None:
    """`bits`: the same memory as `values` [blocks, block], as int32."""
    width = values.shape[1]
    x = np.empty(width, np.float32)
    x_bits = x.view(np.int32)
    word = np.empty(1, np.float32)
    word_bits = word.view(np.int32)
    top = np.float32(448) if fp8 else np.float32(127)
    for row in range(len(values)):
        word_bits[0] = _largest(bits, row)
        word[0] /= top
        if word[0] < _TINY:
            word[0] = 0
        short = _bf16(word_bits[0])
        scales[row] = short
        word_bits[0] = short << 16
        if not word[0] > 0:
            for i in range(width):
                codes[row, i] = 0
            continue
        inverse = np.float32(1) / word[0]
        for i in range(width):
            y = values[row, i] * inverse
            y = top if y > top else y
            x[i] = -top if y < -top else y
        if fp8:
            for i in range(width):
                codes[row, i] = np.uint8(_fp8(x[i], x_bits[i]))
        else:
            for i in range(width):
                codes[row, i] = np.uint8(np.int32((x[i] + _ROUND) - _ROUND))


@_compiled
def decode_scaled(scales: Any, codes: Any, fp8: bool, table: Any, values: Any) -> None:
    """`table`: the 256 values of an fp8 code."""
    width = values.shape[1]
    word = np.empty(1, np.float32)
    word_bits = word.view(np.int32)
    for row in range(len(values)):
        word_bits[0] = np.int32(scales[row]) << 16
        scale = word[0]
        if fp8:
            for i in range(width):
                values[row, i] = table[codes[row, i]] * scale
        else:
            for i in range(width):
                values[row, i] = np.float32(np.int8(codes[row, i])) * scale


@_compiled
def sample_sizes(values: Any, state: Any, feedback: bool, sizes: Any) -> None:
    """Magnitudes at the positions of `reference.sample`, where not all are asked for."""
    runs = len(sizes) // SAMPLE_RUN
    for run in range(runs):
        start = run * (len(values) - SAMPLE_RUN) // runs
        for i in range(SAMPLE_RUN):
            held = state[start + i]
            x = values[start + i] + held if feedback else values[start + i] - held
            sizes[run * SAMPLE_RUN + i] = abs(x)


@_compiled
def nth_size(bits: Any, n: int) -> Any:
    """The bits of the `n`-th smallest magnitude, from 0, of magnitudes given as their bits, in whose order they are.

    Found by bisection: counting what lies under a bound takes vector instructions, which sorting doesn't.
    """
    found = np.int32(0)
    for bit in range(30, -1, -1):
        bound = np.int32(found | (1 << bit))
        under = np.int32(0)
        for i in range(len(bits)):
            under = np.int32(under + np.int32(bits[i] < bound))
        if under <= n:
            found = bound
    return found


@_compiled
def select_sparse(
    values: Any, state: Any, first: int, feedback: bool, threshold: Any, found: int, positions: Any, picked: Any
) -> int:
    """Note entries of `values` [rows, width], whose first has position `first`, after the `found` that are known.

    Where `feedback`, `state` becomes what was looked at. Returns how many are known now: 8 at least stay free, since
    8 values at a time are noted without asking which they are.
    """
    capacity, width = len(positions) - 8, values.shape[1]
    padded = (width + 7) // 8 * 8
    x, reached = np.empty(padded, np.float32), np.zeros(padded, np.uint8)
    x_8, reached_8, words = x.reshape((-1, 8)), reached.reshape((-1, 8)), reached.view(np.uint64)
    for row in range(len(values)):
        if feedback:
            for i in range(width):
                x[i] = values[row, i] + state[row, i]
            for i in range(width):
                state[row, i] = x[i]
        else:
            for i in range(width):
                x[i] = values[row, i] - state[row, i]
        for i in range(width):
            reached[i] = np.uint8(not abs(x[i]) < threshold)
        for word in range(len(words)):
            if words[word] != 0:
                start = first + row * width + word * 8
                for i in range(8):
                    positions[found] = start + i
                    picked[found] = x_8[word, i]
                    found += int(reached_8[word, i])
                found = min(found, capacity)
    return found


@_compiled
def settle_sparse(positions: Any, picked: Any, decoded: Any, state: Any, feedback: bool) -> None:
    """Changes `state` where entries were sent: see `cpu.settle`."""
    for k in range(len(positions)):
        i = positions[k]
        if not feedback:
            state[i] += decoded[k]
        elif np.isnan(decoded[k]):
            state[i] = 0
        else:
            state[i] = picked[k] - decoded[k]


@_compiled
def write_gaps(positions: Any, gaps: Any) -> int:
    """Fill `gaps`, which is long enough for any entries; returns how many bytes that took."""
    used = 0
    after = 0
    for position in positions:
        skip = position - after
        while skip >= 255:
            gaps[used] = 255
            used += 1
            skip -= 255
        gaps[used] = skip
        used += 1
        after = position + 1
    return used


@_compiled
def apply_sparse(gaps: Any, decoded: Any, state: Any) -> None:
    """Add the entries to `state`. Whoever calls has checked that the gaps end inside it, with as many entries."""
    at = 0
    entry = 0
    for gap in gaps:
        at += gap
        if gap != 255:
            state[at] += decoded[entry]
            at += 1
            entry += 1


@_compiled
def track_moment(values: Any, moment: Any, beta: Any) -> None:
    """Moving average of the squares, in place."""
    rest = np.float32(1) - beta
    for i in range(len(values)):
        moment[i] = beta * moment[i] + rest * (values[i] * values[i])


@_compiled
def encode_logs(values: Any, bits: Any, thresholds: Any, scales: Any, codes: Any) -> None:
    """`values` and the same memory as int32 `bits`: [rows, 256]."""
    blocks = scales.shape[1]
    largest = np.empty(CHUNK, np.float32)
    largest_bits_B = largest.view(np.int32).reshape((blocks, CHUNK // blocks))
    index = np.empty(CHUNK, np.int32)
    bits_B = bits.reshape((len(bits) * blocks, CHUNK // blocks))
    for row in range(len(values)):
        for b in range(blocks):
            short = _bf16(_largest(bits_B, row * blocks + b))
            scales[row, b] = short
            word = np.int32(short << 16)
            for i in range(CHUNK // blocks):
                largest_bits_B[b, i] = word
        for i in range(CHUNK):
            index[i] = 0
        for k in range(len(thresholds)):
            threshold = thresholds[k]
            for i in range(CHUNK):
                index[i] += np.int32(values[row, i] < threshold * largest[i])
        _pack(index, 4, codes, row)


@_compiled
def adamw(
    parameter: Any,
    gradient: Any,
    mean: Any,
    square: Any,
    moment: Any,
    decay: Any,
    weight: Any,
    beta: Any,
    rest: Any,
    root: Any,
    epsilon: Any,
    rate: Any,
) -> None:
    """A step of `torch.optim.AdamW`, of rows that fit in a cache; see `update.Numbers` for the numbers.

    With one division less than torch: m / (sqrt(v) / root + epsilon) = root * m / (sqrt(v) + root * epsilon).

    `moment`: where it has rows, what takes the place of the average of squared gradients, before its bias.
    """
    small = weight < np.float32(0.5)
    coefficient = weight if small else weight - np.float32(1)
    pace, bound = rate * root, epsilon * root
    bias = root * root
    width = parameter.shape[1]
    for row in range(len(parameter)):
        if len(moment) > 0:
            for i in range(width):
                square[row, i] = moment[row, i] * bias
        else:
            for i in range(width):
                g = gradient[row, i]
                square[row, i] = square[row, i] * beta + rest * g * g
        for i in range(width):
            g, m = gradient[row, i], mean[row, i]
            m = (m if small else g) + coefficient * (g - m)
            mean[row, i] = m
            parameter[row, i] = parameter[row, i] * decay - pace * (m / (np.sqrt(square[row, i]) + bound))


_ROWS = 256
"""Chunks that are stepped before they are coded: 256 KB of each array; a core's own cache has the weights still then.

With fewer, the start of each pass costs more than its memory saves."""


@_compiled
def adamw_and_encode_levels(
    values: Any,
    gradient: Any,
    mean: Any,
    square: Any,
    moment: Any,
    decay: Any,
    weight: Any,
    beta: Any,
    rest: Any,
    root: Any,
    epsilon: Any,
    rate: Any,
    state: Any,
    velocity: Any,
    bits: int,
    three: bool,
    magnitudes: Any,
    thresholds: Any,
    factor: Any,
    rho: Any,
    gain: Any,
    scales: Any,
    codes: Any,
) -> None:
    """`adamw` and `encode_levels`, some rows of a chunk at a time: the same bits in one pass over the memory."""
    for first in range(0, len(values), _ROWS):
        part = slice(first, first + _ROWS)
        adamw(
            values[part], gradient[part], mean[part], square[part], moment[part],
            decay, weight, beta, rest, root, epsilon, rate,
        )  # fmt: skip
        encode_levels(
            values[part], state[part], velocity[part], CHUNK, bits, three, magnitudes, thresholds,
            factor, rho, gain, False, scales[part], codes[part],
        )  # fmt: skip
