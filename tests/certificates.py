"""A small certificate authority for tests."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.now(UTC)


class Authority:
    """Writes FOLDER/ca.pem, and on `issue` FOLDER/DC.pem and FOLDER/DC.key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        builder = _builder(self._name, self._name, self._key, 1).add_extension(x509.BasicConstraints(True, 0), True)
        certificate = builder.sign(self._key, hashes.SHA256())
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, dc: str, *, named: str = "", days: int = 1) -> None:
        """A certificate for DC `named`, in the files of DC `dc`; expired if `days` is negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.DNSName(named or dc)])
        certificate = (
            _builder(_name(named or dc), self._name, key, days)
            .add_extension(alternative, False)
            .sign(self._key, hashes.SHA256())
        )
        (self.folder / f"{dc}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        path = self.folder / f"{dc}.key"
        path.touch(0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        os.chmod(path, 0o600)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    start = NOW - timedelta(days=10)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(NOW + timedelta(days=days))
    )
