"""Coding of flat float32 tensors in main memory: `kernels` for whole chunks, and once more for a padded rest.

`device` has the same functions for tensors elsewhere. Bytes go to and come from numpy arrays in main memory.
"""

from __future__ import annotations

import numpy as np
import torch

from hybridep_rt.codecs import kernels
from hybridep_rt.codecs.levels import (
    CHUNK,
    GROUP,
    SAMPLE_RUN,
    TINY,
    TRIT_BYTES,
    LevelCode,
    Pace,
    fp8_values,
    log_thresholds,
)
from hybridep_rt.codecs.reference import Array, Coded, Floats, Octets, Positions
from hybridep_rt.codecs.update import Update

_SCAN = 128


def encode_levels(
    values: torch.Tensor,
    state: torch.Tensor,
    velocity: torch.Tensor | None,
    code: LevelCode,
    feedback: bool,
    out: Coded,
) -> None:
    """Code values against a state, which is changed in place; see `reference.encode_levels`. Fills `out`."""
    scales, codes = out.scales.reshape(-1, CHUNK // code.block), out.codes.reshape(-1, code.levels.chunk_bytes)
    source, held, moving = values.numpy(), state.numpy(), _or_empty(velocity)
    whole = len(source) // CHUNK

    def run(source: Array, held: Array, moving: Array, real: int, first: int, last: int) -> None:
        kernels.encode_levels(
            source, held, moving, real, code.bits, code.levels.is_ternary, code.levels.magnitudes,
            code.levels.thresholds, np.float32(code.factor), np.float32(code.rho), np.float32(code.gain), feedback,
            scales[first:last], codes[first:last],
        )  # fmt: skip

    run(_rows(source, CHUNK), _rows(held, CHUNK), _rows(moving, CHUNK), CHUNK, 0, whole)
    if rest := len(source) % CHUNK:
        padded, held_rest, moving_rest = (_padded(array[whole * CHUNK :], CHUNK) for array in (source, held, moving))
        run(padded, held_rest, moving_rest, rest, whole, whole + 1)
        _restore(held_rest, held[whole * CHUNK :])
        _restore(moving_rest, moving[whole * CHUNK :])


def update_and_encode_levels(
    values: torch.Tensor,
    state: torch.Tensor,
    velocity: torch.Tensor | None,
    code: LevelCode,
    update: Update,
    out: Coded,
) -> None:
    """`encode_levels` of the values after an update, which is made on their memory."""
    whole = len(values) // CHUNK
    parameter, gradient, mean, square, moment = update.rows(CHUNK)
    held, moving = _rows(state.numpy(), CHUNK), _rows(_or_empty(velocity), CHUNK)
    scales, codes = out.scales.reshape(-1, CHUNK // code.block), out.codes.reshape(-1, code.levels.chunk_bytes)
    kernels.adamw_and_encode_levels(
        parameter, gradient, mean, square, moment, *update.numbers, held, moving, code.bits,
        code.levels.is_ternary, code.levels.magnitudes, code.levels.thresholds, np.float32(code.factor),
        np.float32(code.rho), np.float32(code.gain), scales[:whole], codes[:whole],
    )  # fmt: skip
    if whole * CHUNK < len(values):
        rest = slice(whole * CHUNK, len(values))
        update.part(rest.start, rest.stop).run()
        tail = Coded(out.scales[whole * CHUNK // code.block :], out.codes[whole * code.levels.chunk_bytes :])
        encode_levels(values[rest], state[rest], None if velocity is None else velocity[rest], code, False, tail)


def decode_levels(coded: Coded, state: torch.Tensor, velocity: torch.Tensor | None, code: LevelCode, add: bool) -> None:
    """Add a code to a state, or write it there; see `reference.decode_levels`."""
    scales, codes = coded.scales.reshape(-1, CHUNK // code.block), coded.codes.reshape(-1, code.levels.chunk_bytes)
    held, moving = state.numpy(), _or_empty(velocity)
    whole = len(held) // CHUNK

    def run(held: Array, moving: Array, first: int, last: int) -> None:
        kernels.decode_levels(
            scales[first:last], codes[first:last], held, moving, code.bits, code.levels.is_ternary,
            code.levels.magnitudes, np.float32(code.rho), np.float32(code.gain), add,
        )  # fmt: skip

    run(_rows(held, CHUNK), _rows(moving, CHUNK), 0, whole)
    if len(held) % CHUNK:
        held_rest, moving_rest = (_padded(array[whole * CHUNK :], CHUNK) for array in (held, moving))
        run(held_rest, moving_rest, whole, whole + 1)
        _restore(held_rest, held[whole * CHUNK :])
        _restore(moving_rest, moving[whole * CHUNK :])


def drift(state: torch.Tensor, velocity: torch.Tensor, code: LevelCode) -> None:
    """Move a state by its velocity alone, which keeps `rho` of itself."""
    held, moving = state.numpy(), velocity.numpy()
    whole = len(held) // CHUNK * CHUNK
    for part, width in ((slice(0, whole), CHUNK), (slice(whole, len(held)), 1)):
        kernels.drift(_rows(held[part], width), _rows(moving[part], width), np.float32(code.rho), np.float32(code.gain))


def encode_adaptive(
    values: torch.Tensor, owed: torch.Tensor, strides: torch.Tensor, code: LevelCode, even: bool, out: Coded
) -> None:
    """Code values in units of their strides; see `reference.encode_adaptive`. Changes `owed` and `strides`."""
    scales, codes = out.scales.reshape(-1, CHUNK // code.block), out.codes.reshape(-1, code.levels.chunk_bytes)
    source, debt, lengths = values.numpy(), owed.numpy(), strides.numpy()
    whole = len(source) // CHUNK

    def run(source: Array, debt: Array, lengths: Array, real: int, first: int, last: int) -> None:
        kernels.encode_adaptive(
            source, debt, lengths, real, code.levels.bits, code.levels.magnitudes,
            code.levels.thresholds, code.strides.grow, code.strides.shrink, even,
            scales[first:last], codes[first:last],
        )  # fmt: skip

    run(_rows(source, CHUNK), _rows(debt, CHUNK), _rows(lengths, CHUNK), CHUNK, 0, whole)
    if rest := len(source) % CHUNK:
        padded, debt_rest, rest_lengths = (_padded(array[whole * CHUNK :], CHUNK) for array in (source, debt, lengths))
        run(padded, debt_rest, rest_lengths, rest, whole, whole + 1)
        _restore(debt_rest, debt[whole * CHUNK :])
        _restore(rest_lengths, lengths[whole * CHUNK :])


def decode_adaptive(coded: Coded, into: torch.Tensor, strides: torch.Tensor, code: LevelCode, even: bool) -> None:
    """Overwrite `into` with the values of a code; changes `strides`."""
    scales, codes = coded.scales.reshape(-1, CHUNK // code.block), coded.codes.reshape(-1, code.levels.chunk_bytes)
    found, lengths = into.numpy(), strides.numpy()
    whole = len(found) // CHUNK

    def run(found: Array, lengths: Array, real: int, first: int, last: int) -> None:
        kernels.decode_adaptive(
            scales[first:last], codes[first:last], found, lengths, real, code.levels.bits, code.levels.magnitudes,
            code.strides.grow, code.strides.shrink, even,
        )  # fmt: skip

    run(_rows(found, CHUNK), _rows(lengths, CHUNK), CHUNK, 0, whole)
    if rest := len(found) % CHUNK:
        found_rest, rest_lengths = (_padded(array[whole * CHUNK :], CHUNK) for array in (found, lengths))
        run(found_rest, rest_lengths, rest, whole, whole + 1)
        _restore(found_rest, found[whole * CHUNK :])
        _restore(rest_lengths, lengths[whole * CHUNK :])


def encode_paced(values: torch.Tensor, owed: torch.Tensor, strides: torch.Tensor, pace: Pace, out: Octets) -> bool:
    """Code in three levels, see `reference.encode_paced`; `owed` and `strides` change. Whether all are finite."""
    source, debt, lengths = values.numpy(), owed.numpy(), strides.numpy()
    codes, whole = out.reshape(-1, TRIT_BYTES), len(source) // CHUNK

    def run(source: Array, debt: Array, lengths: Array, first: int, last: int) -> bool:
        return bool(kernels.encode_paced(source, debt, lengths, pace.grow, pace.shrink, pace.level, codes[first:last]))

    finite = run(_rows(source, CHUNK), _rows(debt, CHUNK), _rows(lengths, CHUNK), 0, whole)
    if len(source) % CHUNK:
        padded, debt_rest = (_padded(array[whole * CHUNK :], CHUNK) for array in (source, debt))
        rest_lengths = _strided(lengths[whole * CHUNK :])
        finite &= run(padded, debt_rest, rest_lengths, whole, whole + 1)
        _restore(debt_rest, debt[whole * CHUNK :])
        _restore(rest_lengths, lengths[whole * CHUNK :])
    return finite


def decode_paced(packed: Octets, into: torch.Tensor, strides: torch.Tensor, pace: Pace) -> None:
    """Overwrite `into` with the values of a code; changes `strides`."""
    found, lengths = into.numpy(), strides.numpy()
    codes, whole = packed.reshape(-1, TRIT_BYTES), len(found) // CHUNK

    def run(found: Array, lengths: Array, first: int, last: int) -> None:
        kernels.decode_paced(codes[first:last], found, lengths, pace.grow, pace.shrink, pace.level)

    run(_rows(found, CHUNK), _rows(lengths, CHUNK), 0, whole)
    if len(found) % CHUNK:
        found_rest, rest_lengths = _padded(found[whole * CHUNK :], CHUNK), _strided(lengths[whole * CHUNK :])
        run(found_rest, rest_lengths, whole, whole + 1)
        _restore(found_rest, found[whole * CHUNK :])
        _restore(rest_lengths, lengths[whole * CHUNK :])


def encode_scaled(values: torch.Tensor, block: int, fp8: bool, out: Coded) -> None:
    """Values as int8 or fp8 with a scale for each block; see `reference.encode_scaled`. Fills `out`."""
    array = values.numpy()
    whole = len(array) // block
    rows = _rows(array, block)
    kernels.encode_scaled(rows, rows.view(np.int32), fp8, out.scales[:whole], _rows(out.codes, block))
    if rest := len(array) % block:
        padded, codes = _padded(array[-rest:], block), np.empty((1, block), np.uint8)
        kernels.encode_scaled(padded, padded.view(np.int32), fp8, out.scales[whole:], codes)
        out.codes[-rest:] = codes[0, :rest]


def decode_scaled(coded: Coded, block: int, fp8: bool, into: torch.Tensor) -> None:
    """Overwrite `into` with the values of the codes."""
    array = into.numpy()
    whole = len(array) // block
    kernels.decode_scaled(coded.scales[:whole], _rows(coded.codes, block), fp8, fp8_values(), _rows(array, block))
    if rest := len(array) % block:
        codes, values = _padded(coded.codes[-rest:], block), np.empty((1, block), np.float32)
        kernels.decode_scaled(coded.scales[whole:], codes, fp8, fp8_values(), values)
        array[-rest:] = values[0, :rest]


def encode_logs(values: torch.Tensor, block: int, out: Coded) -> None:
    """Values >= 0 as 4-bit logarithms; see `reference.encode_logs`. Fills `out`."""
    array = values.numpy()
    padded = _padded(array, CHUNK).reshape(-1, CHUNK) if len(array) % CHUNK else _rows(array, CHUNK)
    kernels.encode_logs(
        padded,
        padded.view(np.int32),
        log_thresholds(),
        out.scales.reshape(-1, CHUNK // block),
        out.codes.reshape(-1, CHUNK // 2),
    )


def track_moment(values: torch.Tensor, moment: torch.Tensor, beta: float) -> None:
    """moment <- beta * moment + (1 - beta) * values ** 2."""
    kernels.track_moment(values.numpy(), moment.numpy(), np.float32(beta))


def sample_sizes(values: torch.Tensor, state: torch.Tensor, size: int, feedback: bool) -> Floats:
    """Magnitudes of what has to be coded, at the positions of `reference.sample`."""
    source, held = values.numpy(), state.numpy()
    if len(source) <= size:
        return np.asarray(np.abs(source + held if feedback else source - held))
    sizes = np.empty(size // SAMPLE_RUN * SAMPLE_RUN, np.float32)
    kernels.sample_sizes(source, held, feedback, sizes)
    return sizes


def threshold_of(sizes: Floats, fraction: float) -> np.float32:
    """The magnitude that a fraction of the sizes reaches; see `reference.threshold_of`."""
    if len(sizes) == 0:
        return np.float32(TINY)
    kept = max(1, round(fraction * len(sizes)))
    found = kernels.nth_size(sizes.view(np.int32), len(sizes) - kept)
    return max(np.int32(found).view(np.float32), np.float32(TINY))


def select(
    values: torch.Tensor, state: torch.Tensor, feedback: bool, threshold: np.float32, capacity: int
) -> tuple[Positions, Floats]:
    """Positions and values of what is sent; see `reference.select`. Where `feedback`, all becomes owed."""
    source, held = values.numpy(), state.numpy()
    positions = np.empty(capacity + 8, np.int64)
    picked = np.empty(capacity + 8, np.float32)
    whole = len(source) // _SCAN * _SCAN
    found = kernels.select_sparse(
        _rows(source, _SCAN), _rows(held, _SCAN), 0, feedback, threshold, 0, positions, picked
    )
    if whole < len(source):
        rest = source[whole:].reshape(1, -1), held[whole:].reshape(1, -1)
        found = kernels.select_sparse(*rest, whole, feedback, threshold, found, positions, picked)
    return positions[:found], picked[:found]


def settle(positions: Positions, picked: Floats, decoded: Floats, state: torch.Tensor, feedback: bool) -> None:
    """After sending: receivers hold what was decoded too; what was sent is no longer owed, but for its rounding."""
    kernels.settle_sparse(positions, picked, decoded, state.numpy(), feedback)


def apply_gaps(gaps: Octets, decoded: Floats, state: torch.Tensor) -> None:
    """Add entries to a state. The gaps have been checked."""
    kernels.apply_sparse(gaps, decoded, state.numpy())


def encode_entries(picked: Floats) -> tuple[Coded, Floats]:
    """Entries as int8 with a scale for each 256, and what they decode to."""
    padded = _padded(picked, GROUP)
    scales, codes = np.empty(len(padded), np.uint16), np.empty(padded.shape, np.uint8)
    kernels.encode_scaled(padded, padded.view(np.int32), False, scales, codes)
    kernels.decode_scaled(scales, codes, False, fp8_values(), padded)
    return Coded(scales, codes.reshape(-1)[: len(picked)]), padded.reshape(-1)[: len(picked)]


def decode_entries(coded: Coded) -> Floats:
    """The values of entries."""
    codes = _padded(coded.codes, GROUP)
    values = np.empty(codes.shape, np.float32)
    kernels.decode_scaled(coded.scales, codes, False, fp8_values(), values)
    return values.reshape(-1)[: len(coded.codes)]


def write_gaps(positions: Positions, elements: int) -> Octets:
    """Gaps between positions of a tensor of that many elements."""
    gaps = np.empty(len(positions) + elements // 255, np.uint8)
    return gaps[: kernels.write_gaps(positions, gaps)]


def _or_empty(tensor: torch.Tensor | None) -> Floats:
    return np.empty(0, np.float32) if tensor is None else tensor.numpy()


def _rows(array: Array, width: int) -> Array:
    """[rows, width] over the memory of all that fills whole rows."""
    return array[: len(array) // width * width].reshape(-1, width)


def _padded(array: Array, width: int) -> Array:
    """[rows, width]: a copy with zeros at its end."""
    padded = np.zeros((-(-len(array) // width), width), array.dtype)
    padded.reshape(-1)[: len(array)] = array
    return padded


def _strided(strides: Array) -> Array:
    """[1, CHUNK]: strides with ones at their end, so that zeros there are coded as zero."""
    padded = np.ones((1, CHUNK), np.float32)
    padded[0, : len(strides)] = strides
    return padded


def _restore(padded: Array, into: Array) -> None:
    into[:] = padded.reshape(-1)[: len(into)]
