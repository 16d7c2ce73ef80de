"""Reach a listener, which may not be there yet: try, wait a little longer each time, until the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hybridep_rt.errors import ConfigError, ConnectFailed, HandshakeRefused, HybridEPError
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
    attempt_failed: Callable[[HybridEPError], None] = lambda error: None,
) -> Connection:
    """A link to the endpoint that has opened. `deadline`: as `time.monotonic()`. Each failed attempt is told.

    Raises HandshakeRefused at once when the two sides don't belong together, ConnectFailed with the last reason else.
    """
    where = parse_endpoint(endpoint)
    wait_s, failure = FIRST_WAIT_S, ConnectFailed(peer_name, f"not reached at {endpoint} in time")
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(remaining_s):
                link = await _connect(make, where)
                error = await link.opened
            if error is None:
                return link
            if isinstance(error, HandshakeRefused):
                raise error
            failure = ConnectFailed(peer_name, getattr(error, "reason", str(error)))
        except (OSError, TimeoutError) as refused:
            reason = getattr(refused, "strerror", None) or str(refused) or "no answer"
            failure = ConnectFailed(peer_name, f"not reached at {endpoint}: {reason}")
        attempt_failed(failure)
        await asyncio.sleep(min(wait_s, max(deadline - time.monotonic(), 0.0)))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise failure


async def _connect(make: Callable[[], Connection], where: str | tuple[str, int]) -> Connection:
    loop = asyncio.get_running_loop()
    if isinstance(where, str):
        return (await loop.create_unix_connection(make, where))[1]
    return (await loop.create_connection(make, *where))[1]
