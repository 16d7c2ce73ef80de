"""The sockets on which a coordinator waits for its workers and for other coordinators."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from hybridep_rt.errors import ConfigError

BACKLOG = 256


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets that already queue connections. Workers of this host connect to `unix_path`.

    `wan` and `workers_tcp` are None where nobody comes that way.
    """

    unix_path: str
    unix: socket.socket
    wan: socket.socket | None
    workers_tcp: socket.socket | None

    @property
    def wan_address(self) -> tuple[str, int] | None:
        """Where other coordinators connect; the port is the real one even if 0 was asked for."""
        return _address(self.wan)

    @property
    def workers_address(self) -> tuple[str, int] | None:
        """Where workers of other hosts of this DC connect."""
        return _address(self.workers_tcp)

    def close(self) -> None:
        """Close all of them and remove the Unix socket's file."""
        for each in (self.unix, self.wan, self.workers_tcp):
            if each is not None:
                each.close()
        with contextlib.suppress(OSError):
            os.unlink(self.unix_path)


def open_listeners(unix_path: str, wan: tuple[str, int] | None, workers_tcp: tuple[str, int] | None) -> Listeners:
    """Bind and listen; port 0 takes any free port. Raises ConfigError where an address can't be had."""
    opened: list[socket.socket] = []
    try:
        opened.append(_listen_unix(unix_path))
        tcp = []
        for purpose, where in (("other DCs", wan), ("workers", workers_tcp)):
            tcp.append(None if where is None else _listen_tcp(purpose, *where))
            opened.extend(each for each in tcp[-1:] if each is not None)
    except ConfigError:
        for each in opened:
            each.close()
        raise
    return Listeners(unix_path, opened[0], *tcp)


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen for workers at {path}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def _listen_tcp(purpose: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen for {purpose} at {host}:{port}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen for {purpose} at {host}:{port}: {error.strerror or error}") from None
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket | None) -> tuple[str, int] | None:
    if sock is None:
        return None
    host, port = sock.getsockname()[:2]
    return host, port
