"""Does a link do what its topology says? Expectation and verdict. Pure functions.

A link's rate counts IP bytes. TCP's goodput is what headers leave of them: MSS / MTU per packet, with the MSS that the
kernel reports for the connection. Lost packets have used the link, but are no goodput.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.testbed.shaping import Access, Shape

TOLERANCE = 0.05
# Of a round trip: two passes through the relay and the kernel, on a machine that may be busy.
TOLERANCE_S = 0.001
MTU_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Expected:
    """What a directed pair of DCs should do; `way_s` is from source to target. Half the jitter is in the times."""

    source: str
    target: str
    rate_bytes_per_s: float
    way_s: float
    rtt_s: float
    loss: float
    queue_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What it did. `relay_cpu` is the share of one core that the relay took meanwhile."""

    goodput_bytes_per_s: float
    rtt_s: float
    mss_bytes: int
    relay_cpu: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both, compared. `rate_bytes_per_s` is the goodput with headers and losses: comparable with the link's rate."""

    expected: Expected
    measured: Measured
    rate_bytes_per_s: float
    rate_ok: bool
    rtt_ok: bool

    @property
    def passed(self) -> bool:
        """Whether rate and RTT are within the tolerance."""
        return self.rate_ok and self.rtt_ok

    @property
    def added_rtt_s(self) -> float:
        """How much longer the round trip took than configured."""
        return self.measured.rtt_s - self.expected.rtt_s


def expect(names: tuple[str, str], there: Shape, back: Shape, source: Access, target: Access) -> Expected:
    """What the shapes of both ways and the DCs' access rates promise to one TCP connection."""
    rate = min(there.rate_bytes_per_s, source.uplink_bytes_per_s, target.downlink_bytes_per_s)
    there_s, back_s = (shape.delay_s + shape.jitter_s / 2 for shape in (there, back))
    return Expected(*names, rate, there_s, there_s + back_s, there.loss, there.queue_limit_bytes)


def judge(expected: Expected, measured: Measured) -> Verdict:
    """Compare."""
    rate = measured.goodput_bytes_per_s * MTU_BYTES / measured.mss_bytes / (1 - expected.loss)
    rate_ok = abs(rate - expected.rate_bytes_per_s) <= TOLERANCE * expected.rate_bytes_per_s
    rtt_ok = abs(measured.rtt_s - expected.rtt_s) <= max(TOLERANCE * expected.rtt_s, TOLERANCE_S)
    return Verdict(expected, measured, rate, rate_ok, rtt_ok)
