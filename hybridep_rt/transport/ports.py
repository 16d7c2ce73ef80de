"""The two seams through which training code reaches other processes.

`SiteGroup` works inside a DC and carries tensors, `WanPort` between DCs and carries bytes. Each has a real
implementation and an in-memory double, so that a whole multi-DC run fits in one test process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message, Payload, Traffic
from hybridep_rt.protocol.position import Position

if TYPE_CHECKING:
    import torch

    Parcel = Sequence[torch.Tensor]
    """Tensors for one destination; every destination's parcel has the same dtypes and trailing dimensions."""


class SiteGroup(Protocol):
    """The workers of one DC. A collective: every worker calls it in the same order, with the same position."""

    index: int
    size: int

    def exchange(
        self, position: Position, parcels: Sequence[Parcel], rows_from: Sequence[Sequence[int]] | None = None
    ) -> list[list[torch.Tensor]]:
        """Give `parcels[i]` to worker i; return what worker i gave to this one, for each i in order.

        The number of rows (first dimension) of each tensor may differ per destination and may be 0: it travels with
        the data, as does the position. What a worker gives to itself is passed through without a copy.

        `rows_from[i][j]`: rows of tensor j from worker i, where every worker knows them already: saves telling them,
        and with it the check of positions. Only for an answer to the exchange just before, in the same function.

        Raises PositionMismatch where workers are at different places, DeadlineExceeded, PeerLost.
        """

    def close(self) -> None:
        """Free the group. Idempotent."""


class WanPort(Protocol):
    """Messages to and from any worker of any DC, through the coordinators."""

    address: Address

    def send(
        self,
        to: Address,
        channel: str,
        position: Position,
        payload: Payload,
        *,
        traffic: Traffic,
        counts: Sequence[int] = (),
        urgency: int = 0,
    ) -> None:
        """Queue one message and return. The buffers must not change until the step is over.

        Messages of one (source, destination, channel) arrive once and in order. Within a class of traffic, a lower
        `urgency` goes first on a link.

        Raises PeerLost once any process of the job is known to be gone.
        """

    def receive(self, source: Address, channel: str, position: Position, *, timeout_s: float | None = None) -> Message:
        """Wait for the next message of `channel` from `source`, which has to carry `position`.

        `timeout_s`: default is `Timeouts.operation_s`.

        Raises PositionMismatch (and names both), DeadlineExceeded, PeerLost.
        """

    def take(self, source: Address, channel: str, position: Position) -> Message | None:
        """As `receive` if the message is here; None, at once, if it is not. Any thread. Raises PositionMismatch."""

    def watch(self, channel: str, notify: Callable[[], None]) -> None:
        """Call `notify`, in the thread that delivers, whenever a message of `channel` has arrived. It must be quick."""

    def check(self) -> None:
        """Raise what ended the job (PeerLost, ...), if anything did."""

    def expect(self, peers: Iterable[Address], position: Position) -> None:
        """Raise what ended the job, or PositionMismatch where one of `peers`, who are needed now, has ended."""

    def fail(self, reason: str) -> None:
        """Tell all workers of all DCs that this one failed, in one line; waits at most a second."""

    def close(self) -> None:
        """Say goodbye, send what is queued, free the threads. Idempotent."""
