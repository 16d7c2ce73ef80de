"""The one interface of all codecs, what a spec may say, and the codecs that keep every element."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from statistics import fmean

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.codecs.codec import NAMES, Codecs, bytes_per_element, cut_frames, make_codec, names_for
from hybridep_rt.codecs.frames import Kind, new_frame
from hybridep_rt.codecs.ladder import LADDER, rung, rung_below
from hybridep_rt.errors import CodecError, ConfigError

PLAIN = ["exact", "fp32", "bf16"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    st.sampled_from(PLAIN),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_round_trip_has_the_declared_size_and_error(name, dtype, shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    codec = make_codec(name)
    payload = codec.encode(values)
    assert memoryview(payload).nbytes == codec.wire_bytes(values.numel(), dtype)
    decoded = torch.full_like(values, 7)
    codec.decode(bytes(payload), decoded)
    wire = {"exact": dtype, "fp32": torch.float32, "bf16": torch.bfloat16}[name]
    assert torch.equal(decoded, values.to(wire).to(dtype))


def test_a_strided_tensor_is_sent_in_row_major_order():
    values = torch.arange(6.0).reshape(2, 3).T
    decoded = torch.empty(3, 2)
    make_codec("exact").decode(make_codec("exact").encode(values), decoded)
    assert torch.equal(decoded, values)


@given(st.sampled_from(PLAIN), st.binary(max_size=64))
def test_a_payload_of_another_size_is_refused(name, payload):
    codec, into = make_codec(name), torch.empty(3)
    if len(payload) == codec.wire_bytes(3, torch.float32):
        codec.decode(payload, into)
    else:
        with pytest.raises(CodecError, match=f"{len(payload)} bytes where"):
            codec.decode(payload, into)


PACKED = ["exact:zstd=1", "fp32:zstd=1", "bf16:zstd=3"]
SPECS = [
    *PLAIN,
    *PACKED,
    *("int8", "fp8", "delta-1bit", "delta-1bit:t=2:scale=1.3", "delta-1bit:predict=0.5", "delta-2bit:t=3:predict=0.5"),
    *("delta-topk:keep=0.1", "sr:keep=0.1", "4bit", "2bit:t=2", "1bit:vs=4", "1bit:t=2:vs=32:block=128", "topk"),
    *("ternary", "1bit:adapt=1:block=256", "2bit:adapt=1:t=2:vs=3"),
    *("delta-ternary:t=2:predict=0.3", "delta-ternary:dead=1:predict=0.5:zstd=1"),
]


def stream(spec, elements):
    """Sender and receiver of a stream, past their first payload."""
    ends = make_codec(spec), make_codec(spec)
    into = torch.zeros(elements)
    if spec.startswith("sr"):
        for end in ends:
            end.set_shared(torch.zeros(elements), 1)
    ends[1].decode(ends[0].encode(torch.randn(elements)), into)
    return *ends, into


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("elements", [0, 1, 64, 300, 1024])
def test_payloads_have_their_declared_size_and_tell_it(spec, elements):
    sender, receiver, into = stream(spec, elements)
    for _ in range(3):
        payload = bytes(sender.encode(torch.randn(elements)))
        declared = sender.wire_bytes(elements, torch.float32)
        bound = any(word in spec for word in ("topk", "sr", "zstd")) or spec.startswith("ternary")
        assert len(payload) <= declared if bound else len(payload) == declared
        followed = payload + b"what comes next"
        assert make_codec(spec).frame_bytes(followed, elements, torch.float32) == len(payload)
        receiver.decode(payload, into)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_coded_as_float32(spec, dtype):
    sender, receiver = make_codec(spec), make_codec(spec)
    values, into = torch.randn(3, 100).to(dtype), torch.zeros(3, 100, dtype=dtype)
    if spec.startswith("sr"):
        for end in (sender, receiver):
            end.set_shared(values.to(torch.float32), 1)
    receiver.decode(sender.encode(values), into)
    error = float((into - values).norm() / values.norm())
    assert error < (0.99 if spec.startswith(("topk", "ternary", "2bit:t=2", "1bit:t=2", "2bit:adapt=1:t=2")) else 0.65)


@given(st.sampled_from(SPECS), st.binary(max_size=40), st.integers(0, 400), st.sampled_from(["cut", "grow", "change"]))
def test_hostile_payloads_are_refused_or_harmless(spec, noise, at, how):
    """Near-valid payloads: either a CodecError, or values of the right number."""
    elements = 300
    sender, receiver, into = stream(spec, elements)
    payload = bytearray(sender.encode(torch.randn(elements)))
    at = min(at, len(payload))
    if how == "cut":
        del payload[at : at + len(noise)]
    elif how == "grow":
        payload[at:at] = noise
    else:
        payload[at : at + len(noise)] = noise
    guarded = torch.full((elements + 200,), 7.0)
    guarded[100:-100] = into
    again = guarded[100:-100]
    with suppress(CodecError):
        make_codec(spec).frame_bytes(payload, elements, torch.float32)
    try:
        receiver.decode(payload, into)
    except CodecError:
        assert torch.equal(into, again)
    fresh = make_codec(spec)
    if spec.startswith("sr"):
        fresh.set_shared(torch.zeros(elements), 1)
    with suppress(CodecError):
        fresh.decode(payload, again)
    assert (guarded[:100] == 7).all()
    assert (guarded[-100:] == 7).all()


@pytest.mark.parametrize("spec", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (40, 50)])
def test_packing_loses_nothing(spec, dtype, shape):
    values = torch.randn(shape).to(dtype)
    packed, plain = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    payload = make_codec(spec).encode(values)
    make_codec(spec).decode(payload, packed)
    name = spec.partition(":")[0]
    inner = make_codec(name)
    inner.decode(inner.encode(values), plain)
    assert torch.equal(packed, plain)
    if values.numel() > 1:
        assert len(payload) < inner.wire_bytes(values.numel(), dtype)


def test_values_that_cannot_be_packed_stay_within_the_declared_size():
    noise = torch.frombuffer(bytearray(np.random.default_rng(0).bytes(1 << 20)), dtype=torch.bfloat16)
    codec = make_codec("exact:zstd=1")
    assert len(codec.encode(noise)) <= codec.wire_bytes(len(noise), torch.bfloat16)


def test_a_packed_payload_takes_no_more_memory_than_its_tensor():
    """One that unpacks to a gigabyte, and one that doesn't say to how much."""
    codec, into = make_codec("exact:zstd=1"), torch.zeros(1000)
    for body in (
        zstandard.ZstdCompressor().compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4000)),
    ):
        payload = new_frame(Kind.PACKED, 4, len(body), 0).tobytes() + body
        with pytest.raises(CodecError):
            codec.decode(payload, into)


