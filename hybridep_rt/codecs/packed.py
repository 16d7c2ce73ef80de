"""Payloads of another codec made smaller without loss: alike bytes of all values side by side, then zstd.

It pays where values have 16 bits or more, as most of their exponents are alike, and a link is slower than about 1 GB/s.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from hybridep_rt.codecs.codec import Codec
from hybridep_rt.codecs.frames import HEADER_BYTES, Kind, check_size, expect, new_frame, read_header
from hybridep_rt.errors import CodecError
from hybridep_rt.protocol.messages import Bytes


class Packed:
    """Around a codec that remembers nothing and sends equally many bytes for each value. `level`: of zstd."""

    def __init__(self, inner: Codec, level: int) -> None:
        self.name = f"{inner.name}:zstd"
        self._inner = inner
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._decompressor = zstandard.ZstdDecompressor()

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """The most that a payload can be: zstd adds up to a 256th and a few bytes to what it can't make smaller."""
        plain = self._inner.wire_bytes(elements, dtype)
        return HEADER_BYTES + plain + (plain >> 8) + 128

    def frame_bytes(self, payload: Bytes, elements: int, dtype: torch.dtype) -> int:
        """From the header. Raises CodecError for a payload of another codec, or larger than any of this one."""
        header = read_header(payload)
        expect(header, Kind.PACKED, self._inner.wire_bytes(1, dtype))
        size = HEADER_BYTES + header.number
        if size > self.wire_bytes(elements, dtype):
            raise CodecError(f"{size} bytes where {elements} values take at most {self.wire_bytes(elements, dtype)}")
        return size

    def encode(self, values: torch.Tensor) -> Bytes:
        """The inner codec's payload, packed."""
        width = self._inner.wire_bytes(1, values.dtype)
        plain = np.frombuffer(self._inner.encode(values), np.uint8).reshape(-1, width)
        packed = self._compressor.compress(plain.T.tobytes())
        head = new_frame(Kind.PACKED, width, len(packed), 0)
        return b"".join([head.data, packed])

    def decode(self, payload: Bytes, into: torch.Tensor) -> None:
        """As the inner codec. No more memory is taken than `into` needs, whatever the payload says."""
        check_size(memoryview(payload).nbytes, self.frame_bytes(payload, into.numel(), into.dtype))
        packed = memoryview(payload)[HEADER_BYTES:]
        expected = self._inner.wire_bytes(into.numel(), into.dtype)
        try:
            check_size(zstandard.frame_content_size(packed), expected)
            plain = self._decompressor.decompress(packed, max_output_size=expected)
        except zstandard.ZstdError as error:
            raise CodecError(f"a packed payload that can't be unpacked: {error}") from None
        check_size(len(plain), expected)
        width = self._inner.wire_bytes(1, into.dtype)
        side_by_side = np.frombuffer(plain, np.uint8).reshape(width, -1)
        self._inner.decode(np.ascontiguousarray(side_by_side.T).reshape(-1).data, into)
