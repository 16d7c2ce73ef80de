"""The wire format of version 1 stays as it is: whoever changes these bytes has to raise the version."""

from __future__ import annotations

import hashlib
import itertools
import time

import pytest
import torch
from rich.console import Console

from benchmarks.codecs import measure, measure_restore, table
from hybridep_rt.codecs.codec import make_codec
from hybridep_rt.codecs.warm_up import warm_up
from hybridep_rt.errors import CodecError

GOLDEN = {
    "int8": "b06e0a5679af3e65",
    "fp8": "83a7bedbeb744b49",
    "delta-1bit:t=2:scale=1.3": "3433b85b002543f4",
    "delta-1bit:predict=0.5": "8b88c3be8bf6547d",
    "delta-2bit:block=128": "ea31a823edbe42e7",
    "delta-topk:keep=0.1": "e789808febd9b050",
    "sr:keep=0.1": "408a511c31454a1c",
    "4bit": "b840113848f83be1",
    "2bit:t=2": "7d72e508e6f6b828",
    "1bit:vs=2": "2499d5b6e1599d6f",
    "ternary": "258acabf42ddbee6",
    "1bit:adapt=1": "26c433871207ff2d",
    "2bit:adapt=1:block=256": "d4e546073d01ba69",
    "topk:keep=0.1": "ba81eff566e4c04f",
}


def states():
    """Three states of a tensor, from whole numbers, so that every machine has the same."""
    steps = torch.arange(700, dtype=torch.float32)
    return [((steps * factor) % 97 - 48) / 64 for factor in (31, 37, 41)]


def digest_of(spec):
    codec = make_codec(spec)
    if spec.startswith("sr"):
        codec.set_shared(torch.zeros(700), 1)
    return hashlib.blake2b(b"".join(codec.encode(state) for state in states()), digest_size=8).hexdigest()


@pytest.mark.parametrize("spec", GOLDEN)
def test_the_bytes_of_version_1(spec):
    assert digest_of(spec) == GOLDEN[spec]


def test_a_payload_byte_by_byte():
    codec = make_codec("delta-1bit")
    codec.encode(torch.zeros(64))
    values = torch.ones(64)
    values[[1, 33]] = -1
    payload = bytes(codec.encode(values))
    assert payload[:8] == bytes([1, 2, 0x11, 1, 1, 0, 0, 0])
    assert payload[8:16] == b"\x80\x3f" + bytes(6)
    assert payload[16:] == bytes([0, 0b11, *[0] * 30])
    codec = make_codec("delta-topk:keep=0.001")
    codec.encode(torch.zeros(400))
    values = torch.zeros(400)
    values[[0, 300]] = torch.tensor([127.0, -2])
    payload = bytes(codec.encode(values))
    assert payload[:16] == bytes([1, 3, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])
    assert payload[16:] == b"\x80\x3f" + bytes([127, 0])
    payload = bytes(codec.encode(values))
    assert payload[8:] == bytes([1, 0, 0, 0, 2, 0, 0, 0]) + b"\x81\x3c" + bytes([256 - 127, 255, 45])


def test_hostile_gaps_are_refused_before_anything_is_written():
    codec, copy = make_codec("delta-topk"), torch.zeros(300)
    key, good = (bytes(make_codec("delta-topk").encode(torch.zeros(300))) for _ in range(2))
    codec.decode(key, copy)

    def payload(entries, gaps, *, announced=None, values=None):
        counts = [entries, announced if announced is not None else len(gaps)]
        head = bytes([1, 3, 0, 0, 1, 0, 0, 0]) + b"".join(count.to_bytes(4, "little") for count in counts)
        return head + b"\x80\x3f" * -(-entries // 256) + bytes(entries if values is None else values) + bytes(gaps)

    for bad in (
        payload(1, [255, 45]),
        payload(2, [254, 254]),
        payload(1, [0, 0]),
        payload(2, [0, 255]),
        payload(1, [0, 255]),
        payload(301, [0] * 301),
        payload(1, [0], announced=2**32 - 1),
        payload(2**20, []),
        payload(1, [0], values=7),
        payload(1, []),
        good[:12],
    ):
        with pytest.raises(CodecError):
            codec.decode(bad, copy)
        assert not copy.any()
    codec.decode(payload(2, [255, 43, 0]), copy)


def test_warming_up_takes_every_codec():
    warm_up(["bf16", "int8", "delta-1bit", "sr", "topk", "1bit:vs=2"])


def test_the_benchmark_measures_all_codecs():
    counter = itertools.count(1)
    rows = measure(512, 2, lambda: float(next(counter)))
    assert {row.encode.value for row in rows} == {1.0}
    console = Console(width=150, record=True)
    console.print(table(rows))
    assert "2.5 kept, 1.0 kept" in console.export_text()
    assert all(row.one_pass.value > 0 for row in measure_restore(512, 2, time.perf_counter))
