"""Certificates in files, for tests."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hybridep_rt.transport.tls import Tls
from launcher.authority import issue, new_authority
from topology import Datacenter, Host, Topology

NOW = datetime.now(UTC)


class Authority:
    """Writes FOLDER/ca.pem, and on `issue` FOLDER/DC.pem and FOLDER/DC.key."""

    def __init__(self, folder: Path, cluster: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._cluster = cluster
        self._born = NOW - timedelta(days=10)
        self._pair = new_authority(cluster, self._born, timedelta(days=20))
        (folder / "ca.pem").write_bytes(self._pair.certificate)

    def issue(self, dc: str, *, named: str = "", expired: bool = False) -> None:
        """A certificate for DC `named`, in the files of DC `dc`."""
        days = timedelta(days=5 if expired else 15)
        pair = issue(self._pair, self._cluster, Datacenter(named or dc, (Host("h", None, 1),)), self._born, days)
        (self.folder / f"{dc}.pem").write_bytes(pair.certificate)
        key = self.folder / f"{dc}.key"
        key.touch(0o600)
        key.write_bytes(pair.key)
        os.chmod(key, 0o600)


def certified(folder: Path, topology: Topology) -> dict[int, Tls]:
    """A new authority's certificate for every DC, by the DC's number."""
    authority = Authority(folder, topology.cluster)
    for dc in topology.dc_names:
        authority.issue(dc)
    return {number: Tls.in_folder(str(folder), dc) for number, dc in enumerate(topology.dc_names)}
