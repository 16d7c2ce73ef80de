"""Streams that remember: copies that stay bit-identical, sums that stay right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.codecs.codec import follow, make_codec
from hybridep_rt.codecs.delta import DIGEST_EVERY
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.errors import CodecError

DELTAS = [
    *("delta-1bit:t=2:scale=1.3", "delta-1bit:predict=0.5", "delta-2bit:t=3:predict=0.5:block=128", "delta-topk"),
    *("delta-ternary:predict=0.5:dead=1:zstd=1", "delta-ternary:t=2:predict=0.3"),
]
COARSE = [
    "1bit",
    "1bit:t=2:vs=4",
    "1bit:adapt=1",
    "ternary",
    "ternary:sent=0.3",
    "2bit:adapt=1:t=2:block=256",
    "2bit:block=128",
    "4bit:t=3",
    "topk:keep=0.05",
]


def walk(elements, seed):
    """Weights that an optimizer moves: step after step a little."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(elements, generator=generator)
    while True:
        yield weights
        weights = weights + 1e-3 * torch.randn(elements, generator=generator).sign()


@pytest.mark.parametrize("spec", DELTAS)
def test_copies_are_bit_identical_over_a_thousand_steps_with_joins(spec):
    home, elements = make_codec(spec), 777
    receivers = []
    chance = np.random.default_rng(1)
    for step, weights in zip(range(1000), walk(elements, 0), strict=False):
        payload = home.encode(weights)
        for receiver, copy in receivers:
            receiver.decode(payload, copy)
        if step == 0 or chance.random() < 0.01:
            newcomer = make_codec(spec), torch.full((elements,), torch.nan)
            newcomer[0].decode(payload if step == 0 else home.key_frame(), newcomer[1])
            receivers.append(newcomer)
        if len(receivers) > 3:
            receivers.pop(int(chance.integers(len(receivers))))
        if step % 100 == 99:
            state = home.state()
            for receiver, copy in receivers:
                assert receiver.ready
                assert torch.equal(copy, state["copy"])
                assert receiver.digest() == home.digest()
    limit = 0.06 if "topk" in spec else 0.01
    assert 0 < home.distance(weights) < limit


@pytest.mark.parametrize("spec", DELTAS)
def test_a_key_frame_may_be_spread_over_steps(spec):
    home, late, elements = make_codec(spec), make_codec(spec), 1000
    weights = walk(elements, 3)
    for _ in range(5):
        home.encode(next(weights))
    copy = torch.full((elements,), 5.0)
    for first in range(0, elements, 250):
        payload = home.encode(next(weights))
        if first:
            late.decode(payload, copy)
        late.decode(home.key_frame(first, 250), copy)
        assert late.ready == (first == 750)
    late.decode(home.encode(next(weights)), copy)
    assert late.digest() == home.digest()


def test_order_is_kept():
    home, receiver, weights = make_codec("delta-1bit"), make_codec("delta-1bit"), walk(300, 4)
    copy = torch.zeros(300)
    key, first, second = (bytes(home.encode(next(weights))) for _ in range(3))
    with pytest.raises(CodecError, match="without a key frame"):
        receiver.decode(first, copy)
    receiver.decode(key, copy)
    with pytest.raises(CodecError, match="payload 2 of a stream, where 1 was expected"):
        receiver.decode(second, copy)
    receiver.decode(first, copy)
    with pytest.raises(CodecError, match="replaced by another"):
        receiver.decode(second, copy.clone())
    with pytest.raises(CodecError, match="30 values in a stream of 300"):
        home.encode(torch.zeros(30))
    with pytest.raises(CodecError, match="form 529"):
        make_codec("delta-1bit").frame_bytes(make_codec("1bit:t=2").encode(copy), 300, torch.float32)


def test_a_digest_tells_a_copy_that_drifted():
    home, receiver, copy = make_codec("delta-1bit"), make_codec("delta-1bit"), torch.zeros(300)
    receiver.decode(home.encode(torch.randn(300)), copy)
    assert receiver.digest() == home.digest()
    copy[7] += 1e-3
    assert receiver.digest() != home.digest()


