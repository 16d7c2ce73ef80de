"""The kernels, torch's operators and the numpy reference compute the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.codecs import cpu, device, reference
from hybridep_rt.codecs.levels import CHUNK, GROUP, TRIT_BYTES, LevelCode, fp8_magnitudes, lloyd_max, pace
from hybridep_rt.codecs.reference import Coded

ENGINES = [cpu, device]
SIZES = st.sampled_from([0, 1, 63, 64, 100, 255, 256, 257, 700, 1024])
REST = {
    "block": st.sampled_from([64, 128, 256]),
    "factor": st.sampled_from([1.0, 1.3]),
    "gain": st.sampled_from([0.0, 0.5]),
}
CODES = st.one_of(
    st.builds(LevelCode, bits=st.sampled_from([1, 2, 4]), **REST),
    st.builds(LevelCode, bits=st.just(2), dead=st.sampled_from([0.6, 1.2]), **REST),
)


def numbers(elements, seed, *, odd=False):
    """Normal values of several magnitudes, some zeros; where `odd`, also what is no number, and tiny ones."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(elements) * generator.choice([1e-3, 1, 30], elements)
    values[generator.random(elements) < 0.1] = 0
    if odd and elements:
        values[generator.integers(elements, size=3)] = generator.choice([np.nan, np.inf, -np.inf, 1e-41, -1e-33], 3)
    return values.astype(np.float32)


def tensors(*arrays):
    return [None if array is None else torch.from_numpy(array.copy()) for array in arrays]


def room(code, elements):
    scales, codes = code.sizes(-(-elements // CHUNK))
    return Coded(np.empty(scales, np.uint16), np.empty(codes, np.uint8))


def same(found, expected):
    return np.array_equal(np.asarray(found), expected, equal_nan=expected.dtype.kind == "f")


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(CODES, SIZES, st.booleans(), st.booleans(), st.integers(0, 999))
def test_levels(engine, code, elements, feedback, odd, seed):
    values, state = numbers(elements, seed, odd=odd), numbers(elements, seed + 1)
    velocity = numbers(elements, seed + 2) if code.gain and not feedback else None
    options = {"block": code.block, "levels": code.levels, "rho": code.rho, "gain": code.gain}
    with np.errstate(all="ignore"):
        expected, after, moving = reference.encode_levels(
            values, state, velocity, factor=code.factor, feedback=feedback, **options
        )
    source, held, speed = tensors(values, state, velocity)
    out = room(code, elements)
    with np.errstate(all="ignore"):
        engine.encode_levels(source, held, speed, code, feedback, out)
    assert same(out.scales, expected.scales)
    assert same(out.codes, expected.codes)
    assert same(held, after)
    assert speed is None or same(speed, moving)
    for add in (False, True):
        decoded, _ = reference.decode_levels(expected, state, velocity, add=add, **options)
        held, speed = tensors(state, velocity)
        engine.decode_levels(expected, held, speed, code, add)
        assert same(held, decoded)
        if add and not feedback:
            assert same(decoded, after)
            assert speed is None or same(speed, moving)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25)
@given(st.sampled_from([1, 2]), st.sampled_from([64, 128, 256]), SIZES, st.booleans(), st.integers(0, 999))
def test_adaptive_levels(engine, bits, block, elements, odd, seed):
    """Over some payloads, as strides depend on all that came before; both ends have the same afterwards."""
    code = LevelCode(bits, block, adapts=True)
    options = {"block": block, "levels": code.levels, "pace": code.strides}
    owed, strides = np.zeros(elements, np.float32), np.ones(elements, np.float32)
    debt, sent, received = tensors(owed, strides, strides)
    for number in range(6):
        even = number % 3 == 2
        values = numbers(elements, seed + number, odd=odd and number == 1)
        with np.errstate(all="ignore"):
            expected, owed, after = reference.encode_adaptive(values, owed, strides, even=even, **options)
            decoded, _ = reference.decode_adaptive(expected, strides, even=even, **options)
            out, into = room(code, elements), torch.empty(elements)
            engine.encode_adaptive(torch.from_numpy(values), debt, sent, code, even, out)
        assert same(out.scales, expected.scales)
        assert same(out.codes, expected.codes)
        engine.decode_adaptive(expected, into, received, code, even)
        assert same(into, decoded)
        assert same(debt, owed)
        assert same(sent, after)
        assert same(received, after)
        strides = after


def test_strides_find_the_size_of_each_value():
    """Gradients whose sizes differ within a block, as those of neighbouring weights do."""
    generator = np.random.default_rng(0)
    sizes = np.exp2(generator.uniform(-3, 3, 4096)).astype(np.float32)
    code = LevelCode(1, 256, adapts=True)
    owed, strides = np.zeros_like(sizes), np.ones_like(sizes)
    for number in range(200):
        values = sizes * generator.standard_normal(4096).astype(np.float32)
        _, owed, strides = reference.encode_adaptive(
            values, owed, strides, block=256, levels=code.levels, pace=code.strides, even=number % 16 == 0
        )
    found = np.log2(np.abs(strides) / sizes)
    assert np.std(found - np.repeat(found.reshape(-1, 256).mean(1), 256)) < 0.5
    assert np.sqrt(np.mean((owed / sizes) ** 2)) < 1.2


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25)
@given(st.sampled_from([0.02, 0.12, 0.4]), SIZES, st.booleans(), st.integers(0, 999))
def test_three_levels_by_strides_alone(engine, sent, elements, odd, seed):
    """Over some payloads; both ends have the same strides afterwards."""
    owed, strides = np.zeros(elements, np.float32), np.ones(elements, np.float32)
    debt, mine, received = tensors(owed, strides, strides)
    for number in range(6):
        values = numbers(elements, seed + number, odd=odd and number == 1)
        with np.errstate(all="ignore"):
            expected, owed, after = reference.encode_paced(values, owed, strides, pace=pace(sent))
            decoded, _ = reference.decode_paced(expected, strides, pace=pace(sent))
            out, into = np.empty_like(expected), torch.empty(elements)
            finite = engine.encode_paced(torch.from_numpy(values), debt, mine, pace(sent), out)
        assert finite == np.isfinite(owed).all()
        assert same(out, expected)
        engine.decode_paced(expected, into, received, pace(sent))
        assert same(into, decoded)
        assert same(debt, owed)
        assert same(mine, after)
        assert same(received, after)
        strides = after
        if not finite:
            owed = np.zeros_like(owed)
            debt.zero_()


