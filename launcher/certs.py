"""`hybridep certs`: make the certificates with which DCs prove to each other who they are, and look at them.

FOLDER/ca.pem  FOLDER/ca.key      the authority; its key stays where certificates are made
FOLDER/DC.pem  FOLDER/DC.key      one DC; together with ca.pem all that this DC's coordinator needs
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridep_rt.errors import ConfigError
from launcher.authority import Facts, Pair, belong_together, is_signed_by, issue, new_authority, read
from topology import Datacenter, Topology, load

AUTHORITY = "ca"
EXPIRES_SOON = timedelta(days=30)
_FILE_BYTES_MAX = 1 << 16
_DAYS_MAX = 36_500
_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_FORCE = click.option("--force", is_flag=True, help="Replace what is there.")


@dataclass(frozen=True, slots=True)
class Shown:
    """One certificate of a folder, and what is wrong with it."""

    file: str
    facts: Facts
    findings: tuple[str, ...]


@click.group("certs")
def certs() -> None:
    """Make and show the certificates that DCs prove themselves with."""


@certs.command("init")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--cluster", metavar="NAME", help="Serve this cluster only.")
@click.option("--days", type=click.IntRange(1, _DAYS_MAX), default=3650, show_default=True, help="So long it is valid.")
@_FORCE
def init_command(folder: Path, cluster: str | None, days: int, force: bool) -> None:
    """Make a certificate authority in FOLDER."""
    if cluster is not None and not _CLUSTER.fullmatch(cluster):
        raise ConfigError(f"--cluster: expected up to 63 letters, digits, '-' and '_', found {cluster[:80]!r}")
    _make_private(folder)
    _refuse_overwriting(folder, [AUTHORITY], force)
    _write_pair(folder, AUTHORITY, new_authority(cluster, datetime.now(UTC), timedelta(days=days)), force)
    click.echo(f"{folder}: a new authority. Keep {AUTHORITY}.key here; every site needs {AUTHORITY}.pem.")


@certs.command("issue")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("topology_file", metavar="TOPOLOGY")
@click.option("--dc", "names", metavar="NAME", multiple=True, help="For this DC only. Repeatable.")
@click.option("--days", type=click.IntRange(1, _DAYS_MAX), default=365, show_default=True, help="So long it is valid.")
@_FORCE
def issue_command(folder: Path, topology_file: str, names: tuple[str, ...], days: int, force: bool) -> None:
    """Make a key and a certificate for every DC of TOPOLOGY (a YAML file, or preset:NAME) in FOLDER."""
    topology = load(topology_file)
    dcs = _chosen(topology, names)
    _check_private(folder)
    authority, now = _read_pair(folder, AUTHORITY), datetime.now(UTC)
    with _naming(folder / f"{AUTHORITY}.pem"):
        made = {dc.name: issue(authority, topology.cluster, dc, now, timedelta(days=days)) for dc in dcs}
    _refuse_overwriting(folder, made, force)
    for name, pair in made.items():
        _write_pair(folder, name, pair, force)
        click.echo(f"{folder / name}.pem, .key: for {', '.join(read(pair.certificate).names)}")
    click.echo(f"Give each site its own two files and {AUTHORITY}.pem, never {AUTHORITY}.key.")


@certs.command("show")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def show_command(folder: Path, as_json: bool) -> None:
    """Show all certificates in FOLDER. The exit code is 1 where something has to be done."""
    found = inspect(folder, datetime.now(UTC))
    if as_json:
        click.echo(json.dumps([_as_json(each) for each in found], indent=2))
    else:
        Console(highlight=False).print(_table(found))
        for each in found:
            for finding in each.findings:
                click.echo(f"hybridep: {folder / each.file}.pem: {finding}", err=True)
    if any(each.findings for each in found):
        raise click.exceptions.Exit(1)


def write_certificates(folder: Path, topology: Topology, valid: timedelta) -> None:
    """A certificate and key for every DC into a new `folder`, by an authority whose key nobody keeps: for one job.

    Raises ConfigError.
    """
    dcs, now = _chosen(topology, ()), datetime.now(UTC)
    _make_private(folder)
    authority = new_authority(topology.cluster, now, valid)
    _write(folder / f"{AUTHORITY}.pem", authority.certificate, False)
    for dc in dcs:
        _write_pair(folder, dc.name, issue(authority, topology.cluster, dc, now, valid), False)


def inspect(folder: Path, now: datetime) -> list[Shown]:
    """Every certificate of a folder, the authority first. Raises ConfigError where there is none or one is broken."""
    try:
        files = sorted(path.stem for path in folder.iterdir() if path.suffix == ".pem")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    if not files:
        raise ConfigError(f"{folder}: no certificates; to make an authority: hybridep certs init {folder}")
    files.sort(key=lambda name: name != AUTHORITY)
    authority = _read_file(folder / f"{AUTHORITY}.pem") if AUTHORITY in files else None
    return [_inspect_one(folder, name, authority, now) for name in files]


def _inspect_one(folder: Path, name: str, authority: bytes | None, now: datetime) -> Shown:
    path = folder / f"{name}.pem"
    certificate = _read_file(path)
    with _naming(path):
        facts = read(certificate)
        findings = [] if facts.is_authority else _authority_findings(certificate, authority)
    return Shown(name, facts, (*findings, *_time_findings(facts, now), *_key_findings(folder, name, certificate)))


def _authority_findings(certificate: bytes, authority: bytes | None) -> list[str]:
    if authority is None:
        return [f"the authority's certificate ({AUTHORITY}.pem) is missing here"]
    return [] if is_signed_by(certificate, authority) else [f"made by another authority than {AUTHORITY}.pem"]


def _time_findings(facts: Facts, now: datetime) -> list[str]:
    if now >= facts.ends:
        return [f"expired on {facts.ends:%Y-%m-%d}"]
    if now < facts.starts:
        return [f"valid from {facts.starts:%Y-%m-%d %H:%M} UTC only: is the clock right?"]
    return [f"expires in {_days(facts.ends - now)}"] if facts.ends - now < EXPIRES_SOON else []


def _key_findings(folder: Path, name: str, certificate: bytes) -> list[str]:
    path = folder / f"{name}.key"
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return []  # other DCs' keys and the authority's belong elsewhere
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    findings = [f"its key can be read by others: chmod 600 {path}"] if mode & 0o077 else []
    with _naming(path):
        together = belong_together(Pair(certificate, _read_file(path)))
    return findings if together else [*findings, f"{path} is another certificate's key"]


def _table(found: Sequence[Shown]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("file", "of", "names", "valid until", "SHA-256 fingerprint", "state"):
        table.add_column(column, overflow="fold")
    for each in found:
        facts = each.facts
        state = Text("; ".join(each.findings), "bold red") if each.findings else Text("good", "green")
        who = facts.subject if facts.is_authority else f'DC "{facts.subject}"'
        cluster = "" if facts.cluster is None else f', cluster "{facts.cluster}"'
        names = "\n".join(facts.names) or "–"
        table.add_row(
            f"{each.file}.pem", who + cluster, names, f"{facts.ends:%Y-%m-%d}", _in_groups(facts.fingerprint), state
        )
    return table


def _as_json(shown: Shown) -> dict[str, object]:
    facts = asdict(shown.facts)
    times = {name: facts[name].isoformat() for name in ("starts", "ends")}
    return {"file": f"{shown.file}.pem", **facts, **times, "findings": list(shown.findings)}


def _in_groups(fingerprint: str) -> str:
    return " ".join(fingerprint[start : start + 8] for start in range(0, len(fingerprint), 8))


def _days(time: timedelta) -> str:
    return "less than a day" if time.days < 1 else f"{time.days} day{'s' * (time.days > 1)}"


def _chosen(topology: Topology, names: Iterable[str]) -> list[Datacenter]:
    indices = sorted({topology.dc_index(name) for name in names}) or range(len(topology.datacenters))
    dcs = [topology.datacenters[index] for index in indices]
    if any(dc.name == AUTHORITY for dc in dcs):
        raise ConfigError(f'{topology.source}: DC "{AUTHORITY}": its files would be the authority\'s own, rename it')
    return dcs


# Files


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    _check_private(folder)


def _check_private(folder: Path) -> None:
    try:
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder}: not a folder")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder}: keys need a folder that only you can enter: chmod 700 {folder}")


def _refuse_overwriting(folder: Path, names: Iterable[str], force: bool) -> None:
    for name in names:
        for path in (folder / f"{name}.pem", folder / f"{name}.key"):
            if not force and os.path.lexists(path):
                raise ConfigError(f"{path} exists already; --force replaces it")


def _write_pair(folder: Path, name: str, pair: Pair, force: bool) -> None:
    _write(folder / f"{name}.key", pair.key, force)
    _write(folder / f"{name}.pem", pair.certificate, force)


def _write(path: Path, content: bytes, force: bool) -> None:
    """The file appears whole or not at all, and only its owner can ever read it."""
    try:
        number, made = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # of mode 0600
        try:
            with open(number, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(number)
            if force:
                os.replace(made, path)
            else:
                os.link(made, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _read_pair(folder: Path, name: str) -> Pair:
    return Pair(_read_file(folder / f"{name}.pem"), _read_file(folder / f"{name}.key"))


def _read_file(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {_FILE_BYTES_MAX} bytes")
    return content


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before what is wrong in it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
