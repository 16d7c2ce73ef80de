"""The name by which TLS knows a DC: what its certificate says and what its peers ask for."""

from __future__ import annotations

import hashlib
import re

DNS_SUFFIX = ".hybridep"

_PLAIN = re.compile(r"(?!xn--|x--)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def dns_name(cluster: str, dc: str) -> str:
    """`lyon.demo.hybridep`. Two DCs never share a name, not even "Lyon" and "lyon", which DNS can't tell apart."""
    return f"{_label(dc)}.{_label(cluster)}{DNS_SUFFIX}"


def _label(name: str) -> str:
    """The name where it is a DNS label, else a digest of it with a prefix that no plain label has."""
    if _PLAIN.fullmatch(name):
        return name
    return "x--" + hashlib.sha256(name.encode()).hexdigest()[:40]
