"""`hybridep doctor`: is this machine fit for a topology's links, and which sites can be reached from it? A shell."""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.diagnosis import (
    SYSCTLS,
    Check,
    LinkNeed,
    Machine,
    Port,
    Reach,
    check_after_idle,
    check_backlog,
    check_buffers,
    check_congestion,
    check_open_files,
    check_port,
    check_reach,
    check_versions,
    link_needs,
)
from topology import Topology, load
from topology.units import format_bit_rate, format_size, format_time

Address = tuple[str, int]

CONNECT_S = 3.0
_MPIRUN_S = 10.0
_AT_ONCE = 64
_LINKS_SHOWN = 12
_LINKS_LISTED = 4096
_PACKAGES = ("torch", "uvloop", "mpi4py", "cryptography")
_CAP_NET_ADMIN = 12


@click.command("doctor")
@click.argument("topology_file", metavar="TOPOLOGY")
@click.option("--site", metavar="DC", help="This machine is of that DC. Default: found by the WAN addresses.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in SI units instead.")
def doctor(topology_file: str, site: str | None, as_json: bool) -> None:
    """Check this machine for TOPOLOGY (a YAML file, or preset:NAME). The exit code is 1 where something is amiss.

    Of many links, the JSON lists the 4096 that need the largest buffers.
    """
    topology = load(topology_file)
    ports = _own_ports(topology, None if site is None else topology.dc_index(site))
    local = sorted(ports) or range(len(topology.datacenters))
    needs = [] if topology.emulate else link_needs(topology, local)
    groups = {
        "This machine": _machine_checks(topology, local, needs, read_machine()),
        "Addresses": [*_port_checks(topology, ports), *_reach_checks(topology, ports)],
    }
    if as_json:
        click.echo(json.dumps(_as_json(topology, list(local), needs, groups), indent=2))
    else:
        _show(topology, list(local), needs, groups)
    if any(check.advice for checks in groups.values() for check in checks):
        raise click.exceptions.Exit(1)


def read_machine() -> Machine:
    """The facts about this machine and its Python environment."""
    return Machine(
        sysctls={name: _read_sysctl(name) for name in SYSCTLS},
        open_files=_open_files(),
        may_choose_congestion=_has_capability(_CAP_NET_ADMIN),
        versions={name: _version(name) for name in _PACKAGES},
        mpirun=_mpirun_version(Path(sys.executable).parent / "mpirun"),
    )


