"""Accepting connections on a listening socket, with or without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from hybridep_rt.transport.connection import Connection

_OUT_OF_SOCKETS_S = 0.1


async def accept_all(
    listener: socket.socket, make: Callable[[], Connection | None], tls: ssl.SSLContext | None, handshake_s: float
) -> None:
    """Accept until cancelled. `make` gives the protocol of a connection, or None to turn it away before TLS costs.

    `gone` of a connection whose TLS handshake fails, or takes longer than `handshake_s`, is done then.
    """
    loop = asyncio.get_running_loop()
    greetings: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # it went away again, or this process has no more sockets
                await asyncio.sleep(_OUT_OF_SOCKETS_S)
                continue
            connection = make()
            if connection is None:
                sock.close()
                continue
            greeting = loop.create_task(_greet(connection, sock, tls, handshake_s))
            greetings.add(greeting)
            greeting.add_done_callback(greetings.discard)
    finally:
        for greeting in greetings:
            greeting.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)


async def _greet(connection: Connection, sock: socket.socket, tls: ssl.SSLContext | None, handshake_s: float) -> None:
    loop = asyncio.get_running_loop()
    timeout_s = None if tls is None else handshake_s
    try:
        await loop.connect_accepted_socket(lambda: connection, sock, ssl=tls, ssl_handshake_timeout=timeout_s)
    except OSError:  # a stranger: errors of TLS are OSErrors
        sock.close()
        with contextlib.suppress(asyncio.InvalidStateError):
            connection.gone.set_result(None)
