"""Reach a listener, which may not be there yet: try, wait a little longer each time, until the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable

from hybridep_rt.errors import ConfigError, ConnectFailed, HandshakeRefused, TransportError
from hybridep_rt.transport.connection import Connection

FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0


def parse_endpoint(text: str) -> str | tuple[str, int]:
    """`unix:/path` -> path, `tcp:host:port` -> (host, port). Raises ConfigError."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return host.strip("[]"), int(port)
    raise ConfigError(f"an endpoint is unix:PATH or tcp:HOST:PORT, not {text[:200]!r}")


async def join(
    make: Callable[[], Connection],
    endpoint: str,
    peer_name: str,
    deadline: float,
) -> Connection:
    """A connection to the endpoint that has opened. `deadline`: as `time.monotonic()`.

    Raises HandshakeRefused at once when the two sides don't belong together, ConnectFailed with the last reason else.
    """
    where = parse_endpoint(endpoint)
    wait_s, failure = FIRST_WAIT_S, ConnectFailed(peer_name, f"not reached at {endpoint}: no answer")
    while (remaining_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):  # the last failure says more
            async with asyncio.timeout(remaining_s):
                outcome = await attempt(make, where)
            if isinstance(outcome, Connection):
                return outcome
            if isinstance(outcome, HandshakeRefused):
                raise outcome
            reason = outcome.reason if isinstance(outcome, TransportError) else str(outcome)
            failure = ConnectFailed(peer_name, f"not reached at {endpoint}: {reason}")
            await asyncio.sleep(min(wait_s, max(deadline - time.monotonic(), 0.0)))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise failure


async def attempt(
    make: Callable[[], Connection], where: str | tuple[str, int], tls: ssl.SSLContext | None = None
) -> Connection | Exception:
    """One connection and its handshake: the open connection, or why there is none."""
    try:
        connection = await _connect(make, where, tls)
    except OSError as error:  # TLS errors are OSErrors
        reason = error.strerror or str(error) or "no answer"
        return ConnectionRefusedError(reason) if isinstance(error, ConnectionRefusedError) else OSError(reason)
    try:
        return await asyncio.shield(connection.opened) or connection
    except asyncio.CancelledError:
        connection.abort()
        raise


async def _connect(
    make: Callable[[], Connection], where: str | tuple[str, int], tls: ssl.SSLContext | None
) -> Connection:
    loop = asyncio.get_running_loop()
    if isinstance(where, str):
        return (await loop.create_unix_connection(make, where))[1]
    # No host name to send or to compare: the names in certificates are DCs', and the handshake compares those.
    return (await loop.create_connection(make, *where, ssl=tls, server_hostname="" if tls else None))[1]