@pytest.mark.parametrize("spec", DELTAS)
def test_a_payload_now_and_then_tells_a_receiver_that_its_copy_drifted(spec):
    home, receiver, late, weights = make_codec(spec), make_codec(spec), make_codec(spec), walk(300, 6)
    copy, late_copy = torch.zeros(300), torch.zeros(300)
    for _ in range(DIGEST_EVERY):
        payload = bytes(home.encode(next(weights)))
        receiver.decode(payload, copy)
    late.decode(home.key_frame(0, 100), late_copy)
    payload = bytes(home.encode(next(weights)))
    assert home.frame_bytes(payload, 300, torch.float32) == len(payload)
    late.decode(payload, late_copy)
    late.decode(home.key_frame(100, 200), late_copy)
    assert late.digest() == home.digest()
    kept = copy.clone()
    copy[7] += 1e-3
    with pytest.raises(CodecError, match=f"this copy and its home's differ before payload {DIGEST_EVERY}"):
        receiver.decode(payload, copy)
    copy.copy_(kept)
    receiver.decode(payload, copy)
    assert receiver.digest() == home.digest()


@pytest.mark.parametrize("spec", DELTAS)
def test_a_home_goes_on_from_a_checkpoint(spec):
    home, receiver, weights = make_codec(spec), make_codec(spec), walk(500, 5)
    copy = torch.zeros(500)
    for _ in range(4):
        receiver.decode(home.encode(next(weights)), copy)
    again = make_codec(spec)
    again.load_state({name: part.clone() for name, part in home.state().items()})
    receiver.decode(again.encode(next(weights)), copy)
    assert again.digest() == receiver.digest()
    assert again.bytes_held() == 500 * 4 * (2 if "predict" in spec else 1)


@pytest.mark.parametrize("spec", [*(spec for spec in DELTAS if "topk" not in spec), *COARSE[:4]])
def test_a_payload_takes_the_memory_of_one_that_nobody_holds_any_more(spec):
    sender, weights = make_codec(spec), walk(5000, 7)
    sender.encode(next(weights))
    first, second = (sender.encode(next(weights)) for _ in range(2))
    kept = bytes(first)
    places = {np.frombuffer(frame, np.uint8).ctypes.data for frame in (first, second)}
    assert len(places) == 2
    del second
    third = sender.encode(next(weights))
    assert np.frombuffer(third, np.uint8).ctypes.data in places
    assert bytes(first) == kept


def test_a_stream_may_begin_from_weights_that_both_hold():
    home, receiver, weights = make_codec("delta-1bit"), make_codec("delta-1bit"), torch.randn(300)
    copy = weights.clone()
    home.adopt(weights.clone())
    receiver.adopt(copy)
    payload = home.encode(weights + 0.01)
    assert len(payload) == home.wire_bytes(300, torch.float32)
    receiver.decode(payload, copy)
    assert torch.allclose(copy, weights + 0.01, atol=1e-4)
    assert receiver.digest() == home.digest()


@pytest.mark.parametrize("spec", DELTAS)
def test_a_delta_stream_takes_over_from_another_without_a_key_frame(spec):
    home, receiver, copy = make_codec("delta-2bit:predict=0.5"), make_codec("delta-2bit:predict=0.5"), torch.empty(600)
    weights = walk(600, 5)
    for _ in range(20):
        receiver.decode(home.encode(next(weights)), copy)
    later, at_receiver = make_codec(spec), make_codec(spec)
    follow(later, home)
    follow(at_receiver, receiver)
    for _ in range(20):
        payload = later.encode(next(weights))
        assert len(payload) <= later.wire_bytes(600, torch.float32)
        at_receiver.decode(payload, copy)
    assert torch.equal(copy, later.state()["copy"])
    assert at_receiver.digest() == later.digest()


@pytest.mark.parametrize("spec", ["ternary", "1bit:adapt=1:t=2", "1bit", "bf16"])
def test_a_gradient_stream_takes_over_the_strides_of_another(spec):
    ends, generator = [make_codec("2bit:adapt=1") for _ in range(2)], torch.Generator().manual_seed(0)
    sizes, decoded = torch.rand(700, generator=generator), torch.empty(700)
    for _ in range(40):
        ends[1].decode(ends[0].encode(sizes * torch.randn(700, generator=generator)), decoded)
    later = [make_codec(spec) for _ in range(2)]
    for codec, before in zip(later, ends, strict=True):
        follow(codec, before)
    total = torch.zeros(700)
    for _ in range(10):
        gradient = sizes * torch.randn(700, generator=generator)
        later[1].decode(later[0].encode(gradient), decoded)
        total += gradient - decoded
    if isinstance(later[0], Feedback):
        assert torch.allclose(later[0].flush(), total, atol=1e-4)
        strides = [codec.state().get("strides") for codec in later]
        assert (strides[0] is None) == (spec == "1bit")
        assert strides[0] is None or torch.equal(*strides)


