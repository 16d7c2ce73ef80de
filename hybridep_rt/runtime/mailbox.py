"""Messages of the user's own, between any two workers of any DCs."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Bytes, Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.transport.ports import WanPort

Peer: TypeAlias = int | tuple[str, int]
"""A global worker number, or (name of the DC, local index)."""

_ANYWHERE = Position(0, 0, -1, Phase.MAILBOX)


class Mailbox:
    """One named channel. Buffers arrive once and in order per sender; a receiver waits with a deadline."""

    def __init__(self, channel: str, wan: WanPort, layout: Layout, dc_names: tuple[str, ...]) -> None:
        if not 0 < len(channel) <= 48 or not channel.isprintable():
            raise ConfigError("a channel's name has 1 to 48 printable characters")
        self._channel = f"user/{channel}"
        self._wan = wan
        self._layout = layout
        self._dc_names = dc_names

    def send(self, to: Peer, data: Bytes) -> None:
        """Queue `data` and return; it must not change before it has arrived. Raises ConfigError, PeerLost."""
        self._wan.send(self._address(to), self._channel, _ANYWHERE, [data], traffic=Traffic.USER)

    def receive(self, source: Peer, *, timeout_s: float | None = None) -> memoryview:
        """The next buffer from `source`, writable. `timeout_s`: default is the run's operation timeout.

        Raises DeadlineExceeded, PeerLost, ConfigError.
        """
        return self._wan.receive(self._address(source), self._channel, _ANYWHERE, timeout_s=timeout_s).payload

    async def send_async(self, to: Peer, data: Bytes) -> None:
        """`send` for programs with an event loop."""
        await asyncio.to_thread(self.send, to, data)

    async def receive_async(self, source: Peer, *, timeout_s: float | None = None) -> memoryview:
        """`receive` without blocking the caller's event loop."""
        return await asyncio.to_thread(self.receive, source, timeout_s=timeout_s)

    def _address(self, peer: Peer) -> Address:
        if isinstance(peer, int):
            return Address(*self._layout.locate(peer))
        name, local = peer
        if name not in self._dc_names:
            raise ConfigError(f'no DC "{name}": there are {", ".join(self._dc_names)}')
        dc = self._dc_names.index(name)
        self._layout.number(dc, local)
        return Address(dc, local)
