"""Batches of tokens as WAN messages: which bytes, in which order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridep_rt.codecs.buffers import as_bytes, as_tensor
from hybridep_rt.codecs.codec import Codec
from hybridep_rt.errors import CodecError
from hybridep_rt.moe.spread import Batch
from hybridep_rt.protocol.messages import Bytes, Message

_ROW = torch.int32
_EXPERT = torch.int16


def pack_batch(batch: Batch, codec: Codec) -> tuple[list[Bytes], tuple[int, int]]:
    """Payload (rows, row of each pair, expert of each pair, gate weight of each pair) and counts (rows, pairs)."""
    payload = [
        codec.encode(batch.x_NH),
        as_bytes(batch.row_P.to(_ROW)),
        as_bytes(batch.expert_P.to(_EXPERT)),
        as_bytes(batch.weight_P),
    ]
    return payload, (len(batch.x_NH), len(batch.row_P))


def unpack_batch(message: Message, codec: Codec, like: torch.Tensor, num_experts: int) -> Batch:
    """The batch of a message, in the dtype, width and device of `like` [.,H].

    Raises CodecError for sizes that don't match, rows that don't exist or are unsorted, and unknown experts.
    """
    if len(message.counts) != 2 or min(message.counts) < 0:
        raise CodecError(f"a batch of tokens needs two counts, not {message.counts}")
    rows, pairs = message.counts
    sizes = [
        codec.frame_bytes(message.payload, rows * like.shape[1], like.dtype),
        pairs * _ROW.itemsize,
        pairs * _EXPERT.itemsize,
        pairs * like.dtype.itemsize,
    ]
    parts = _cut(message, sizes)
    x_NH = like.new_empty((rows, like.shape[1]))
    codec.decode(parts[0], x_NH)
    row_P = as_tensor(parts[1], _ROW, (pairs,)).to(torch.int64)
    expert_P = as_tensor(parts[2], _EXPERT, (pairs,)).to(torch.int64)
    if pairs and not (
        int(row_P[0]) >= 0
        and int(row_P[-1]) < rows
        and bool((row_P[1:] >= row_P[:-1]).all())
        and int(expert_P.min()) >= 0
        and int(expert_P.max()) < num_experts
    ):
        raise CodecError("a batch of tokens names a row or an expert that doesn't exist")
    weight_P = as_tensor(parts[3], like.dtype, (pairs,))
    return Batch(x_NH, row_P.to(like.device), expert_P.to(like.device), weight_P.to(like.device))


def unpack_rows(message: Message, codec: Codec, rows: int, like: torch.Tensor) -> torch.Tensor:
    """[rows,H] values that answer a batch. Raises CodecError unless the message has exactly that many."""
    if message.counts != (rows,):
        raise CodecError(f"{message.counts} rows where {rows} were expected")
    values = like.new_empty((rows, like.shape[1]))
    codec.decode(message.payload, values)
    return values


def unpack_rows_and_pairs(
    message: Message, codec: Codec, rows: int, pairs: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of [rows,H] values and of [pairs] gate weights."""
    if message.counts != (rows, pairs):
        raise CodecError(f"{message.counts} rows and pairs where {(rows, pairs)} were expected")
    sizes = [codec.frame_bytes(message.payload, rows * like.shape[1], like.dtype), pairs * like.dtype.itemsize]
    parts = _cut(message, sizes)
    values = like.new_empty((rows, like.shape[1]))
    codec.decode(parts[0], values)
    return values, as_tensor(parts[1], like.dtype, (pairs,)).to(like.device)


def _cut(message: Message, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != message.payload.nbytes:
        raise CodecError(f"{message.channel}: {message.payload.nbytes} bytes where {sum(sizes)} were expected")
    parts, start = [], 0
    for size in sizes:
        parts.append(message.payload[start : start + size])
        start += size
    return parts
