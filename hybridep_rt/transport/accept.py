"""Accepting connections on a listening socket, with or without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from hybridep_rt.errors import HybridEPError
from hybridep_rt.transport.connection import Connection

_OUT_OF_SOCKETS_S = 0.1


async def accept_all(
    listener: socket.socket,
    make: Callable[[], Connection],
    most_strangers: int,
    tls: ssl.SSLContext | None = None,
    tls_handshake_s: float = 0.0,
) -> None:
    """Accept until cancelled; then those go who have not proved who they are. `make` gives a connection's protocol.

    Of those there are never more than `most_strangers`: who comes then is turned away before TLS costs. `gone` of a
    connection whose TLS handshake fails, or takes longer than `tls_handshake_s`, is done then.
    """
    loop = asyncio.get_running_loop()
    strangers: set[Connection] = set()
    greetings: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # it went away again, or this process has no more sockets
                await asyncio.sleep(_OUT_OF_SOCKETS_S)
                continue
            if len(strangers) >= most_strangers:
                sock.close()
                continue
            connection = make()
            _keep_until_known(connection, strangers)
            greeting = loop.create_task(_greet(connection, sock, tls, tls_handshake_s))
            greetings.add(greeting)
            greeting.add_done_callback(greetings.discard)
    finally:
        for greeting in greetings:
            greeting.cancel()
        for stranger in strangers:
            stranger.abort()
        await asyncio.gather(*greetings, return_exceptions=True)


def _keep_until_known(connection: Connection, strangers: set[Connection]) -> None:
    """One that is refused counts until it has gone."""

    def opened(outcome: asyncio.Future[HybridEPError | None]) -> None:
        if outcome.result() is None:
            strangers.discard(connection)

    strangers.add(connection)
    connection.opened.add_done_callback(opened)
    connection.gone.add_done_callback(lambda _: strangers.discard(connection))


async def _greet(
    connection: Connection, sock: socket.socket, tls: ssl.SSLContext | None, tls_handshake_s: float
) -> None:
    loop = asyncio.get_running_loop()
    timeout_s = None if tls is None else tls_handshake_s
    try:
        await loop.connect_accepted_socket(lambda: connection, sock, ssl=tls, ssl_handshake_timeout=timeout_s)
    except OSError:  # a stranger: errors of TLS are OSErrors
        sock.close()
        with contextlib.suppress(asyncio.InvalidStateError):
            connection.gone.set_result(None)
