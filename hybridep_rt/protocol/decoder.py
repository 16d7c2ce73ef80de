"""Hostile bytes of one connection -> events."""

from __future__ import annotations

from hybridep_rt.config import Limits
from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.protocol.assembly import TRAFFIC, Assembly, Partial
from hybridep_rt.protocol.envelope import unpack
from hybridep_rt.protocol.frames import (
    FIRST,
    HANDSHAKE_METADATA_BYTES,
    HEADER_BYTES,
    LAST,
    UNNUMBERED,
    Arrived,
    Control,
    Header,
    Kind,
    decode_header,
)
from hybridep_rt.protocol.messages import Bytes

_KINDS = {int(kind): kind for kind in Kind}


class FrameDecoder:
    """Hostile bytes -> Control and Arrived events, or RemoteProtocolError; after an error it stays broken.

    Made for `asyncio.BufferedProtocol`: fill `buffer()`, say `received(n)`, then take `next_event()` until it is None.
    The buffer is a scratch area for headers, metadata and small payloads; the rest of a large payload goes straight
    into the message's own memory. Until `allow_messages()` only small control frames are accepted.
    """

    def __init__(self, limits: Limits) -> None:
        self._scratch = memoryview(bytearray(HEADER_BYTES + max(limits.metadata_bytes, HANDSHAKE_METADATA_BYTES)))
        self._start = self._end = 0
        self._direct = False
        self._messages_allowed = False
        self._assembly = Assembly(limits)
        self._header: Header | None = None
        self._partial: Partial | None = None
        self._filled = 0
        """Bytes of the partial message that are here, with those of the current frame."""
        self._missing = 0
        self._skipping_bytes = 0
        self._broken: str | None = None

    def allow_messages(self, assembly: Assembly | None = None) -> None:
        """The peer has proved who it is: accept messages and full-sized metadata, and go on with what it had sent."""
        self._messages_allowed = True
        self._assembly = assembly or self._assembly

    def buffer(self) -> memoryview:
        """Where the next bytes have to be put; never empty."""
        self._direct = self._partial is not None and self._missing > 0 and self._start == self._end
        if self._direct and self._partial is not None:
            return self._partial.payload[self._filled : self._filled + self._missing]
        if self._start:
            held = self._end - self._start
            self._scratch[:held] = self._scratch[self._start : self._end]
            self._start, self._end = 0, held
        return self._scratch[self._end :]

    def received(self, nbytes: int) -> bool:
        """`nbytes` were put at the start of the last `buffer()`. True if they surely complete no event."""
        if self._direct:
            self._filled += nbytes
            self._missing -= nbytes
            return self._missing > 0
        self._end += nbytes
        return False

    def feed(self, data: Bytes) -> list[Control | Arrived]:
        """All events of a whole byte string, for callers that have no buffer to fill."""
        events: list[Control | Arrived] = []
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            nbytes = min(len(room), len(rest))
            room[:nbytes] = rest[:nbytes]
            self.received(nbytes)
            rest = rest[nbytes:]
            while (event := self.next_event()) is not None:
                events.append(event)
        return events

    def next_event(self) -> Control | Arrived | None:
        """The next event that the received bytes complete, or None. Raises RemoteProtocolError."""
        if self._broken is not None:
            raise RemoteProtocolError(self._broken)
        try:
            return self._advance()
        except RemoteProtocolError as error:
            self._broken = str(error)
            raise

    def _advance(self) -> Control | Arrived | None:
        while True:
            event: Control | Arrived | None = None
            if self._skipping_bytes:
                self._skipping_bytes -= len(self._take(min(self._skipping_bytes, self._held)))
                if self._skipping_bytes:
                    return None
            elif self._partial is not None:
                self._take_payload(self._partial)
                if self._missing:
                    return None
                event = self._end_of_frame(self._partial)
            elif not self._take_header() or self._header is None:
                return None
            elif self._header.kind not in UNNUMBERED and self._header.sequence < self._assembly.received:
                self._skip(self._header)
            elif self._held >= self._header.metadata_bytes:
                event = self._begin_frame(self._header)
            else:
                return None
            if event is not None:
                return event

    @property
    def _held(self) -> int:
        return self._end - self._start

    def _take(self, nbytes: int) -> memoryview:
        self._start += nbytes
        return self._scratch[self._start - nbytes : self._start]

    def _take_header(self) -> bool:
        if self._header is None and self._held >= HEADER_BYTES:
            header = decode_header(self._take(HEADER_BYTES))
            self._check(header)
            self._header = header
        return self._header is not None

    def _skip(self, header: Header) -> None:
        """The frame came before."""
        self._header = None
        self._skipping_bytes = header.metadata_bytes + header.payload_bytes

    def _begin_frame(self, header: Header) -> Control | None:
        metadata = bytes(self._take(header.metadata_bytes))
        if header.kind != Kind.MESSAGE:
            self._header = None
            if header.kind not in UNNUMBERED:
                self._assembly.received += 1
            return Control(_KINDS[header.kind], metadata, unpack(metadata))
        self._partial = self._assembly.begin(header, metadata)
        self._filled = self._partial.filled
        self._missing = header.payload_bytes
        return None

    def _take_payload(self, partial: Partial) -> None:
        nbytes = min(self._missing, self._held)
        if nbytes:
            partial.payload[self._filled : self._filled + nbytes] = self._take(nbytes)
            self._filled += nbytes
            self._missing -= nbytes

    def _end_of_frame(self, partial: Partial) -> Arrived | None:
        header, self._header, self._partial = self._header, None, None
        assert header is not None
        return self._assembly.frame_done(header, partial)

    def _check(self, header: Header) -> None:
        if header.kind not in _KINDS or header.traffic not in TRAFFIC:
            raise RemoteProtocolError(f"frame of unknown kind {header.kind} or class {header.traffic}")
        if header.flags & ~(FIRST | LAST):
            raise RemoteProtocolError("frame with unknown flags")
        due = 0 if header.kind in UNNUMBERED else self._assembly.received
        if header.sequence > due:
            raise RemoteProtocolError(f"frame {header.sequence} arrived where {due} was due")
        if header.kind == Kind.MESSAGE:
            if not self._messages_allowed:
                raise RemoteProtocolError("message before the handshake")
            if header.sequence == due:
                self._assembly.check(header)
        elif header.payload_bytes or header.total_bytes or header.flags != FIRST | LAST:
            raise RemoteProtocolError("control frame with a payload")
        elif header.metadata_bytes > HANDSHAKE_METADATA_BYTES:
            raise RemoteProtocolError(f"control frame with {header.metadata_bytes} bytes of metadata")
