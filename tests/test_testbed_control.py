"""What the relay is told: round trips, and nothing malformed gets through."""

from __future__ import annotations

import json
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.testbed.control import (
    MESSAGE_BYTES_MAX,
    Change,
    Site,
    Wiring,
    changed,
    pack_change,
    pack_wiring,
    unpack_change,
    unpack_wiring,
)
from launcher.testbed.shapes_text import changes_of
from launcher.testbed.shaping import Access, Shape
from topology.errors import ConfigError

NO_WORDS = dict.fromkeys(("rate", "rtt", "jitter", "loss", "queue"))


def test_a_change_comes_back_as_it_was() -> None:
    change = Change("a", "b", {"rate_bytes_per_s": 125e3, "loss": 0.01}, cut_s=2.0)
    assert unpack_change(pack_change(change)) == change


def test_wiring_comes_back_as_it_was() -> None:
    sites = [Site("a", "/run/netns/x", "198.18.0.1", Access(1e6)), Site("b", "/run/netns/y", "198.18.0.2", Access())]
    shapes = {(0, 1): Shape(1e6, 0.02, 0.001, 0.5, 70000), (1, 0): Shape()}
    wiring = Wiring(sites, shapes, "/tmp/control", 3)
    assert unpack_wiring(pack_wiring(wiring)) == wiring


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rate": 1}, "unknown key 'rate'"),
        ({"loss": 1.5}, "loss: found 1.5"),
        ({"loss": -0.1}, "loss"),
        ({"loss": True}, "loss"),
        ({"loss": "1"}, "loss"),
        ({"loss": float("nan")}, "loss"),
        ({"rate_bytes_per_s": 0}, "rate_bytes_per_s"),
        ({"cut_s": 1e9}, "cut_s"),
        ({"source": 3}, "source"),
        ({"target": ""}, "target"),
    ],
)
def test_a_malformed_change_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        unpack_change(json.dumps({"source": "a", "target": "b", **fields}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 4000, b" " * (MESSAGE_BYTES_MAX + 1)])
def test_what_is_no_change_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        unpack_change(data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8), st.lists, max_leaves=8))
def test_wiring_of_any_wrong_shape_is_refused(value: object) -> None:
    for fields in ({"sites": value}, {"sites": [], "shapes": value, "control": value, "seed": value}, value):
        with pytest.raises(ConfigError):
            unpack_wiring(json.dumps(fields).encode())


def test_a_change_keeps_what_it_does_not_name() -> None:
    shape = Shape(1000.0, 0.5, 0.1, 0.2, 99)
    assert changed(shape, Change("a", "b", {"delay_s": 1.0})) == Shape(1000.0, 1.0, 0.1, 0.2, 99)
    assert changed(shape, Change("a", "b", {"queue_bytes": 5.0})).queue_bytes == 5


def test_words_become_si_and_half_the_round_trip() -> None:
    words = {**NO_WORDS, "rate": "25 Mbit/s", "rtt": "40 ms", "jitter": "2 ms", "loss": "0.1 %", "queue": "64 KiB"}
    shape = {"rate_bytes_per_s": 3.125e6, "delay_s": 0.02, "jitter_s": 0.002, "loss": 0.001, "queue_bytes": 65536.0}
    assert changes_of("a->b", words, None, None) == [Change("a", "b", shape)]


def test_a_double_arrow_means_both_ways() -> None:
    changes = changes_of(" a <-> b ", NO_WORDS, 3.0, None)
    assert changes == [Change("a", "b", {}, cut_s=3.0), Change("b", "a", {}, cut_s=3.0)]


@pytest.mark.parametrize(
    ("pair", "words", "problem"),
    [
        ("a-b", {"rate": "1 Mbit/s"}, "a pair of DCs"),
        ("a->b", {}, "nothing to change"),
        ("a->b", {"rate": "25"}, "--rate: found '25' without a unit"),
        ("a->b", {"rtt": "1 Mbit/s"}, "--rtt"),
    ],
)
def test_wrong_words_are_named(pair: str, words: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        changes_of(pair, {**NO_WORDS, **words}, None, None)


def test_an_unlimited_rate_survives_json() -> None:
    wiring = Wiring([], {(0, 1): Shape(inf)}, "x")
    assert b"Infinity" not in pack_wiring(wiring)
    assert unpack_wiring(pack_wiring(wiring)).shapes[0, 1].rate_bytes_per_s == inf
