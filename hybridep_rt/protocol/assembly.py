"""What one end of a link has received so far, whichever connection brought it. Sans-I/O.

Only whole frames count: what a connection that was cut had brought of the next one comes again.
"""

from __future__ import annotations

import numpy as np

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.credits import Credits
from hybridep_rt.protocol.envelope import Envelope, decode_envelope
from hybridep_rt.protocol.frames import FIRST, LAST, Arrived, Header
from hybridep_rt.protocol.messages import Message, Traffic

TRAFFIC = {int(traffic): traffic for traffic in Traffic}


class Partial:
    """A message of which the first `filled` bytes of payload are here."""

    __slots__ = ("envelope", "filled", "message_id", "metadata", "payload", "traffic")

    def __init__(self, message_id: int, metadata: bytes, envelope: Envelope, traffic: int, total_bytes: int) -> None:
        self.message_id = message_id
        self.metadata = metadata
        self.envelope = envelope
        self.traffic = traffic
        # np.empty neither clears the memory nor takes it from the system before bytes arrive.
        self.payload = np.empty(total_bytes, np.uint8).data if total_bytes else memoryview(bytearray())
        self.filled = 0

    def arrived(self) -> Arrived:
        """The event of the whole message."""
        to = self.envelope
        message = Message(to.source, to.to, to.channel, to.position, self.payload, to.counts)
        return Arrived(message, self.message_id, TRAFFIC[self.traffic], to.urgency, self.metadata)


class Assembly:
    """`received`: how many numbered frames arrived whole. `credits`: the messages the owner has not dealt with yet."""

    def __init__(self, limits: Limits) -> None:
        self.received = 0
        self.received_bytes = 0
        self.credits = Credits(limits.window_bytes, limits.flows)
        self._limits = limits
        self._partials: dict[int, Partial] = {}

    def outstanding_bytes(self, source: Address, to: Address, channel: str) -> int | None:
        """What is still to come of a message that has begun; None if none has."""
        begun = [
            each
            for each in self._partials.values()
            if (each.envelope.source, each.envelope.to, each.envelope.channel) == (source, to, channel)
        ]
        return sum(len(each.payload) - each.filled for each in begun) if begun else None

    def check(self, header: Header) -> None:
        """Raise RemoteProtocolError unless this may be the next frame of a message."""
        if header.flags & FIRST:
            done_bytes = 0
            self._check_first(header)
        else:
            partial = self._partials.get(header.message_id)
            if partial is None or header.metadata_bytes or header.payload_bytes == 0:
                raise RemoteProtocolError("a chunk that continues no message")
            if (partial.traffic, len(partial.payload)) != (header.traffic, header.total_bytes):
                raise RemoteProtocolError("a chunk that contradicts its message")
            done_bytes = partial.filled
        end_bytes = done_bytes + header.payload_bytes
        if end_bytes > header.total_bytes or (end_bytes == header.total_bytes) != bool(header.flags & LAST):
            raise RemoteProtocolError("a message's chunks don't add up to its size")

    def begin(self, header: Header, metadata: bytes) -> Partial:
        """The message that a checked frame belongs to. Raises RemoteProtocolError for a bad or unexpected envelope."""
        if not header.flags & FIRST:
            return self._partials[header.message_id]
        envelope = decode_envelope(metadata)
        if not self.credits.may_begin((envelope.source, envelope.to, envelope.channel), header.total_bytes):
            raise RemoteProtocolError(f"a message beyond its credit of {self.credits.window_bytes} bytes")
        return Partial(header.message_id, metadata, envelope, header.traffic, header.total_bytes)

    def frame_done(self, header: Header, partial: Partial) -> Arrived | None:
        """The last byte of a frame of a message is here; the message, if it is whole."""
        self.received += 1
        self.received_bytes += header.payload_bytes
        partial.filled += header.payload_bytes
        if header.flags & FIRST:
            to = partial.envelope
            self.credits.begin(header.message_id, (to.source, to.to, to.channel), header.total_bytes)
            self._partials[header.message_id] = partial
        if not header.flags & LAST:
            return None
        del self._partials[header.message_id]
        return partial.arrived()

    def _check_first(self, header: Header) -> None:
        if header.total_bytes > self._limits.message_bytes:
            raise RemoteProtocolError(
                f"message of {header.total_bytes} bytes, the limit is {self._limits.message_bytes}"
            )
        if not 0 < header.metadata_bytes <= self._limits.metadata_bytes:
            raise RemoteProtocolError(f"message with {header.metadata_bytes} bytes of metadata")
        if header.message_id in self._partials or self.credits.holds(header.message_id):
            raise RemoteProtocolError("a message began twice")
        if not header.flags & LAST and len(self._partials) >= self._limits.open_messages:
            raise RemoteProtocolError(f"more than {self._limits.open_messages} messages begun at once")
