"""Back-pressure on one direction of a link: which messages may begin. Sans-I/O, the same at both ends.

A message counts from its first frame until its receiver has dealt with it: a worker when its program has taken it, a
coordinator when it has passed it on. A message may begin while the window has room for it, or when nothing of its flow
waits at the receiver. The second rule makes deadlock impossible, however small the window: programs take the messages
of a flow in order, so whichever message one waits for may travel. Once begun, a message is never stopped.

The sender waits until a message may begin; the receiver refuses one that may not.
"""

from __future__ import annotations

from collections import Counter

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import Address

Flow = tuple[Address, Address, str]

MESSAGE_BYTES = 1024
"""What a message costs besides its payload: its bookkeeping, so that a flood of empty messages is bounded too."""


class Credits:
    """The messages that wait at the receiver. `window_bytes` is the receiver's; it tells the sender."""

    def __init__(self, window_bytes: int, flows: int) -> None:
        self.window_bytes = window_bytes
        self.used_bytes = 0
        self._flows = flows
        self._waiting: dict[int, tuple[Flow, int]] = {}
        self._per_flow: Counter[Flow] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, message_id: int) -> bool:
        """Has this message begun, and is it still waiting?"""
        return message_id in self._waiting

    def may_begin(self, flow: Flow, payload_bytes: int) -> bool:
        """May a message begin?"""
        if flow not in self._per_flow:
            return len(self._per_flow) < self._flows
        return self.used_bytes + payload_bytes + MESSAGE_BYTES <= self.window_bytes

    def begin(self, message_id: int, flow: Flow, payload_bytes: int) -> None:
        """A message begins."""
        self._waiting[message_id] = (flow, payload_bytes + MESSAGE_BYTES)
        self._per_flow[flow] += 1
        self.used_bytes += payload_bytes + MESSAGE_BYTES

    def done(self, message_id: int) -> int:
        """The receiver has dealt with a message; the bytes it took. Raises RemoteProtocolError where none waits."""
        try:
            flow, cost_bytes = self._waiting.pop(message_id)
        except KeyError:
            raise RemoteProtocolError(f"a receipt for message {message_id}, which is not on its way") from None
        self.used_bytes -= cost_bytes
        self._per_flow[flow] -= 1
        if not self._per_flow[flow]:
            del self._per_flow[flow]
        return cost_bytes
