"""Codecs that keep every element: round trips, declared sizes, hostile payloads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.codecs.codec import NAMES, Codecs, make_codec
from hybridep_rt.errors import CodecError, ConfigError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    st.sampled_from(NAMES),
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


@given(st.sampled_from(NAMES), st.binary(max_size=64))
def test_a_payload_of_another_size_is_refused(name, payload):
    codec, into = make_codec(name), torch.empty(3)
    if len(payload) == codec.wire_bytes(3, torch.float32):
        codec.decode(payload, into)
    else:
        with pytest.raises(CodecError, match=f"{len(payload)} bytes where"):
            codec.decode(payload, into)


def test_names():
    assert Codecs.parse("weights=bf16,dense=fp32") == Codecs(weights="bf16", dense="fp32")
    assert Codecs.parse("") == Codecs()
    for text in ("weights", "weights=bf16,weights=fp32", "bytes=bf16"):
        with pytest.raises(ConfigError, match="KIND=CODEC"):
            Codecs.parse(text)
    with pytest.raises(ConfigError, match="choose one of exact, fp32, bf16"):
        Codecs.parse("weights=zip")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tensor_is_staged():
    values = torch.arange(1000.0, device="cuda")
    decoded = torch.empty(1000, device="cuda")
    make_codec("exact").decode(make_codec("exact").encode(values), decoded)
    assert torch.equal(decoded, values)