def test_a_stream_that_cannot_follow_begins_anew():
    home, weights = make_codec("bf16"), torch.randn(300)
    later = make_codec("delta-1bit")
    follow(later, home)
    follow(later, make_codec("delta-2bit"))
    assert len(later.encode(weights)) == later.key_bytes(300)


def test_a_predictor_follows_a_steady_movement():
    errors = {}
    for spec in ("delta-1bit", "delta-1bit:predict=0.5"):
        home, weights = make_codec(spec), torch.randn(2048, generator=torch.Generator().manual_seed(0))
        move = 1e-3 * torch.randn(2048, generator=torch.Generator().manual_seed(1))
        for _ in range(60):
            home.encode(weights)
            weights = weights + move
        errors[spec] = float((weights - move - home.state()["copy"]).norm() / move.norm())
    assert errors["delta-1bit:predict=0.5"] < 0.6 * errors["delta-1bit"]


@pytest.mark.parametrize("spec", COARSE)
@settings(max_examples=15)
@given(st.integers(1, 600), st.integers(1, 25), st.integers(0, 999))
def test_what_was_sent_and_what_is_owed_add_up(spec, elements, steps, seed):
    sender, receiver = make_codec(spec), make_codec(spec)
    generator = torch.Generator().manual_seed(seed)
    total, received = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for step in range(steps):
        gradient = torch.randn(elements, generator=generator) * 10.0 ** (step % 3)
        total += gradient
        decoded = torch.empty(elements)
        receiver.decode(sender.encode(gradient), decoded)
        received += decoded
        if step == steps // 2:
            again = make_codec(spec)
            again.load_state(sender.state())
            sender = again
    assert sender.owed_norm() >= 0
    owed = sender.flush()
    assert torch.allclose(received + owed, total, atol=1e-5 * 100 * steps, rtol=0)
    assert sender.flush() is None


@pytest.mark.parametrize("spec", ["ternary:sent=0.02", "ternary:sent=0.3"])
@pytest.mark.parametrize("jump", [1e-6, 1, 1e6])
def test_strides_that_are_far_off_are_set_right_at_once(spec, jump):
    """At a stream's start, and where gradients become much smaller or larger; some are zero, some equally large."""
    sender, receiver, decoded = make_codec(spec), make_codec(spec), torch.empty(3000)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-3 * jump):
        total, received = torch.zeros(3000), torch.zeros(3000)
        for _ in range(30):
            gradient = size * torch.randn(3000, generator=generator)
            gradient[:100], gradient[100:200] = 0, size
            receiver.decode(sender.encode(gradient), decoded)
            total += gradient
            received += decoded
        error = float((total - received).norm() / (size * 3000**0.5))
        assert error < (6 if "0.02" in spec else 1)
        sender.flush()


def test_gradients_of_zeros_alone_leave_strides_that_later_ones_can_use():
    sender, receiver, decoded = make_codec("ternary"), make_codec("ternary"), torch.empty(1000)
    for step in range(200):
        gradient = torch.randn(1000) if step in (0, 199) else torch.zeros(1000)
        payload = sender.encode(gradient)
        receiver.decode(payload, decoded)
    assert 0.05 < float((decoded != 0).float().mean()) < 0.4
    assert torch.equal(sender.state()["strides"], receiver.state()["strides"])


def test_weights_that_all_move_alike_are_sent_though_none_is_above_the_others():
    home, weights = make_codec("delta-ternary:dead=1.5"), torch.zeros(300)
    for _ in range(8):
        weights = weights + 0.5
        home.encode(weights)
    assert torch.allclose(home.state()["copy"], weights, rtol=0.01)


