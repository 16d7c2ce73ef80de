"""A small certificate authority: one certificate per DC, which the DCs show each other on WAN links.

Nothing here reads or writes files or the clock; only the keys are random.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hybridep_rt.errors import ConfigError
from hybridep_rt.protocol.identity import DNS_SUFFIX, dns_name
from topology import Datacenter

_AUTHORITY = "HybridEP authority"
CLOCKS_APART = timedelta(hours=1)
"""Certificates hold from this long before they were made: a site's clock may be behind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate says. `names`: all that its holder may be called; `fingerprint`: SHA-256, hexadecimal."""

    subject: str
    cluster: str | None
    is_authority: bool
    names: tuple[str, ...]
    starts: datetime
    ends: datetime
    fingerprint: str


def new_authority(cluster: str | None, now: datetime, valid: timedelta) -> Pair:
    """An authority that signs itself; with a `cluster` it serves no other one. Raises ConfigError."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(_AUTHORITY, cluster)
    unsigned = _unsigned(name, name, key.public_key(), key.public_key(), now, _end(now, valid))
    unsigned = unsigned.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    unsigned = unsigned.add_extension(_key_usage(signs_certificates=True), critical=True)
    return _pair(unsigned.sign(key, hashes.SHA256()), key)


def issue(authority: Pair, cluster: str, dc: Datacenter, now: datetime, valid: timedelta) -> Pair:
    """A new key and certificate for one DC, for both ends of a TLS connection. Ends with the authority at the latest.

    Raises ConfigError where the authority is of another cluster, broken or not valid now, and where the DC's WAN host
    is called as only DCs are.
    """
    parent, signer = _load_authority(authority)
    facts = read(authority.certificate)
    if facts.cluster not in (None, cluster):
        raise ConfigError(f'the authority is of cluster "{facts.cluster}", the topology of cluster "{cluster}"')
    if not facts.starts <= now < facts.ends:
        raise ConfigError(f"the authority is valid from {facts.starts:%Y-%m-%d} to {facts.ends:%Y-%m-%d} only")
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(_end(now, valid), facts.ends)
    unsigned = _unsigned(_name(dc.name, cluster), parent.subject, key.public_key(), signer.public_key(), now, end)
    unsigned = unsigned.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    unsigned = unsigned.add_extension(_key_usage(signs_certificates=False), critical=True)
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    unsigned = unsigned.add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
    unsigned = unsigned.add_extension(x509.SubjectAlternativeName(list(_alternatives(cluster, dc))), critical=False)
    return _pair(unsigned.sign(signer, hashes.SHA256()), key)


def read(certificate: bytes) -> Facts:
    """What the certificate (PEM) says. Raises ConfigError where it is none."""
    found = _load_certificate(certificate)
    return Facts(
        subject=_attribute(found, NameOID.COMMON_NAME) or "",
        cluster=_attribute(found, NameOID.ORGANIZATION_NAME),
        is_authority=_is_authority(found),
        names=_names(found),
        starts=found.not_valid_before_utc,
        ends=found.not_valid_after_utc,
        fingerprint=found.fingerprint(hashes.SHA256()).hex(),
    )


def belong_together(pair: Pair) -> bool:
    """Whether the key is the certificate's. Raises ConfigError where one of them is broken."""
    return _public_bytes(_load_certificate(pair.certificate).public_key()) == _public_bytes(
        _load_key(pair.key).public_key()
    )


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether the authority (PEM) made the certificate (PEM). Raises ConfigError where one of them is broken."""
    try:
        _load_certificate(certificate).verify_directly_issued_by(_load_certificate(authority))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _name(common: str, cluster: str | None) -> x509.Name:
    organization = [] if cluster is None else [x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster)]
    return x509.Name([*organization, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _end(now: datetime, valid: timedelta) -> datetime:
    try:
        return now + valid
    except OverflowError:
        raise ConfigError(f"a certificate can't be valid for {valid.days} days") from None


def _unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(cluster: str, dc: Datacenter) -> Iterable[x509.GeneralName]:
    yield x509.DNSName(dns_name(cluster, dc.name))
    if dc.wan is not None:
        host = dc.wan[0]
        try:
            yield x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            if host.lower().rstrip(".").endswith(DNS_SUFFIX):
                raise ConfigError(
                    f'DC "{dc.name}": no WAN host can be called {host}, certificates name DCs so'
                ) from None
            yield x509.DNSName(host)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _load_authority(authority: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate, key = _load_certificate(authority.certificate), _load_key(authority.key)
    if not _is_authority(certificate):
        raise ConfigError("its certificate is not an authority's")
    if not belong_together(authority):
        raise ConfigError("its key is not the certificate's")
    return certificate, key


def _load_certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise ConfigError("not a certificate (PEM)") from None


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError):
        raise ConfigError("not a private key (PEM, without password)") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("not a private key on an elliptic curve")
    return key


def _public_bytes(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError("not a certificate for a key on an elliptic curve")
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _attribute(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> str | None:
    found = certificate.subject.get_attributes_for_oid(oid)
    return str(found[0].value) if found else None


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    addresses = found.get_values_for_type(x509.IPAddress)
    return (*found.get_values_for_type(x509.DNSName), *map(str, addresses))