def try_port(address: Address) -> Port:
    """Bind the address as a coordinator would, and let it go at once."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
    except OSError as error:
        return {errno.EADDRINUSE: Port.TAKEN, errno.EACCES: Port.FORBIDDEN}.get(error.errno or 0, Port.FOREIGN)
    return Port.FREE


def try_to_reach(addresses: Iterable[Address], connect_s: float = CONNECT_S) -> dict[Address, Reach]:
    """Connect to all addresses, many at once. Who has not answered in time is SILENT, also if its name is looked up."""
    todo: queue.SimpleQueue[Address] = queue.SimpleQueue()
    found = dict.fromkeys(addresses, Reach.SILENT)
    for address in found:
        todo.put(address)
    answers: queue.SimpleQueue[tuple[Address, Reach]] = queue.SimpleQueue()
    # Daemons: nothing can stop a look-up of a name.
    for _ in range(min(_AT_ONCE, len(found))):
        threading.Thread(target=_reach_some, args=(todo, answers, connect_s), daemon=True).start()
    deadline = time.monotonic() + connect_s * (1 + len(found) / _AT_ONCE)
    for _ in range(len(found)):
        try:
            address, reach = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[address] = reach
    return found


def _reach_some(
    todo: queue.SimpleQueue[Address], answers: queue.SimpleQueue[tuple[Address, Reach]], connect_s: float
) -> None:
    while not todo.empty():
        try:
            address = todo.get_nowait()
        except queue.Empty:
            return
        answers.put((address, _reach(address, connect_s)))


def _reach(address: Address, connect_s: float) -> Reach:
    try:
        with socket.create_connection(address, connect_s):
            return Reach.ANSWERS
    except ConnectionRefusedError:
        return Reach.REFUSED
    except TimeoutError:
        return Reach.SILENT
    except socket.gaierror:
        return Reach.UNKNOWN
    except OSError:
        return Reach.UNREACHABLE


def _own_ports(topology: Topology, site: int | None) -> dict[int, Port]:
    """DCs of this machine that have a WAN address, and whether it can be had. Without `site` all that could be ours."""
    chosen = range(len(topology.datacenters)) if site is None else [site]
    addresses = {dc: topology.datacenters[dc].listen or topology.datacenters[dc].wan for dc in chosen}
    ports = {dc: try_port(address) for dc, address in addresses.items() if address is not None}
    return {dc: port for dc, port in ports.items() if site is not None or port is not Port.FOREIGN}


def _machine_checks(topology: Topology, local: Sequence[int], needs: list[LinkNeed], machine: Machine) -> list[Check]:
    return [
        *check_buffers(needs, local, topology.dc_names, machine),
        check_congestion(machine),
        check_after_idle(machine),
        check_backlog(topology, local, machine),
        check_open_files(topology, local, machine),
        *check_versions(metadata.requires("hybridep") or (), machine),
    ]


def _port_checks(topology: Topology, ports: dict[int, Port]) -> list[Check]:
    places = {dc: topology.datacenters[dc] for dc in ports}
    return [check_port(place.name, _text(place.listen or place.wan), ports[dc]) for dc, place in places.items()]


def _reach_checks(topology: Topology, ports: dict[int, Port]) -> list[Check]:
    others = {
        dc.name: dc.wan
        for at, dc in enumerate(topology.datacenters)
        if dc.wan is not None and dc.reachable and at not in ports
    }
    found = try_to_reach(others.values())
    return [check_reach(name, _text(address), found[address]) for name, address in others.items()]


def _text(address: Address | None) -> str:
    host, port = address or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _as_json(
    topology: Topology, local: list[int], needs: list[LinkNeed], groups: dict[str, list[Check]]
) -> dict[str, object]:
    checks = [check for group in groups.values() for check in group]
    return {
        "cluster": topology.cluster,
        "local": [topology.dc_names[dc] for dc in local],
        "good": not any(check.advice for check in checks),
        "links": [
            {
                "from": topology.dc_names[need.source],
                "to": topology.dc_names[need.target],
                "rate_bytes_per_s": need.rate_bytes_per_s,
                "rtt_s": need.rtt_s,
                "product_bytes": need.product_bytes,
                "buffer_bytes": need.buffer_bytes,
            }
            for need in needs[:_LINKS_LISTED]
        ],
        "checks": [asdict(check) for check in checks],
    }


def _show(topology: Topology, local: list[int], needs: list[LinkNeed], groups: dict[str, list[Check]]) -> None:
    console = Console(highlight=False)
    names = ", ".join(topology.dc_names[dc] for dc in local[:8]) + (" …" if len(local) > 8 else "")
    console.print(Text.assemble((topology.cluster, "bold"), f"  this machine plays {names}"))
    if topology.emulate:
        console.print("The coordinators emulate the links: no buffer has to be raised for them.")
    elif needs:
        _print(console, "Links", _links_table(topology.dc_names, needs))
    for title, checks in groups.items():
        if checks:
            _print(console, title, _checks_table(checks))
    advice = [check.advice for checks in groups.values() for check in checks if check.advice]
    console.print("All is well." if not advice else Text("To do:", "bold"))
    for line in advice:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _print(console: Console, title: str, table: Table) -> None:
    console.print(Padding(Text(title, "bold"), (1, 0, 0, 0)))
    console.print(table)


def _links_table(names: tuple[str, ...], needs: list[LinkNeed]) -> Table:
    table = _table("from", "to", "rate", "round trip", "bandwidth-delay product", "socket buffer")
    for need in needs[:_LINKS_SHOWN]:
        ends = (names[need.source], names[need.target])
        rate, rtt = format_bit_rate(need.rate_bytes_per_s), format_time(need.rtt_s)
        table.add_row(*ends, rate, rtt, format_size(round(need.product_bytes)), format_size(need.buffer_bytes))
    if len(needs) > _LINKS_SHOWN:
        table.add_row("…", f"{len(needs) - _LINKS_SHOWN:,} more, none needs a larger buffer")
    return table


def _checks_table(checks: Iterable[Check]) -> Table:
    table = _table("", "what", "found", "wanted")
    for check in checks:
        mark = Text("!", "bold red") if check.advice else Text("✓", "green")
        table.add_row(mark, check.subject, check.found, check.wanted)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _read_sysctl(name: str) -> str | None:
    try:
        return " ".join(Path("/proc/sys", name.replace(".", "/")).read_text().split())
    except OSError:
        return None


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _has_capability(number: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return os.geteuid() == 0
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _mpirun_version(path: Path) -> str | None:
    """The last word of its first line: `mpirun (Open MPI) 5.0.11`."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_MPIRUN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    words = done.stdout.partition("\n")[0].split()
    return words[-1] if words else None
