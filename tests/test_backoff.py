"""Backoff: literal times, the jitter's bounds."""

from __future__ import annotations

from random import Random

from hybridep_rt.protocol.backoff import Backoff


class Fixed(Random):
    def random(self) -> float:
        return 0.5


def test_waits_double_up_to_the_longest_and_start_again() -> None:
    backoff = Backoff(Fixed(), 1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [0.75, 1.5, 3.0, 3.75, 3.75]
    backoff.reset()
    assert backoff.next_s() == 0.75


def test_the_jitter_takes_up_to_half() -> None:
    backoff = Backoff(Random(1), 4.0, 4.0)
    waits = [backoff.next_s() for _ in range(200)]
    assert all(2.0 <= wait <= 4.0 for wait in waits)
    assert max(waits) - min(waits) > 1.5
