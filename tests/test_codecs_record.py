"""Named tensors and numbers as bytes: exact there and back, and nothing else is taken in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.codecs.record import pack, unpack
from hybridep_rt.errors import CodecError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
RECORD = {
    "weight": torch.arange(6, dtype=torch.float64).view(2, 3) / 7,
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "step": torch.tensor(3.0),
    "nothing": torch.empty(0, 4),
    "group": 2,
    "rate": 0.1,
    "decay": True,
    "none": None,
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


def joined(record: dict[str, object]) -> bytes:
    return b"".join(bytes(part) for part in pack(record))


def test_every_value_comes_back_as_it_was():
    found = unpack(joined(RECORD))
    assert list(found) == list(RECORD)
    assert all(same(found[name], RECORD[name]) for name in RECORD)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=4))
def test_any_shapes_and_dtypes(tensors):
    record = {str(n): torch.ones(shape, dtype=dtype) for n, (dtype, shape) in enumerate(tensors)}
    found = unpack(joined(record))
    assert all(same(found[name], record[name]) for name in record)


@given(st.binary(max_size=64))
def test_garbage_is_an_error_or_a_small_record(payload):
    try:
        found = unpack(payload)
    except CodecError:
        return
    assert sum(v.nbytes for v in found.values() if isinstance(v, torch.Tensor)) <= len(payload)


@given(st.integers(0, len(joined(RECORD)) - 1), st.integers(0, 255))
def test_a_flipped_or_missing_byte_is_an_error_or_another_record(at, value):
    payload = bytearray(joined(RECORD))
    with pytest.raises(CodecError):
        unpack(payload[:at])
    payload[at] = value
    try:
        found = unpack(payload)
    except CodecError:
        return
    assert sum(v.nbytes for v in found.values() if isinstance(v, torch.Tensor)) <= len(payload)


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, torch.ones(1, dtype=torch.complex64)])
def test_what_cannot_travel_is_named(value):
    with pytest.raises(CodecError, match="state"):
        pack({"state": value})