@pytest.mark.parametrize(("spec", "codes_at"), [("delta-ternary:zstd=1", 20), ("ternary", 16)])
def test_packed_levels_take_no_more_memory_than_their_tensor(spec, codes_at):
    sender, receiver, into = stream(spec, 1000)
    honest = bytes(sender.encode(torch.randn(1000)))
    for codes in (
        zstandard.ZstdCompressor().compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(208)),
        b"",
    ):
        payload = honest[:8] + len(codes).to_bytes(4, "little") + honest[12:codes_at] + codes
        before = into.clone()
        with pytest.raises(CodecError):
            receiver.decode(payload, into)
        assert torch.equal(into, before)
    receiver.decode(honest, into)


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf, -math.inf, 1e38, 1e-38])
def test_strides_are_not_multiplied_by_anything_a_payload_says(factor):
    sender, receiver, into = stream("ternary", 1000)
    honest = bytes(sender.encode(torch.randn(1000)))
    before = into.clone()
    with pytest.raises(CodecError, match="can't be multiplied by"):
        receiver.decode(honest[:12] + struct.pack("<f", factor) + honest[16:], into)
    assert torch.equal(into, before)
    receiver.decode(honest, into)
    assert torch.equal(sender.state()["strides"], receiver.state()["strides"])


@pytest.mark.parametrize("dead", [0.6, 0.9, 1.2, 1.8])
def test_packed_levels_of_normal_values_take_what_the_planner_counts(dead):
    spec, elements = f"delta-ternary:dead={dead}:zstd=1", 1 << 18
    sender = make_codec(spec)
    sender.encode(torch.zeros(elements))
    payload = sender.encode(torch.randn(elements, generator=torch.Generator().manual_seed(0)))
    assert memoryview(payload).nbytes == pytest.approx(bytes_per_element(spec, torch.float32) * elements, rel=0.05)


