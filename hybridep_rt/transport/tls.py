"""TLS 1.3 with a certificate on each side, for links between DCs. How it names its DC: see `protocol.identity`."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hybridep_rt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a DC's certificate and key, and of the authority that signed the certificates of all DCs (PEM)."""

    certificate: str
    key: str
    authority: str

    @classmethod
    def in_folder(cls, folder: str, dc: str) -> Self:
        """`FOLDER/DC.pem`, `FOLDER/DC.key` and `FOLDER/ca.pem`."""
        at = Path(folder)
        return cls(str(at / f"{dc}.pem"), str(at / f"{dc}.key"), str(at / "ca.pem"))

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """For the accepting and for the dialling side. Raises ConfigError where a file is missing, open or wrong."""
        self._check_key()
        return self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _check_key(self) -> None:
        try:
            mode = os.stat(self.key).st_mode
        except OSError as error:
            raise ConfigError(f"TLS key {self.key}: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"TLS key {self.key}: others than its owner may use it; run chmod 600 {self.key}")

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the handshake compares names: a DC's name is no host's
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            files = f"{self.certificate}, {self.key}, {self.authority}"
            raise ConfigError(f"TLS: {files}: {getattr(error, 'reason', None) or error.strerror or error}") from None
        return context


def certified_names(transport: asyncio.BaseTransport) -> frozenset[str] | None:
    """The names in the certificate of the other end; None without TLS."""
    secure = transport.get_extra_info("ssl_object")
    if secure is None:
        return None
    names = (secure.getpeercert() or {}).get("subjectAltName", ())
    return frozenset(name for kind, name in names if kind == "DNS")


def _no_password() -> str:
    """Never ask on a terminal: nobody sits there."""
    raise ConfigError("a TLS key with a password can't be used")
