"""What the ranks of one mpirun tell each other, and what follows from it: who is who, and who is where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridep_rt.errors import ConfigError, TopologyError
from topology import Topology

Address = tuple[str, int]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One rank's own words. `machine`: equal for ranks that share a file system of sockets. `digest`: the topology's.

    A coordinator adds where it can be reached: by workers of its machine, by other workers, by other coordinators.
    """

    dc: int
    is_coordinator: bool
    machine: str
    digest: str
    unix_path: str = ""
    workers_address: Address | None = None
    wan_address: Address | None = None

    def pack(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def unpack(cls, fields: Mapping[str, Any]) -> Record:
        """From plain values, whose addresses come as lists."""
        addresses = {name: None if fields[name] is None else (fields[name][0], fields[name][1]) for name in _ADDRESSES}
        return cls(**{**fields, **addresses})


_ADDRESSES = ("workers_address", "wan_address")


def listen_address(topology: Topology, dc: int) -> Address | None:
    """Where the DC's coordinator waits for other coordinators; port 0: any, told over MPI."""
    here = topology.datacenters[dc]
    if len(topology.datacenters) == 1 or not here.reachable:
        return None
    if here.wan is not None:
        return here.listen or here.wan
    if all(host.address is None for each in topology.datacenters for host in each.hosts):
        return LOOPBACK, 0
    if here.hosts[0].address is None:
        raise TopologyError(f'{topology.source}: DC "{here.name}" needs a wan address: other machines have to reach it')
    return here.hosts[0].address, 0


def workers_address(topology: Topology, dc: int) -> Address | None:
    """Where the DC's coordinator waits for workers of other machines; None if its DC is one machine."""
    hosts = topology.datacenters[dc].hosts
    if all(host.address == hosts[0].address for host in hosts):
        return None
    if hosts[0].address is None:
        raise TopologyError(f"{topology.source}: host {hosts[0].name} needs an address: its DC has other machines")
    return hosts[0].address, 0


def check(records: Sequence[Record], topology: Topology) -> None:
    """Raise ConfigError unless this mpirun started each of its DCs completely, from the same topology."""
    for dc in sorted({record.dc for record in records}):
        mine = [record for record in records if record.dc == dc]
        coordinators = sum(record.is_coordinator for record in mine)
        found, wanted = (coordinators, len(mine) - coordinators), (1, topology.workers_per_dc[dc])
        if found != wanted:
            raise ConfigError(
                f'DC "{topology.dc_names[dc]}": mpirun started {found[0]} coordinators and {found[1]} workers, '
                f"the topology has {wanted[0]} and {wanted[1]}"
            )
    for record in records:
        if record.digest != topology.digest():
            raise ConfigError(f'DC "{topology.dc_names[record.dc]}" was started with another topology')


def worker_index(records: Sequence[Record], rank: int) -> int:
    """Local index of the worker of that rank: workers of a DC count in rank order."""
    return sum(not each.is_coordinator and each.dc == records[rank].dc for each in records[:rank])


def endpoint(records: Sequence[Record], rank: int) -> str:
    """Where the worker of that rank finds its coordinator. Raises ConfigError where it can't be reached."""
    me = records[rank]
    coordinator = next(each for each in records if each.is_coordinator and each.dc == me.dc)
    if coordinator.machine == me.machine:
        return f"unix:{coordinator.unix_path}"
    if coordinator.workers_address is None:
        raise ConfigError(
            f"a worker runs on {me.machine}, its coordinator on {coordinator.machine}; the topology says one host"
        )
    host, port = coordinator.workers_address
    return f"tcp:{host}:{port}"


def peers(records: Sequence[Record], topology: Topology, dc: int) -> dict[int, Address]:
    """DC -> where its coordinator is reached: the topology's wan address, or what it told over MPI.

    DCs that only dial are left out.
    """
    told = {each.dc: each.wan_address for each in records if each.is_coordinator}
    found = {}
    for other, place in enumerate(topology.datacenters):
        address = place.wan or told.get(other)
        if other == dc or not place.reachable:
            continue
        if address is None:
            raise ConfigError(f'DC "{place.name}" is not in this mpirun and has no wan address in {topology.source}')
        found[other] = address
    return found
