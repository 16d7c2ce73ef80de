"""How the links of a running coordinator are: it answers each connection to a Unix socket with one JSON object.

{"who": "coordinator of DC \\"a\\"", "pid": 42, "links": {"coordinator of DC \\"b\\"": {LinkStatus' fields}, ...}}
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from hybridep_rt.errors import ConnectFailed, RemoteProtocolError
from hybridep_rt.metrics import LinkStatus

ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Status:
    """The links of one coordinator by the name of their peer."""

    who: str
    pid: int
    links: dict[str, LinkStatus]

    def pack(self) -> bytes:
        """The answer's bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Status:
        """The inverse of `pack`. Raises RemoteProtocolError."""
        try:
            document = json.loads(raw)
            links = {str(name): _link(link) for name, link in document["links"].items()}
            return cls(str(document["who"]), int(document["pid"]), links)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RemoteProtocolError("the answer is no status of a coordinator") from None


def _link(document: dict[str, Any]) -> LinkStatus:
    known = {each.name for each in fields(LinkStatus)}
    return LinkStatus(**{name: value for name, value in document.items() if name in known})


def serve_status(status: Callable[[], Status]) -> Callable[[], asyncio.BaseProtocol]:
    """Protocols that write the status and close, whatever the other end says."""

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            answering = cast(asyncio.Transport, transport)
            answering.write(status().pack())
            answering.close()

    return Answer


def ask(path: str, timeout_s: float = 2.0) -> Status:
    """The status of the coordinator at that socket. Raises ConnectFailed, RemoteProtocolError."""
    deadline = time.monotonic() + timeout_s
    raw = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(path)
            while piece := sock.recv(1 << 16):
                raw += piece
                if len(raw) > ANSWER_BYTES or time.monotonic() > deadline:
                    raise RemoteProtocolError("the answer has no end")
    except OSError as error:
        raise ConnectFailed(f"coordinator at {path}", error.strerror or str(error)) from None
    return Status.unpack(bytes(raw))
