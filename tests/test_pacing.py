"""Emulated links, with literal times."""

from __future__ import annotations

import math

import pytest

from hybridep_rt.protocol.pacing import LATENESS_S, TURN_S, Downlink, LinkPacer, Uplink


def test_a_chunk_takes_its_serialisation_time_and_half_a_round_trip() -> None:
    link = LinkPacer(1000.0, 0.025, Uplink())
    assert link.ask(5.0) == 5.0
    assert link.start(100, 5.0) == pytest.approx(5.125)


def test_the_next_chunk_waits_until_the_link_is_free() -> None:
    link = LinkPacer(1000.0, 0.0, Uplink())
    link.ask(5.0)
    link.start(100, 5.0)
    assert link.ask(5.01) == pytest.approx(5.1)
    assert link.ask(5.1) == 5.1


def test_late_wake_ups_do_not_lower_the_rate() -> None:
    link, now = LinkPacer(1000.0, 0.0, Uplink()), 5.0
    for _ in range(100):
        due = link.ask(now)
        now = max(now, due) + 0.001  # every timer is a millisecond late
        assert link.ask(now) == now
        done = link.start(10, now)
    assert done == pytest.approx(5.0 + 100 * 0.01, abs=0.0021)


def test_time_when_nothing_waited_is_not_made_up_for() -> None:
    link = LinkPacer(1000.0, 0.0, Uplink())
    link.ask(5.0)
    link.start(100, 5.0)
    link.idle()
    assert link.ask(9.0) == 9.0
    assert link.start(100, 9.0) == pytest.approx(9.1)


def test_a_long_sleep_is_made_up_for_only_in_part() -> None:
    link = LinkPacer(1000.0, 0.0, Uplink())
    link.ask(5.0)
    link.start(100, 5.0)
    link.ask(5.05)
    link.ask(7.0)
    assert link.start(100, 7.0) == pytest.approx(7.0 - LATENESS_S + 0.1)


def test_a_shared_uplink_serves_its_links_in_turn() -> None:
    uplink = Uplink(1000.0)
    first, second = LinkPacer(math.inf, 0.0, uplink), LinkPacer(math.inf, 0.5, uplink)
    assert first.ask(1.0) == 1.0
    assert first.start(100, 1.0) == pytest.approx(1.1)
    assert first.ask(1.0) == pytest.approx(1.1)
    assert second.ask(1.05) == pytest.approx(1.1)
    assert second.ask(1.1) == 1.1 + TURN_S  # the other one asked first
    assert first.ask(1.1) == 1.1
    assert first.start(100, 1.1) == pytest.approx(1.2)
    assert second.ask(1.21) == 1.21
    assert second.start(100, 1.21) == pytest.approx(1.8)


def test_an_uplink_faster_than_its_links_serves_several_at_once() -> None:
    uplink = Uplink(2000.0)
    first, second = LinkPacer(1000.0, 0.0, uplink), LinkPacer(1000.0, 0.0, uplink)
    first.ask(1.0)
    assert first.start(100, 1.0) == pytest.approx(1.1)
    assert second.ask(1.0) == pytest.approx(1.05)
    assert second.ask(1.05) == 1.05
    assert second.start(100, 1.05) == pytest.approx(1.15)


def test_a_link_that_has_nothing_to_send_gives_up_its_turn() -> None:
    uplink = Uplink(1000.0)
    first, second = LinkPacer(math.inf, 0.0, uplink), LinkPacer(math.inf, 0.0, uplink)
    first.ask(1.0)
    first.idle()
    assert second.ask(1.0) == 1.0


def test_a_downlink_lets_one_sender_through_and_slows_two() -> None:
    downlink = Downlink(1000.0)
    assert downlink.receive(100, 1.0) == 1.0
    assert downlink.receive(100, 1.1) == pytest.approx(1.1)
    assert downlink.receive(100, 1.1) == pytest.approx(1.2)
    assert downlink.receive(100, 1.2) == pytest.approx(1.3)
