"""The link benchmarks measure what they say, at sizes that take a second or two."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import chain, lanes, pair, priority, transport


def test_the_bound_is_the_one_way_delay_and_four_chunks() -> None:
    assert priority.allowed_s() == pytest.approx(0.020 + 4 * 0.005)


def test_delays_are_summed_up() -> None:
    found = priority.Delays.of(7, [0.01 * number for number in range(1, 102)])
    assert (found.queued_bytes, found.messages) == (7, 101)
    assert (found.p50_s, found.p99_s, found.worst_s) == pytest.approx((0.51, 1.0, 1.01))
    with pytest.raises(ValueError, match="no message"):
        priority.Delays.of(0, [])


@pytest.mark.parametrize("tls", [False, True])
def test_a_load_goes_over_both_chains(tls: bool) -> None:
    [result] = transport.measure([transport.Load(3, 100_000)], 2, tls, Console(quiet=True))
    assert result.load.nbytes == 300_000
    assert set(result.goodput_bytes_per_s) == {transport.BARE, transport.RUNTIME}
    assert min(goodput.low for goodput in result.goodput_bytes_per_s.values()) > 0
    assert result.goodput_ratio.low > 0
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(transport.table([result]))
    assert "3 x 97 KiB" in console.export_text()


def test_a_process_that_ends_early_is_told() -> None:
    with pair.processes() as start:
        connection, pid = start(id)
        assert pair.cpu_s((pid,)) >= 0
        with pytest.raises(RuntimeError, match="ended early"):
            pair.ask(connection)


def test_lanes_move_bytes_at_the_same_time() -> None:
    with chain.running() as one, chain.running() as other:
        passages = [lanes.move([one, other], 2) for _ in range(2)]
    for each in passages:
        assert each.wall_s > 0
        assert 0 <= each.forwarders_cpu_s <= each.all_cpu_s
    taken = {f"False {count}": passages for count in (1, 2)}
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(lanes.table([lanes.result_of(count, False, taken, 2) for count in (1, 2)]))
    assert "1.00 [1.00, 1.00]" in console.export_text()
