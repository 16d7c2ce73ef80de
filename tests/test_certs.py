"""Certificates: TLS accepts the right DC and no other, keys stay private, mistakes are told in one line."""

from __future__ import annotations

import json
import os
import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridep_rt.errors import ConfigError
from hybridep_rt.protocol.identity import dns_name
from launcher.authority import Pair, belong_together, is_signed_by, issue, new_authority, read
from launcher.certs import inspect
from launcher.cli import main
from topology import Datacenter, Host

NOW = datetime.now(UTC)
YEAR = timedelta(days=365)
TWO = "cluster: demo\ndatacenters:\n  a: {workers: 1, wan: 'a.example.org:7000'}\n  b: {workers: 1}\n" + (
    "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
)


def site(name: str, wan: str | None = None) -> Datacenter:
    return Datacenter(name, (Host("h", None, 1),), None if wan is None else (wan, 7000))


def context(side: ssl.Purpose, folder: Path, name: str, pair: Pair, authority: bytes) -> ssl.SSLContext:
    (folder / f"{name}.pem").write_bytes(pair.certificate)
    (folder / f"{name}.key").write_bytes(pair.key)
    made = ssl.create_default_context(side, cadata=authority.decode())
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return made


def shake_hands(folder: Path, dialler: Pair, acceptor: Pair, authority: bytes, wanted: str) -> tuple[str, ...]:
    """Names that the acceptor sees. Raises ssl.SSLError where one side refuses the other."""
    to_dialler, to_acceptor = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = context(ssl.Purpose.SERVER_AUTH, folder, "dialler", dialler, authority)
    accepting = context(ssl.Purpose.CLIENT_AUTH, folder, "acceptor", acceptor, authority)
    sides = [
        dialling.wrap_bio(to_dialler, to_acceptor, server_hostname=wanted),
        accepting.wrap_bio(to_acceptor, to_dialler, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = sides[1].getpeercert()
    assert certificate is not None
    return tuple(str(value) for _, value in certificate["subjectAltName"])


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["certs", *map(str, arguments)])


def fails(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority and certificates for the two DCs of `two.yaml`, made on the command line."""
    (tmp_path / "two.yaml").write_text(TWO)
    made = tmp_path / "certs"
    assert run("init", made, "--cluster", "demo").exit_code == 0
    assert run("issue", made, tmp_path / "two.yaml").exit_code == 0
    return made


@pytest.mark.parametrize("name", ["lyon", "x--lyon", "Lyon", "my_site", "-", "ends-", "é", "9", "a" * 63, "A" * 63])
def test_tls_accepts_the_dc_by_its_name(tmp_path: Path, name: str) -> None:
    ca = new_authority("c", NOW, YEAR)
    here, there = (issue(ca, "c", site(dc), NOW, YEAR) for dc in ("here", name))
    assert shake_hands(tmp_path, here, there, ca.certificate, dns_name("c", name)) == ("here.c.hybridep",)


def test_tls_refuses_another_dc_and_another_authority_and_expired_certificates(tmp_path: Path) -> None:
    ca, other = new_authority("c", NOW, YEAR), new_authority("c", NOW, YEAR)
    a, b = (issue(ca, "c", site(dc), NOW, YEAR) for dc in "ab")
    foreign = issue(other, "c", site("b"), NOW, YEAR)
    old_ca = new_authority("c", NOW - 3 * YEAR, 10 * YEAR)
    old_a, old_b = (issue(old_ca, "c", site(dc), NOW - 2 * YEAR, YEAR) for dc in "ab")
    with pytest.raises(ssl.SSLError, match=r"not valid for 'c\.c\.hybridep'"):
        shake_hands(tmp_path, a, b, ca.certificate, "c.c.hybridep")
    for dialler, acceptor in ((a, foreign), (foreign, b)):
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            shake_hands(tmp_path, dialler, acceptor, ca.certificate, "b.c.hybridep")
    with pytest.raises(ssl.SSLError, match="expired"):
        shake_hands(tmp_path, old_a, old_b, old_ca.certificate, "b.c.hybridep")
    with pytest.raises(ConfigError, match="not an authority's"):
        issue(a, "c", site("b"), NOW, YEAR)


def test_names_that_dns_cannot_tell_apart_differ() -> None:
    names = ["lyon", "Lyon", "LYON", "lyon_", "lyon-", "x--lyon", "xn--lyon", dns_name("c", "Lyon").partition(".")[0]]
    made = [dns_name("c", name) for name in names]
    assert len({name.lower() for name in made}) == len(names)
    assert all(len(label) <= 63 for name in made for label in name.split("."))


@pytest.mark.parametrize("wan", ["dc.example.org", "192.0.2.7", "2001:db8::1"])
def test_the_wan_host_is_a_name_too(wan: str) -> None:
    facts = read(issue(new_authority(None, NOW, YEAR), "c", site("a", wan), NOW, YEAR).certificate)
    assert facts.names == ("a.c.hybridep", wan)
    assert (facts.subject, facts.cluster, facts.is_authority) == ("a", "c", False)


@pytest.mark.parametrize("wan", ["b.c.hybridep", "B.C.HybridEP", "b.c.hybridep."])
def test_no_wan_host_passes_for_another_dc(wan: str) -> None:
    with pytest.raises(ConfigError, match=r'DC "a": no WAN host can be called'):
        issue(new_authority(None, NOW, YEAR), "c", site("a", wan), NOW, YEAR)


def test_validity_is_bounded_by_the_authoritys() -> None:
    ca = new_authority("c", NOW, timedelta(days=10))
    facts = read(issue(ca, "c", site("a"), NOW, YEAR).certificate)
    assert facts.ends == read(ca.certificate).ends
    assert facts.starts < NOW
    with pytest.raises(ConfigError, match="the authority is valid from"):
        issue(ca, "c", site("a"), NOW + YEAR, YEAR)
    with pytest.raises(ConfigError, match='of cluster "c", the topology of cluster "d"'):
        issue(ca, "d", site("a"), NOW, YEAR)


def test_keys_and_certificates_are_matched() -> None:
    ca = new_authority("c", NOW, YEAR)
    a, b = (issue(ca, "c", site(dc), NOW, YEAR) for dc in "ab")
    assert belong_together(a)
    assert not belong_together(Pair(a.certificate, b.key))
    assert is_signed_by(a.certificate, ca.certificate)
    assert not is_signed_by(a.certificate, new_authority("c", NOW, YEAR).certificate)
    assert "BEGIN" not in repr(a).partition("key")[2]
    for broken in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", a.key):
        with pytest.raises(ConfigError, match="not a certificate"):
            read(broken)
    with pytest.raises(ConfigError, match="not a private key"):
        belong_together(Pair(a.certificate, a.certificate))


def test_all_files_are_their_owners_only(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(folder)) == ["a.key", "a.pem", "b.key", "b.pem", "ca.key", "ca.pem"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_show_names_everything(folder: Path) -> None:
    result = run("show", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r'a\.pem +DC "a", cluster "demo" +a\.demo\.hybridep +\d{4}-\d\d-\d\d .* good', result.output)
    assert "a.example.org" in result.output
    shown = json.loads(run("show", folder, "--json").output)
    assert [each["file"] for each in shown] == ["ca.pem", "a.pem", "b.pem"]
    assert [each["findings"] for each in shown] == [[], [], []]


def test_show_warns(folder: Path, tmp_path: Path) -> None:
    (folder / "a.key").chmod(0o640)
    (folder / "b.key").write_bytes((folder / "a.key").read_bytes())
    assert run("issue", folder, tmp_path / "two.yaml", "--dc", "a", "--days", "7", "--force").exit_code == 0
    (folder / "a.key").chmod(0o640)
    result = run("show", folder)
    assert result.exit_code == 1
    assert [line.partition("certs/")[2] for line in result.stderr.splitlines()] == [
        "a.pem: expires in 6 days",
        f"a.pem: its key can be read by others: chmod 600 {folder / 'a.key'}",
        f"b.pem: {folder / 'b.key'} is another certificate's key",
    ]


def test_show_knows_expired_early_and_foreign_certificates(folder: Path) -> None:
    found = {each.file: each.findings for each in inspect(folder, NOW + 20 * YEAR)}
    assert all("expired on" in findings[0] for findings in found.values())
    assert "is the clock right?" in inspect(folder, NOW - YEAR)[0].findings[0]
    assert run("init", folder, "--force").exit_code == 0
    assert inspect(folder, NOW)[1].findings == ("made by another authority than ca.pem",)
    (folder / "ca.pem").unlink()
    assert inspect(folder, NOW)[0].findings == ("the authority's certificate (ca.pem) is missing here",)


def test_nothing_is_overwritten_unasked(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert fails("init", folder) == f"hybridep: {folder / 'ca.pem'} exists already; --force replaces it"
    assert fails("issue", folder, tmp_path / "two.yaml", "--dc", "b").endswith(
        "b.pem exists already; --force replaces it"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_mistakes_are_one_line(folder: Path, tmp_path: Path) -> None:
    topology = tmp_path / "two.yaml"
    assert "no DC 'c', there are: a, b" in fails("issue", folder, topology, "--dc", "c")
    assert fails("issue", tmp_path / "none", topology).endswith("none: No such file or directory")
    assert fails("show", tmp_path / "none").endswith("none: No such file or directory")
    assert fails("show", tmp_path / "certs" / "a.pem").endswith("a.pem: Not a directory")
    assert fails("init", tmp_path / "x" / "y").endswith("y: No such file or directory")
    assert fails("init", topology).endswith("two.yaml: File exists")
    assert "--cluster: expected" in fails("init", folder, "--cluster", "no spaces")
    assert "'--days'" in fails("init", folder, "--days", "0")
    other = tmp_path / "other.yaml"
    other.write_text(TWO.replace("demo", "other"))
    assert 'of cluster "demo", the topology of cluster "other"' in fails("issue", folder, other)
    other.write_text(TWO.replace("b: {w", "ca: {w").replace("<-> b", "<-> ca"))
    assert 'DC "ca": its files would be the authority' in fails("issue", folder, other)
    (folder / "ca.key").write_bytes((folder / "a.key").read_bytes())
    assert fails("issue", folder, topology, "--force").endswith("ca.pem: its key is not the certificate's")
    (folder / "a.pem").write_bytes(bytes(1 << 17))
    assert "larger than" in fails("show", folder)
    (folder / "a.pem").write_bytes(b"junk")
    assert fails("show", folder).endswith("a.pem: not a certificate (PEM)")
    folder.chmod(0o755)
    assert fails("issue", folder, topology).endswith(f"only you can enter: chmod 700 {folder}")
    for path in folder.iterdir():
        path.unlink()
    assert "no certificates; to make an authority" in fails("show", folder)