@pytest.mark.parametrize("sent", [0.05, 0.12, 0.3])
def test_strides_let_through_the_part_of_each_value_that_is_wanted(sent):
    """Whatever its size, and whatever its distribution."""
    generator = np.random.default_rng(0)
    sizes = np.exp2(generator.uniform(-3, 3, 4096)).astype(np.float32)
    owed, strides, reached = np.zeros_like(sizes), sizes, np.zeros_like(sizes)
    for number in range(1000):
        values = sizes * generator.standard_t(3, 4096).astype(np.float32)
        codes, owed, strides = reference.encode_paced(values, owed, strides, pace=pace(sent))
        if number >= 500:
            reached += reference.unpack_trits(codes) > 0
    share = reached / 500
    assert share.mean() == pytest.approx(sent, rel=0.02)
    assert share.std() < 0.2 * sent


@pytest.mark.parametrize("engine", ENGINES)
def test_all_bytes_of_three_levels_are_taken(engine):
    """Also those that nobody writes: what they decode to is the same everywhere."""
    packed = np.resize(np.arange(256, dtype=np.uint8), 10 * TRIT_BYTES)
    into, strides = torch.empty(2560), torch.ones(2560)
    engine.decode_paced(packed, into, strides, pace(0.12))
    expected, after = reference.decode_paced(packed, np.ones(2560, np.float32), pace=pace(0.12))
    assert same(into, expected)
    assert same(strides, after)
    assert len(set(into.tolist())) == 3


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(st.booleans(), st.sampled_from([7, 64, 100]), SIZES, st.booleans(), st.integers(0, 999))
def test_scaled(engine, fp8, block, elements, odd, seed):
    values = numbers(elements, seed, odd=odd)
    with np.errstate(all="ignore"):
        expected = reference.encode_scaled(values, block=block, fp8=fp8)
    out = Coded(np.empty_like(expected.scales), np.empty_like(expected.codes))
    engine.encode_scaled(torch.from_numpy(values), block, fp8, out)
    assert same(out.scales, expected.scales)
    assert same(out.codes, expected.codes)
    into = torch.empty(elements)
    engine.decode_scaled(expected, block, fp8, into)
    assert same(into, reference.decode_scaled(expected, block=block, fp8=fp8))


@given(st.integers(0, 3000), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.booleans(), st.integers(0, 999))
def test_a_threshold_is_the_same_order_statistic(elements, fraction, odd, seed):
    sizes = np.abs(numbers(elements, seed, odd=odd)) if elements else np.empty(0, np.float32)
    assert same(cpu.threshold_of(sizes, fraction), reference.threshold_of(sizes, fraction))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=40)
