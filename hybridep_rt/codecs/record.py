"""Named tensors and numbers as one message: what moves with an expert to another home. Lossless, bounded, no pickle.

A msgpack list of [name, dtype, shape] or [name, number], its length before it (4 bytes, little-endian), then the
tensors' bytes in that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgpack
import torch

from hybridep_rt.codecs.buffers import as_bytes, as_tensor
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes

Value: TypeAlias = torch.Tensor | int | float | bool | None
Record: TypeAlias = dict[str, Value]

_LENGTH_BYTES = 4
_HEAD_BYTES_MAX = 1 << 20
_DIMENSIONS_MAX = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def pack(record: Mapping[str, Value]) -> list[Bytes]:
    """Buffers that follow one another. CPU tensors' memory is shared: it must not change until they are sent.

    Raises CodecError for a value or a dtype that can't travel.
    """
    head = [_entry(name, value) for name, value in record.items()]
    packed = msgpack.packb(head)
    tensors = [as_bytes(value) for value in record.values() if isinstance(value, torch.Tensor)]
    return [len(packed).to_bytes(_LENGTH_BYTES, "little"), packed, *tensors]


def unpack(payload: Bytes) -> Record:
    """The inverse of `pack`; tensors are on the CPU and own their memory.

    Raises CodecError for anything that `pack` doesn't write.
    """
    rest = memoryview(payload).cast("B")
    length = int.from_bytes(rest[:_LENGTH_BYTES], "little")
    if rest.nbytes < _LENGTH_BYTES or length > min(_HEAD_BYTES_MAX, rest.nbytes - _LENGTH_BYTES):
        raise CodecError(f"a record's head of {length} bytes in a payload of {rest.nbytes}")
    head, rest = _head(rest[_LENGTH_BYTES : _LENGTH_BYTES + length]), rest[_LENGTH_BYTES + length :]
    record: Record = {}
    for name, *described in head:
        if len(described) == 1:
            record[name] = described[0]
            continue
        dtype, shape = _DTYPES[described[0]], described[1]
        size = math.prod(shape) * dtype.itemsize
        if size > rest.nbytes:
            raise CodecError(f"{rest.nbytes} bytes where {name} of a record needs {size}")
        # A copy: what follows a tensor of odd length in the payload may not lie where its dtype needs it.
        record[name] = as_tensor(bytearray(rest[:size]), dtype, shape)
        rest = rest[size:]
    if rest.nbytes:
        raise CodecError(f"{rest.nbytes} bytes after a record")
    return record


def _entry(name: str, value: Value) -> list[object]:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, int | float | bool | None):
            raise CodecError(f"{name}: a {type(value).__name__} can't travel, only tensors and numbers can")
        return [name, value]
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or value.dim() > _DIMENSIONS_MAX:
        raise CodecError(f"{name}: a tensor of {value.dim()} dimensions of {dtype} can't travel")
    return [name, dtype, list(value.shape)]


def _head(packed: memoryview) -> list[list[Any]]:
    try:
        head = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError("a record with an unreadable head") from error
    if not isinstance(head, list) or not all(isinstance(entry, list) and _is_entry(entry) for entry in head):
        raise CodecError("a record with a malformed head")
    if len({entry[0] for entry in head}) < len(head):
        raise CodecError("a record with the same name twice")
    return head


def _is_entry(entry: list[object]) -> bool:
    match entry:
        case [str(), None | bool() | int() | float()]:
            return True
        case [str(), str() as dtype, list() as shape]:
            sizes = all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
            return dtype in _DTYPES and len(shape) <= _DIMENSIONS_MAX and sizes
    return False
