"""The shaping machine, with literal times: most links take 1 s for 1000 bytes."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.testbed.shaping import Access, Network, Pair, Server, Shape

AB, BA, CB = (0, 1), (1, 0), (2, 1)
BIG = 1 << 30


def network(shapes: dict[Pair, Shape], seed: int = 0, **access: dict[int, float]) -> Network:
    """Three DCs; `uplinks` and `downlinks` are rates by DC number."""
    up, down = access.get("uplinks", {}), access.get("downlinks", {})
    return Network([Access(up.get(dc, inf), down.get(dc, inf)) for dc in range(3)], shapes, seed)


def drain(net: Network) -> list[tuple[float, bytes]]:
    """Everything that arrives, with its time, asking only when the machine says so."""
    arrivals = []
    while (now := net.next_due_s) < inf:
        arrivals += [(now, packet) for _, packet in net.due(now)]
    return arrivals


def test_a_packet_takes_its_size_over_the_rate_plus_the_delay() -> None:
    net = network({AB: Shape(1000, delay_s=0.5)})
    net.send(10.0, AB, 1000, b"1")
    assert net.next_due_s == 11.5
    assert net.due(11.4) == []
    assert net.due(11.5) == [(1, b"1")]
    assert net.next_due_s == inf


def test_packets_queue_behind_each_other() -> None:
    net = network({AB: Shape(1000, delay_s=0.5)})
    for packet in (b"1", b"2", b"3"):
        net.send(0.0, AB, 1000, packet)
    assert drain(net) == [(1.5, b"1"), (2.5, b"2"), (3.5, b"3")]


def test_an_idle_link_saves_nothing_up() -> None:
    net = network({AB: Shape(1000)})
    net.send(0.0, AB, 1000, b"1")
    net.send(9.0, AB, 1000, b"2")
    assert drain(net) == [(1.0, b"1"), (10.0, b"2")]


def test_a_link_without_limits_delivers_at_once() -> None:
    net = network({AB: Shape()})
    net.send(3.0, AB, 1000, b"1")
    assert net.due(3.0) == [(1, b"1")]


def test_the_two_directions_are_independent() -> None:
    net = network({AB: Shape(1000), BA: Shape(500, delay_s=1.0)})
    net.send(0.0, AB, 1000, b"there")
    net.send(0.0, BA, 1000, b"back")
    assert drain(net) == [(1.0, b"there"), (3.0, b"back")]


def test_a_packet_beyond_the_queue_limit_is_dropped() -> None:
    net = network({AB: Shape(1000, queue_bytes=2500)})
    for packet in (b"1", b"2", b"3"):
        net.send(0.0, AB, 1000, packet)
    assert [packet for _, packet in drain(net)] == [b"1", b"2"]
    assert net.lines[AB].dropped.full == 1


def test_the_queue_has_room_again_as_it_drains() -> None:
    net = network({AB: Shape(1000, queue_bytes=2500)})
    for now in (0.0, 0.0, 1.0):
        net.send(now, AB, 1000, b"x")
    assert net.lines[AB].dropped.full == 0


def test_an_empty_queue_takes_a_packet_larger_than_its_limit() -> None:
    net = network({AB: Shape(1000, queue_bytes=10)})
    net.send(0.0, AB, 1000, b"1")
    assert drain(net) == [(1.0, b"1")]


@pytest.mark.parametrize(
    ("shape", "limit"),
    [
        (Shape(1e6, 0.050), 100_000),
        (Shape(1e6, 0.001), 64 << 10),
        (Shape(1e8, 0.0), 1_000_000),
        (Shape(1e8, 0.5, queue_bytes=7), 7),
        (Shape(), inf),
    ],
)
def test_the_default_queue_is_one_bandwidth_delay_product_with_two_floors(shape: Shape, limit: float) -> None:
    assert shape.queue_limit_bytes == limit


def test_an_uplink_is_shared_first_come_first_served() -> None:
    net = network({AB: Shape(), (0, 2): Shape()}, uplinks={0: 1000})
    net.send(0.0, AB, 1000, b"to b")
    net.send(0.0, (0, 2), 1000, b"to c")
    assert drain(net) == [(1.0, b"to b"), (2.0, b"to c")]


def test_a_slow_link_does_not_hold_up_the_uplink_for_others() -> None:
    net = network({AB: Shape(100), (0, 2): Shape()}, uplinks={0: 1000})
    net.send(0.0, AB, 1000, b"to b")
    net.send(0.0, (0, 2), 1000, b"to c")
    assert drain(net) == [(2.0, b"to c"), (10.0, b"to b")]


def test_uplink_line_and_downlink_of_one_rate_take_the_time_of_one() -> None:
    net = network({AB: Shape(1000, delay_s=0.25)}, uplinks={0: 1000}, downlinks={1: 1000})
    net.send(0.0, AB, 1000, b"1")
    net.send(0.0, AB, 1000, b"2")
    assert drain(net) == [(1.25, b"1"), (2.25, b"2")]


def test_a_downlink_is_shared_by_those_who_arrive() -> None:
    net = network({AB: Shape(1000), CB: Shape(1000)}, downlinks={1: 1000})
    net.send(0.0, AB, 1000, b"from a")
    net.send(0.0, CB, 1000, b"from c")
    assert drain(net) == [(1.0, b"from a"), (2.0, b"from c")]


def test_a_downlink_as_fast_as_both_links_together_delays_neither() -> None:
    net = network({AB: Shape(1000), CB: Shape(1000)}, downlinks={1: 2000})
    for now in (0.0, 1.0, 2.0):
        net.send(now, AB, 1000, b"from a")
        net.send(now, CB, 1000, b"from c")
    assert [when for when, _ in drain(net)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_a_full_downlink_drops() -> None:
    net = network({AB: Shape(queue_bytes=BIG)}, downlinks={1: 1000})
    for _ in range(100):
        net.send(0.0, AB, 1000, b"x")
    assert len(drain(net)) == 65
    assert net.lines[AB].dropped.full == 35


def test_lost_have_used_the_link() -> None:
    net = network({AB: Shape(1000, loss=0.5, queue_bytes=BIG)}, seed=1)
    for _ in range(100):
        net.send(0.0, AB, 1000, b"x")
    arrivals = [when for when, _ in drain(net)]
    assert 30 < len(arrivals) < 70
    assert len(arrivals) + net.lines[AB].dropped.lost == 100
    assert max(arrivals) > 90.0


def test_the_same_seed_loses_the_same_packets() -> None:
    def survivors(seed: int) -> list[bytes]:
        net = network({AB: Shape(1000, loss=0.3, jitter_s=0.1, queue_bytes=BIG)}, seed)
        for number in range(50):
            net.send(0.0, AB, 1000, bytes([number]))
        return [packet for _, packet in drain(net)]

    assert survivors(5) == survivors(5)
    assert survivors(5) != survivors(6)


def test_jitter_adds_up_to_its_amount() -> None:
    net = network({AB: Shape(delay_s=1.0, jitter_s=0.5)})
    for number in range(200):
        net.send(number * 10.0, AB, 100, b"x")
    late_s = [when % 10.0 - 1.0 for when, _ in drain(net)]
    assert 0.0 <= min(late_s) < 0.05
    assert 0.45 < max(late_s) <= 0.5


packets = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from([AB, CB]), st.integers(40, 65000)), min_size=1, max_size=60
)
shapes = st.builds(
    Shape,
    rate_bytes_per_s=st.sampled_from([1e3, 1e5, inf]),
    delay_s=st.floats(0, 1),
    jitter_s=st.floats(0, 1),
    loss=st.sampled_from([0.0, 0.2]),
)


@given(packets, shapes, st.sampled_from([1e4, inf]), st.booleans())
def test_pairs_keep_their_order_and_every_packet_is_accounted_for(
    sent: list[tuple[float, Pair, int]], shape: Shape, downlink: float, stalled: bool
) -> None:
    net = network({AB: shape, CB: shape}, downlinks={1: downlink})
    now = 0.0
    for number, (gap_s, pair, size) in enumerate(sent):
        now += gap_s
        net.send(now, pair, size, bytes([pair[0], number]))
        if stalled and number == len(sent) // 2:
            net.stall(now, AB, 3.0)
    arrived = [packet for _, packet in drain(net)]
    for source in (0, 2):
        numbers = [packet[1] for packet in arrived if packet[0] == source]
        assert numbers == sorted(numbers)
    counts = [line.dropped for line in net.lines.values()]
    assert len(arrived) + sum(each.lost + each.full for each in counts) == len(sent)


@given(st.lists(st.integers(40, 1500), min_size=2, max_size=80))
def test_no_interval_carries_more_than_its_rate(sizes: list[int]) -> None:
    net = network({AB: Shape(1000, queue_bytes=BIG)})
    for size in sizes:
        net.send(0.0, AB, size, size.to_bytes(2))
    arrivals = drain(net)
    for (before, _), (after, packet) in pairwise(arrivals):
        assert after - before >= int.from_bytes(packet) / 1000 - 1e-9


def test_a_cut_drops_what_enters_and_what_is_under_way() -> None:
    net = network({AB: Shape(delay_s=5.0), BA: Shape(delay_s=5.0)})
    net.send(0.0, AB, 100, b"under way")
    net.cut(1.0, AB, 10.0)
    net.send(2.0, AB, 100, b"enters")
    net.send(2.0, BA, 100, b"other way")
    net.send(11.0, AB, 100, b"after")
    assert drain(net) == [(7.0, b"other way"), (16.0, b"after")]
    assert net.lines[AB].dropped.cut == 2


def test_a_cut_can_be_ended_early() -> None:
    net = network({AB: Shape()})
    net.cut(0.0, AB, 100.0)
    net.cut(1.0, AB, 0.0)
    net.send(1.0, AB, 100, b"x")
    assert drain(net) == [(1.0, b"x")]


def test_a_stall_holds_everything_and_loses_nothing() -> None:
    net = network({AB: Shape(1000, delay_s=2.0), BA: Shape()})
    net.send(0.0, AB, 1000, b"1")
    net.send(0.0, AB, 1000, b"2")
    net.stall(1.5, AB, 10.0)
    net.send(2.0, AB, 1000, b"3")
    net.send(2.0, BA, 1000, b"other way")
    assert drain(net) == [(2.0, b"other way"), (13.0, b"1"), (14.0, b"2"), (15.0, b"3")]


def test_a_stalled_link_queues_up_to_its_limit() -> None:
    net = network({AB: Shape(1000, queue_bytes=2000)})
    net.stall(0.0, AB, 60.0)
    for _ in range(5):
        net.send(1.0, AB, 1000, b"x")
    assert [when for when, _ in drain(net)] == [61.0, 62.0]


def test_a_new_rate_holds_for_what_comes_and_counts_what_waits() -> None:
    net = network({AB: Shape(1000, queue_bytes=BIG)})
    net.send(0.0, AB, 2000, b"1")
    net.reshape(1.0, AB, Shape(100, queue_bytes=BIG))
    net.send(1.0, AB, 100, b"2")
    assert drain(net) == [(2.0, b"1"), (12.0, b"2")]


def test_a_shorter_delay_lets_nobody_overtake() -> None:
    net = network({AB: Shape(delay_s=10.0)})
    net.send(0.0, AB, 100, b"1")
    net.reshape(1.0, AB, Shape(delay_s=0.0))
    net.send(1.0, AB, 100, b"2")
    assert drain(net) == [(10.0, b"1"), (10.0, b"2")]


def test_a_held_server_has_no_more_backlog_than_before() -> None:
    server = Server(1000, BIG)
    server.take(0.0, 3000)
    server.hold(1.0, 100.0)
    assert server.backlog_bytes(50.0) == 2000
    server.change(50.0, 500, BIG)
    assert server.free_s == 105.0