@given(SIZES, st.sampled_from([0.001, 0.05, 0.5]), st.booleans(), st.booleans(), st.integers(0, 999))
def test_sparse(engine, elements, fraction, feedback, odd, seed):
    values, state = numbers(elements, seed, odd=odd), numbers(elements, seed + 1)
    x = values + state if feedback else values - state
    at = reference.sample(elements, 500)
    sizes = np.abs(x[at])
    threshold, capacity = reference.threshold_of(sizes, fraction), elements // 2
    expected = reference.select(x, threshold, capacity)
    source, held = tensors(values, state)
    assert same(engine.sample_sizes(source, held, 500, feedback), sizes)
    positions, picked = engine.select(source, held, feedback, threshold, capacity)
    assert same(positions, expected)
    assert same(picked, x[expected])
    sparse, decoded = reference.encode_sparse(x[expected], expected)
    coded, values_of = cpu.encode_entries(picked)
    assert same(coded.scales, sparse.scales)
    assert same(coded.codes, sparse.codes)
    assert same(values_of, decoded)
    assert same(cpu.write_gaps(positions, elements), sparse.gaps)
    found = reference.decode_sparse(sparse)
    assert same(found[0], decoded)
    assert same(found[1], expected)
    engine.settle(positions, picked, decoded, held, feedback)
    after = x.copy() if feedback else state.copy()
    rest = np.where(np.isnan(decoded), np.float32(0), x[expected] - decoded)
    after[expected] = rest if feedback else after[expected] + decoded
    assert same(held, after)
    (copy,) = tensors(state)
    engine.apply_gaps(sparse.gaps, decoded, copy)
    after = state.copy()
    after[expected] += decoded
    assert same(copy, after)


@pytest.mark.parametrize("engine", ENGINES)
@given(st.sampled_from([64, 128]), SIZES, st.booleans(), st.integers(0, 999))
def test_logs(engine, block, elements, odd, seed):
    values = np.abs(numbers(elements, seed, odd=odd))
    expected = reference.encode_logs(values, block=block)
    out = Coded(np.empty_like(expected.scales), np.empty_like(expected.codes))
    engine.encode_logs(torch.from_numpy(values), block, out)
    assert same(out.scales, expected.scales)
    assert same(out.codes, expected.codes)
    decoded = reference.decode_logs(expected, block=block)[:elements]
    top = np.repeat(reference.from_bf16(expected.scales), block)[:elements]
    ordinary = np.isfinite(top) & (values > np.maximum(top * 2**-7.5, 1e-30))
    assert (np.abs(np.log2(decoded[ordinary] / values[ordinary])) < 0.26).all()


@pytest.mark.parametrize("engine", ENGINES)
@given(SIZES, st.integers(0, 999))
def test_a_copy_drifts(engine, elements, seed):
    state, velocity = numbers(elements, seed), numbers(elements, seed + 1)
    held, moving = tensors(state, velocity)
    engine.drift(held, moving, LevelCode(1, 64, rho=0.9, gain=0.3))
    assert same(held, state + np.float32(0.3) * velocity)
    assert same(moving, np.float32(0.9) * velocity)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_moment_is_tracked(engine):
    values, moment = tensors(numbers(300, 1), np.abs(numbers(300, 2)))
    expected = 0.95 * moment + 0.05 * values**2
    engine.track_moment(values, moment, 0.95)
    torch.testing.assert_close(moment, expected)


def test_fp8_is_torch_s():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same(codes.to(torch.float32), fp8_magnitudes())


@pytest.mark.parametrize(("bits", "error"), [(1, 0.604), (2, 0.343), (4, 0.0977)])
def test_the_error_on_normal_values_is_that_of_lloyd_and_max(bits, error):
    values = np.random.default_rng(0).standard_normal(GROUP * 1000).astype(np.float32)
    _, rest, _ = reference.encode_levels(
        values,
        np.zeros_like(values),
        None,
        block=256,
        levels=lloyd_max(bits),
        factor=1.0,
        rho=0.9,
        gain=0.0,
        feedback=True,
    )
    assert np.sqrt(np.mean(rest**2)) == pytest.approx(error, rel=0.02)


def test_bf16_rounds_as_torch_does():
    values = numbers(4096, 3)
    assert same(reference.to_bf16(values), torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy())
