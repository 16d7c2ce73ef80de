"""Coding of flat float32 tensors on any device, with torch's operators. Same functions and same bytes as `cpu`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from hybridep_rt.codecs.levels import (
    CHUNK,
    FALLBACK,
    LANES,
    NORMAL_SPREAD,
    STRIDE_LEAST,
    STRIDE_MOST,
    TINY,
    TRIT_BYTES,
    TRITS,
    LevelCode,
    Pace,
    log_thresholds,
)
from hybridep_rt.codecs.reference import Array, Coded, Floats, Octets, Positions, sample

_NAN = 0x7FC0


def encode_levels(
    values: torch.Tensor,
    state: torch.Tensor,
    velocity: torch.Tensor | None,
    code: LevelCode,
    feedback: bool,
    out: Coded,
) -> None:
    """Code values against a state, which is changed in place; see `reference.encode_levels`. Fills `out`."""
    if velocity is not None:
        state += velocity * code.gain
    x = values + state if feedback else values - state
    x_BE = _blocks(x, code.block)
    size_BE = x_BE.abs()
    real_BE = (torch.arange(x_BE.numel(), device=x.device) < len(x)).view(x_BE.shape)
    count_B = real_BE.sum(1).clamp(min=1).to(torch.float32)
    index_BE = torch.zeros_like(x_BE, dtype=torch.uint8)
    if code.bits == 1:
        scale_B = _lane_sum(size_BE) / count_B
    else:
        spread_B = (_lane_sum(size_BE * size_BE) / count_B).sqrt()
        for threshold in code.levels.thresholds.tolist():
            index_BE += ~(size_BE < (spread_B * threshold)[:, None])
        index_BE = _never_nothing(index_BE, size_BE, spread_B[:, None], code)
        level_BE = torch.tensor(code.levels.magnitudes, device=x.device)[index_BE.int()]
        below_B = _lane_sum(torch.where(real_BE, level_BE * level_BE, 0))
        scale_B = _ratio(_lane_sum(size_BE * level_BE), below_B)
    words_B = _to_bf16(scale_B * code.factor)
    code_BE = torch.signbit(x_BE).to(torch.uint8) << (code.bits - 1) | index_BE
    _to_host(words_B, out.scales.view(np.int16))
    code_BE = _packed(code_BE, code, out.codes)
    decoded = _decoded(words_B, code_BE, code)[: len(x)]
    if feedback:
        state.copy_(torch.where(decoded.isnan(), 0, x - decoded))
        return
    state += decoded
    if velocity is not None:
        velocity.copy_(velocity * code.rho + decoded)


def decode_levels(coded: Coded, state: torch.Tensor, velocity: torch.Tensor | None, code: LevelCode, add: bool) -> None:
    """Add a code to a state, or write it there; see `reference.decode_levels`."""
    code_BE = _unpacked(coded.codes, state.device, code)
    decoded = _decoded(_from_host(coded.scales.view(np.int16), state.device), code_BE, code)[: len(state)]
    if not add:
        state.copy_(decoded)
        return
    if velocity is not None:
        state += velocity * code.gain
        velocity.copy_(velocity * code.rho + decoded)
    state += decoded


def drift(state: torch.Tensor, velocity: torch.Tensor, code: LevelCode) -> None:
    """Move a state by its velocity alone, which keeps `rho` of itself."""
    state += velocity * code.gain
    velocity *= code.rho


def encode_adaptive(
    values: torch.Tensor, owed: torch.Tensor, strides: torch.Tensor, code: LevelCode, even: bool, out: Coded
) -> None:
    """Code values in units of their strides; see `reference.encode_adaptive`. Changes `owed` and `strides`."""
    x = values + owed
    x_BE, stride_BE = _blocks(x, code.block), _blocks(strides.abs(), code.block)
    size_BE = x_BE.abs()
    total_B, reach_B = _lane_sum(size_BE), _lane_sum(stride_BE)
    index_BE = torch.zeros_like(x_BE, dtype=torch.uint8)
    if code.bits > 1:
        threshold = torch.tensor(code.levels.thresholds[0], device=x.device)
        mean_B = _ratio(total_B, reach_B)
        bound_B = mean_B * NORMAL_SPREAD * threshold
        index_BE += ~(size_BE < bound_B[:, None] * stride_BE)
        reach_B = _lane_sum(torch.tensor(code.levels.magnitudes, device=x.device)[index_BE.int()] * stride_BE)
    words_B = _to_bf16(_ratio(total_B, reach_B))
    code_BE = torch.signbit(x_BE).to(torch.uint8) << (code.bits - 1) | index_BE
    _to_host(words_B, out.scales.view(np.int16))
    code_BE = _packed(code_BE, code, out.codes)
    decoded = _stride(words_B, code_BE, strides, code, even)
    owed.copy_(torch.where(decoded.isnan(), 0, x - decoded))


def decode_adaptive(coded: Coded, into: torch.Tensor, strides: torch.Tensor, code: LevelCode, even: bool) -> None:
    """Overwrite `into` with the values of a code; changes `strides`."""
    code_BE = _unpacked(coded.codes, into.device, code)
    into.copy_(_stride(_from_host(coded.scales.view(np.int16), into.device), code_BE, strides, code, even))


def encode_paced(values: torch.Tensor, owed: torch.Tensor, strides: torch.Tensor, pace: Pace, out: Octets) -> bool:
    """Code in three levels, see `reference.encode_paced`; `owed` and `strides` change. Whether all are finite."""
    x = values + owed
    reached = ~(x.abs() < strides)
    code = torch.where(reached, 1 + 2 * torch.signbit(x).to(torch.uint8), 0)
    _to_host(_pack_trits(F.pad(code, (0, -len(x) % CHUNK))), out)
    owed.copy_(x - _paced(code, strides, pace))
    return bool(x.isfinite().all())


def decode_paced(packed: Octets, into: torch.Tensor, strides: torch.Tensor, pace: Pace) -> None:
    """Overwrite `into` with the values of a code; changes `strides`."""
    into.copy_(_paced(_unpack_trits(_from_host(packed, into.device))[: len(into)], strides, pace))


def encode_scaled(values: torch.Tensor, block: int, fp8: bool, out: Coded) -> None:
    """Values as int8 or fp8 with a scale for each block; see `reference.encode_scaled`. Fills `out`."""
    x_BE = F.pad(values, (0, -len(values) % block)).view(-1, block)
    top = 448.0 if fp8 else 127.0
    scale_B = _largest(x_BE) / torch.tensor(top, device=values.device)
    words_B = _to_bf16(torch.where(scale_B < TINY, 0, scale_B))
    scale_B = _from_bf16(words_B)
    inverse_B = torch.where(scale_B > 0, 1 / scale_B, 0)[:, None]
    y_BE = (torch.where(inverse_B > 0, x_BE, 0) * inverse_B).clamp(-top, top)
    code_BE = y_BE.to(torch.float8_e4m3fn) if fp8 else y_BE.round().to(torch.int8)
    _to_host(words_B, out.scales.view(np.int16))
    _to_host(code_BE.view(torch.uint8).reshape(-1)[: len(values)], out.codes)


def decode_scaled(coded: Coded, block: int, fp8: bool, into: torch.Tensor) -> None:
    """Overwrite `into` with the values of the codes."""
    codes = _from_host(coded.codes, into.device).view(torch.float8_e4m3fn if fp8 else torch.int8)
    scale_B = _from_bf16(_from_host(coded.scales.view(np.int16), into.device))
    into.copy_(codes.to(torch.float32) * scale_B.repeat_interleave(block)[: len(into)])


def encode_logs(values: torch.Tensor, block: int, out: Coded) -> None:
    """Values >= 0 as 4-bit logarithms; see `reference.encode_logs`. Fills `out`."""
    x_BE = _blocks(values, block)
    words_B = _to_bf16(_largest(x_BE))
    largest_B = _from_bf16(words_B)
    code_BE = torch.zeros_like(x_BE, dtype=torch.uint8)
    for threshold in log_thresholds().tolist():
        code_BE += x_BE < (largest_B * threshold)[:, None]
    _to_host(words_B, out.scales.view(np.int16))
    _to_host(_pack(code_BE, 4), out.codes)


def track_moment(values: torch.Tensor, moment: torch.Tensor, beta: float) -> None:
    """moment <- beta * moment + (1 - beta) * values ** 2."""
    moment.mul_(beta).addcmul_(values, values, value=1 - beta)


def sample_sizes(values: torch.Tensor, state: torch.Tensor, size: int, feedback: bool) -> Floats:
    """Magnitudes of what has to be coded, at the positions of `reference.sample`."""
    index = torch.from_numpy(sample(len(values), size)).to(values.device)
    found = values[index] + state[index] if feedback else values[index] - state[index]
    return np.asarray(found.abs().cpu().numpy(), np.float32)


def select(
    values: torch.Tensor, state: torch.Tensor, feedback: bool, threshold: np.float32, capacity: int
) -> tuple[Positions, Floats]:
    """Positions and values of what is sent; see `reference.select`. Where `feedback`, all becomes owed."""
    x = values + state if feedback else values - state
    if feedback:
        state.copy_(x)
    positions = (~(x.abs() < float(threshold))).nonzero().squeeze(1)[:capacity]
    return positions.cpu().numpy(), x[positions].cpu().numpy()


def settle(positions: Positions, picked: Floats, decoded: Floats, state: torch.Tensor, feedback: bool) -> None:
    """After sending: receivers hold what was decoded too; what was sent is no longer owed, but for its rounding."""
    index, values = torch.from_numpy(positions).to(state.device), torch.from_numpy(decoded).to(state.device)
    if feedback:
        owed = torch.from_numpy(picked).to(state.device) - values
        state[index] = torch.where(values.isnan(), 0, owed)
    else:
        state[index] += values


def apply_gaps(gaps: Octets, decoded: Floats, state: torch.Tensor) -> None:
    """Add entries to a state. The gaps have been checked."""
    entry = gaps != 255
    positions = np.cumsum(gaps.astype(np.int64) + entry)[entry] - 1
    settle(positions, decoded, decoded, state, feedback=False)


def _decoded(words_B: torch.Tensor, code_BE: torch.Tensor, code: LevelCode) -> torch.Tensor:
    scale_B = _from_bf16(words_B)[:, None]
    index_BE = (code_BE & (2 ** (code.bits - 1) - 1)).int()
    size_BE = torch.tensor(code.levels.magnitudes, device=code_BE.device)[index_BE] * scale_B
    return (size_BE * (1 - 2 * (code_BE >> (code.bits - 1)).int())).view(-1)


def _never_nothing(
    index_BE: torch.Tensor, size_BE: torch.Tensor, unit_BE: torch.Tensor, code: LevelCode
) -> torch.Tensor:
    """The indices, by a narrower dead zone where a block of three levels would be coded as zeros alone."""
    if not code.dead:
        return index_BE
    nothing_B1 = ~((index_BE > 0) & (unit_BE != 0)).any(1, keepdim=True)
    return torch.where(nothing_B1, ~(size_BE < FALLBACK * unit_BE), index_BE).to(torch.uint8)


def _stride(
    words_B: torch.Tensor, code_BE: torch.Tensor, strides: torch.Tensor, code: LevelCode, even: bool
) -> torch.Tensor:
    """Decoded values in units of strides, which are changed."""
    elements, pace = len(strides), code.strides
    index_BE, negative_BE = (code_BE & (2 ** (code.bits - 1) - 1)).int(), code_BE >> (code.bits - 1) > 0
    stride_BE = _blocks(strides.abs(), code.block)
    sign_BE = torch.where(negative_BE, -1.0, 1.0)
    size_BE = torch.tensor(code.levels.magnitudes, device=strides.device)[index_BE] * stride_BE
    decoded = size_BE * _from_bf16(words_B)[:, None] * sign_BE
    longer_BE = index_BE > 0 if code.bits > 1 else negative_BE == _blocks(strides < 0, code.block)
    stride_BE = stride_BE * torch.where(longer_BE, float(pace.grow), float(pace.shrink))
    if even:
        real_BE = (torch.arange(stride_BE.numel(), device=strides.device) < elements).view(stride_BE.shape)
        mean_B1 = (_lane_sum(stride_BE) / real_BE.sum(1).clamp(min=1).to(torch.float32))[:, None]
        even_BE = torch.where(mean_B1 > 0, stride_BE / mean_B1, 0)
        stride_BE = even_BE.clamp(STRIDE_LEAST, STRIDE_MOST)
    strides.copy_((stride_BE * sign_BE).view(-1)[:elements])
    return decoded.view(-1)[:elements]


def _paced(code: torch.Tensor, strides: torch.Tensor, pace: Pace) -> torch.Tensor:
    """Decoded values in strides, which are changed."""
    reached, sign = code > 0, torch.where(code > 1, -1.0, 1.0)
    decoded = torch.where(reached, float(pace.level) * strides * sign, 0)
    strides *= torch.where(reached, float(pace.grow), float(pace.shrink))
    return decoded


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.where(below > 0, above / below, 0)


def _blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    return F.pad(values, (0, -len(values) % CHUNK)).view(-1, block)


def _lane_sum(x_BE: torch.Tensor) -> torch.Tensor:
    lanes = torch.zeros(len(x_BE), LANES, device=x_BE.device)
    for part in x_BE.split(LANES, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _largest(x_BE: torch.Tensor) -> torch.Tensor:
    if x_BE.numel() == 0:
        return x_BE.new_zeros(len(x_BE))
    return (x_BE.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isfinite(), values.to(torch.bfloat16).view(torch.int16), _NAN).to(torch.int16)


def _from_bf16(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.bfloat16).to(torch.float32)


def _pack(code_BE: torch.Tensor, bits: int) -> torch.Tensor:
    parts = code_BE.view(-1, 8 // bits, CHUNK * bits // 8)
    packed = parts[:, 0].clone()
    for k in range(1, parts.shape[1]):
        packed |= parts[:, k] << (k * bits)
    return packed.view(-1)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    parts = packed.view(-1, 1, CHUNK * bits // 8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    codes: torch.Tensor = parts >> shifts & (2**bits - 1)
    return codes.view(-1)


def _packed(code_BE: torch.Tensor, code: LevelCode, out: Array) -> torch.Tensor:
    """Fills `out`, and returns the codes as they are found there: of three levels, zero has no sign."""
    if code.dead:
        code_BE = torch.where(code_BE & 1 > 0, code_BE, 0)
    _to_host(_pack_trits(code_BE) if code.dead else _pack(code_BE, code.bits), out)
    return code_BE


def _unpacked(codes: Array, device: torch.device, code: LevelCode) -> torch.Tensor:
    packed = _from_host(codes, device)
    return (_unpack_trits(packed) if code.dead else _unpack(packed, code.bits)).view(-1, code.block)


def _powers_of_3(device: torch.device) -> torch.Tensor:
    return torch.tensor([3**k for k in range(TRITS)], dtype=torch.uint8, device=device)[:, None]


def _pack_trits(code_BE: torch.Tensor) -> torch.Tensor:
    digits = torch.where(code_BE & 1 > 0, 1 + (code_BE >> 1), 0).view(-1, CHUNK)
    digits = F.pad(digits, (0, TRITS * TRIT_BYTES - CHUNK)).view(-1, TRITS, TRIT_BYTES)
    return _powers_of_3(digits.device).mul(digits).sum(1, dtype=torch.uint8).view(-1)


def _unpack_trits(packed: torch.Tensor) -> torch.Tensor:
    digits = packed.view(-1, 1, TRIT_BYTES) // _powers_of_3(packed.device) % 3
    digits = digits.reshape(-1, TRITS * TRIT_BYTES)[:, :CHUNK].reshape(-1)
    return torch.where(digits == 2, 3, digits)


def _to_host(values: torch.Tensor, out: Array) -> None:
    torch.from_numpy(out).copy_(values)


def _from_host(array: Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
