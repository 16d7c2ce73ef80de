"""Credits: what may begin, at literal sizes; and that whoever takes its flows in order never waits for ever."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.credits import MESSAGE_BYTES, Credits, Flow


def flow(name: str) -> Flow:
    return (Address(0, 0), Address(1, 0), name)


def test_the_window_and_one_message_of_each_flow() -> None:
    credits = Credits(10_000, flows=3)
    credits.begin(0, flow("a"), 9_000)
    assert credits.used_bytes == 9_000 + MESSAGE_BYTES
    assert not credits.may_begin(flow("a"), 0)
    assert credits.may_begin(flow("b"), 1 << 40)
    credits.begin(1, flow("b"), 100)
    assert not credits.may_begin(flow("b"), 0)
    credits.done(0)
    assert credits.may_begin(flow("b"), 7000)
    assert not credits.may_begin(flow("b"), 10_000)
    assert credits.done(1) == 100 + MESSAGE_BYTES
    assert (credits.used_bytes, len(credits)) == (0, 0)


def test_the_number_of_flows_is_bounded() -> None:
    credits = Credits(1 << 30, flows=2)
    credits.begin(0, flow("a"), 0)
    credits.begin(1, flow("b"), 0)
    assert not credits.may_begin(flow("c"), 0)
    assert credits.may_begin(flow("a"), 0)


def test_a_receipt_for_nothing() -> None:
    with pytest.raises(RemoteProtocolError, match="message 5, which is not on its way"):
        Credits(100, 1).done(5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5000)), max_size=40),
    st.integers(1, 8000),
    st.permutations(range(40)),
)
def test_no_order_of_taking_flows_is_a_deadlock(
    messages: list[tuple[str, int]], window_bytes: int, order: list[int]
) -> None:
    """The receiver waits for one flow after the other, in any order, while the sender sends whatever it may."""
    credits = Credits(window_bytes, flows=10)
    waiting = deque(enumerate(messages))
    here: dict[str, deque[int]] = {name: deque() for name in "abcd"}
    for turn in order:
        if turn >= len(messages):
            continue
        wanted = messages[turn][0]
        aside = []
        while waiting:
            number, (name, nbytes) = waiting.popleft()
            if name not in {each[1][0] for each in aside} and credits.may_begin(flow(name), nbytes):
                credits.begin(number, flow(name), nbytes)
                here[name].append(number)
            else:
                aside.append((number, (name, nbytes)))
        waiting.extend(aside)
        credits.done(here[wanted].popleft())
    assert not waiting
    assert len(credits) == 0