@pytest.mark.parametrize("sent", [0.07, 0.12, 0.3])
@pytest.mark.parametrize("power", [1, 3])
def test_gradients_take_what_the_planner_counts_whatever_their_distribution(sent, power):
    spec, elements, generator = f"ternary:sent={sent}", 1 << 17, torch.Generator().manual_seed(0)
    sender, sizes = make_codec(spec), torch.rand(elements, generator=generator)
    counted = [memoryview(sender.encode(sizes * gradient(elements, power, generator))).nbytes for _ in range(200)]
    assert fmean(counted[150:]) == pytest.approx(bytes_per_element(spec, torch.float32) * elements, rel=0.04)


def gradient(elements, power, generator):
    return torch.randn(elements, generator=generator) ** power


def test_payloads_that_follow_one_another_are_told_apart():
    specs, elements = ["delta-topk", "exact", "1bit:vs=2", "int8", "bf16:zstd=1"], [300, 7, 64, 0, 90]
    streams = [(make_codec(spec), size) for spec, size in zip(specs, elements, strict=True)]
    payloads = [bytes(codec.encode(torch.randn(size))) for codec, size in streams]
    assert cut_frames(b"".join(payloads), streams, torch.float32) == payloads
    for broken in (b"".join(payloads) + b"x", b"".join(payloads)[:-1], b"".join(payloads[1:]), b""):
        with pytest.raises(CodecError):
            cut_frames(broken, streams, torch.float32)


def test_names():
    assert Codecs.parse("weights=bf16,dense=fp32") == Codecs(weights="bf16", dense="fp32")
    assert Codecs.parse("weights=delta-1bit:t=2:scale=1.3").weights == "delta-1bit:t=2:scale=1.3"
    assert Codecs.parse("") == Codecs()
    for text in ("weights", "weights=bf16,weights=fp32", "bytes=bf16"):
        with pytest.raises(ConfigError, match="KIND=CODEC"):
            Codecs.parse(text)
    with pytest.raises(ConfigError, match="choose one of exact, fp32, bf16"):
        Codecs.parse("weights=zip")
    for spec in NAMES:
        assert any(spec in names_for(kind) for kind in ("tokens", "weights", "gradients"))
    for text in ("tokens=1bit", "weights=fp8", "gradients=delta-1bit", "dense=sr"):
        with pytest.raises(ConfigError, match="is not one for"):
            Codecs.parse(text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bf16:t=2", 'no option "t"; it has: zstd'),
        ("1bit:speed=2", "it has: t, block, vs, beta"),
        ("1bit:t=0", "0 is not in 1 .. 255"),
        ("1bit:t=1.5", "t=1.5"),
        ("1bit:block=65", "block is one of 64, 128, 256"),
        ("delta-topk:keep=nan", "nan is not in"),
        ("delta-1bit:scale", "scale"),
        ("delta-1bit:scale=1.3:predict=0.5", "swings up"),
        ("delta-ternary:dead=1.5:predict=0.5", "swings up"),
    ],
)
def test_options_are_checked(spec, message):
    with pytest.raises(ConfigError, match=message):
        make_codec(spec)


@pytest.mark.parametrize(
    ("name", "both_ways"), [("exact", 8), ("safe", 0.516), ("default", 0.2909), ("lean", 0.2206), ("extreme", 0.1382)]
)
def test_the_ladder_s_bytes(name, both_ways):
    codecs = rung(name).codecs
    sizes = [bytes_per_element(spec, torch.float32) for spec in (codecs.weights, codecs.gradients)]
    assert sum(sizes) == pytest.approx(both_ways, abs=6e-4)


@pytest.mark.parametrize("keep", [0.002, 0.01, 0.1])
def test_entries_take_the_expected_bytes_on_average(keep):
    spec, elements, generator = f"delta-topk:keep={keep}", 2**18, torch.Generator().manual_seed(0)
    codec = make_codec(spec)
    codec.encode(torch.zeros(elements))
    sizes = [len(codec.encode(torch.randn(elements, generator=generator))) for _ in range(10)]
    assert sum(sizes) / 10 / elements == pytest.approx(bytes_per_element(spec, torch.float32), rel=0.05)


def test_rungs_are_found_by_name():
    assert rung_below("lean").name == "default"
    assert rung_below("exact") == LADDER[0]
    with pytest.raises(ConfigError, match="choose one of exact, safe, default, lean, extreme"):
        rung("fast")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tensor_is_staged():
    values = torch.arange(1000.0, device="cuda")
    decoded = torch.empty(1000, device="cuda")
    make_codec("exact").decode(make_codec("exact").encode(values), decoded)
    assert torch.equal(decoded, values)