@pytest.mark.parametrize("spec", ["1bit", "2bit", "4bit", "topk", "1bit:adapt=1", "ternary"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_passed_on_and_not_owed(spec, bad):
    """So that a step that loss scaling skips leaves no trace."""
    sender, receiver = make_codec(spec), make_codec(spec)
    gradient, decoded = torch.randn(1000), torch.empty(1000)
    gradient[3] = bad
    receiver.decode(sender.encode(gradient), decoded)
    assert not decoded.isfinite().all()
    receiver.decode(sender.encode(torch.randn(1000)), decoded)
    assert decoded.isfinite().all()
    assert sender.flush().isfinite().all()


@pytest.mark.parametrize("spec", ["delta-1bit", "delta-1bit:predict=0.5", "delta-2bit"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_leave_both_ends_with_one_state(spec, bad):
    """So that training that diverged is told as that, and not as copies that differ."""
    sender, receiver = make_codec(spec), make_codec(spec)
    weights, copy = torch.randn(1000), torch.empty(1000)
    receiver.decode(sender.encode(weights), copy)
    weights[3] = bad
    for _ in range(3):
        receiver.decode(sender.encode(weights + torch.randn(1000)), copy)
        assert not copy.isfinite().all()
        assert sender.digest() == receiver.digest()


def test_the_second_moment_arrives():
    sender, receiver = make_codec("1bit:vs=3"), make_codec("1bit:vs=3")
    generator, elements = torch.Generator().manual_seed(0), 2000
    size = torch.rand(elements, generator=generator) + 0.3
    decoded = torch.empty(elements)
    for step in range(200):
        gradient = size * torch.randn(elements, generator=generator).sign()
        if step < 100:
            sender.observe(gradient)
            continue
        receiver.decode(sender.encode(gradient), decoded)
        assert (receiver.second_moment is None) == (step < 102)
    ratio = receiver.second_moment.sqrt() / size
    assert float(ratio.log2().abs().max()) < 0.26


def test_strides_are_the_same_at_both_ends_and_go_on_from_a_checkpoint():
    sender, receiver, decoded = make_codec("1bit:adapt=1"), make_codec("1bit:adapt=1"), torch.empty(700)
    for step in range(40):
        receiver.decode(sender.encode(torch.randn(700)), decoded)
        assert torch.equal(sender.state()["strides"], receiver.state()["strides"])
        if step == 20:
            ends = make_codec("1bit:adapt=1"), make_codec("1bit:adapt=1")
            for end, old in zip(ends, (sender, receiver), strict=True):
                end.load_state({name: part.clone() for name, part in old.state().items()})
            sender, receiver = ends
    assert (sender.bytes_held(), receiver.bytes_held()) == (700 * 8, 700 * 4)
    lost = bytes(sender.encode(torch.randn(700)))
    after = bytes(sender.encode(torch.randn(700)))
    with pytest.raises(CodecError, match="payload 42 of a stream, where 41 was expected"):
        receiver.decode(after, decoded)
    receiver.decode(lost, decoded)
    receiver.decode(after, decoded)
    assert torch.equal(sender.state()["strides"], receiver.state()["strides"])


def test_a_residual_to_shared_weights():
    shared, expert = torch.randn(64, 32), torch.randn(64, 32)
    expert[10:12] += 20
    sender, receiver = make_codec("sr:keep=0.05"), make_codec("sr:keep=0.05")
    with pytest.raises(CodecError, match="set_shared"):
        sender.encode(expert)
    sender.set_shared(shared, 3)
    receiver.set_shared(shared, 3)
    decoded = torch.empty(64, 32)
    receiver.decode(sender.encode(expert), decoded)
    changed = decoded != shared
    assert 0.02 < float(changed.float().mean()) <= 0.08
    assert float((decoded - expert)[changed].abs().max()) < 0.15
    sender.set_shared(shared, 4)
    with pytest.raises(CodecError, match="shared weights 4, where this end holds 3"):
        receiver.decode(sender.encode(expert), decoded)


def test_a_payload_s_memory_is_used_again_once_nobody_holds_it():
    codec, values = make_codec("int8"), torch.randn(1000)
    held = codec.encode(values)[8:]
    kept = bytes(held)
    other = codec.encode(values * 2)
    address = np.frombuffer(other, np.uint8).ctypes.data
    assert bytes(held) == kept
    del other
    assert np.frombuffer(codec.encode(-values), np.uint8).ctypes.data == address
    assert bytes(held) == kept


@given(st.sampled_from(["int8", "fp8"]), st.integers(0, 5), st.integers(1, 70), st.integers(0, 99))
def test_tokens_have_a_scale_each(name, tokens, width, seed):
    x_NH = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) * 10.0 ** torch.arange(
        tokens
    ).unsqueeze(1)
    sender, receiver = make_codec(name, width=width), make_codec(name, width=width)
    payload = sender.encode(x_NH)
    assert len(payload) == 8 + tokens * (2 + width)
    decoded = torch.empty(tokens, width)
    receiver.decode(payload, decoded)
    largest = x_NH.abs().amax(1, keepdim=True) if tokens else x_NH
    limit = largest / 253 + x_NH.abs() / 256 if name == "int8" else x_NH.abs() / 14 + largest / 2**17
    assert ((decoded - x_NH).abs() <= limit * 1.01).all()
    with pytest.raises(CodecError):
        make_codec(name, width=width + 1).decode(payload, decoded)
