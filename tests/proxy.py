"""A TCP proxy in a thread of this process, whose connections can be cut between any two bytes, or frozen."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from types import TracebackType
from typing import Self

_BUFFER_BYTES = 1 << 16


class Proxy:
    """Forwards to `target`. With `cut_after_bytes`, cuts each connection after about so many bytes, at random."""

    def __init__(self, target: tuple[str, int], cut_after_bytes: int = 0, cuts: int = 0, seed: int = 0) -> None:
        self.address = ("", 0)
        self.cuts = 0
        self.connections = 0
        self.target = target
        self._cut_after_bytes = cut_after_bytes
        self._cuts_left = cuts
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)  # little stays here when it is frozen
        serving = asyncio.start_server(self._serve, sock=sock, limit=_BUFFER_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(5)
        self.address = sock.getsockname()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def cut(self) -> None:
        """Cut all connections now, both ways at once."""
        self._loop.call_soon_threadsafe(self._cut)

    def freeze(self) -> None:
        """Stop forwarding without closing anything."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def thaw(self) -> None:
        """Forward again."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    async def _close(self) -> None:
        self._server.close()
        self._flowing.set()
        self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self) -> None:
        self.cuts += bool(self._writers)
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            onward_reader, onward_writer = await asyncio.open_connection(*self.target, limit=_BUFFER_BYTES)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(onward_writer)
        await asyncio.gather(self._copy(reader, onward_writer), self._copy(onward_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = self._random.randrange(1, 2 * self._cut_after_bytes) if self._cut_after_bytes else 0
        try:
            while data := await reader.read(_BUFFER_BYTES):
                await self._flowing.wait()
                if budget and self._cuts_left and len(data) >= budget:
                    writer.write(data[:budget])
                    self._cuts_left -= 1
                    self._cut()
                    return
                budget -= len(data) if budget else 0
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except (ConnectionError, RuntimeError):
            pass
