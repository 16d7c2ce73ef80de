"""What ranks conclude from each other's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridep_rt.errors import ConfigError
from launcher.meeting import Record, check, endpoint, listen_address, peers, worker_index, workers_address
from topology import parse

LINKS = "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
NEAR = parse("cluster: c\ndatacenters:\n  a: {workers: 1}\n  b: {workers: 2}\n" + LINKS)
FAR = parse(
    "cluster: c\ninsecure: true\ndatacenters:\n"
    "  a: {workers: 1, wan: '198.51.100.1:7000', listen: '10.0.0.1:7001'}\n"
    "  b: {hosts: [{address: b0, workers: 1}, {address: b1, workers: 1}], wan: '198.51.100.2:7000'}\n" + LINKS
)


def coordinator(dc: int, **more: object) -> Record:
    known = {"unix_path": f"/s{dc}", "workers_address": ("10.0.0.9", 9), "wan_address": ("127.0.0.1", 100 + dc)}
    return Record(dc=dc, is_coordinator=True, machine="m", digest=NEAR.digest(), **{**known, **more})  # type: ignore[arg-type]


def worker(dc: int, machine: str = "m") -> Record:
    return Record(dc=dc, is_coordinator=False, machine=machine, digest=NEAR.digest())


JOB = [coordinator(0), worker(0), coordinator(1), worker(1), worker(1, "n")]


def test_records_survive_the_way_as_plain_values() -> None:
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in JOB[0].pack().items()}
    assert Record.unpack(lists) == JOB[0]


def test_a_complete_job_is_accepted_and_counted() -> None:
    check(JOB, NEAR)
    check(JOB[2:], NEAR)
    assert [worker_index(JOB, rank) for rank in (1, 3, 4)] == [0, 0, 1]


def test_workers_find_their_coordinator_by_socket_or_by_network() -> None:
    assert endpoint(JOB, 3) == "unix:/s1"
    assert endpoint(JOB, 4) == "tcp:10.0.0.9:9"
    with pytest.raises(ConfigError, match="the topology says one host"):
        endpoint([*JOB[:2], coordinator(1, workers_address=None), *JOB[3:]], 4)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (JOB[:-1], 'DC "b": mpirun started 1 coordinators and 1 workers, the topology has 1 and 2'),
        (JOB[1:], 'DC "a": mpirun started 0 coordinators'),
        ([*JOB, coordinator(0)], 'DC "a": mpirun started 2 coordinators'),
        ([*JOB[:-1], replace(JOB[-1], digest="other")], 'DC "b" was started with another topology'),
    ],
)
def test_an_incomplete_job_is_refused(records: list[Record], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(records, NEAR)


def test_coordinators_meet_at_wan_addresses_or_where_mpi_says() -> None:
    assert peers(JOB, NEAR, 0) == {1: ("127.0.0.1", 101)}
    assert peers(JOB[:2], FAR, 0) == {1: ("198.51.100.2", 7000)}
    with pytest.raises(ConfigError, match='DC "b" is not in this mpirun and has no wan address'):
        peers(JOB[:2], NEAR, 0)


def test_where_coordinators_listen() -> None:
    assert listen_address(NEAR, 0) == ("127.0.0.1", 0)
    assert listen_address(FAR, 0) == ("10.0.0.1", 7001)
    assert listen_address(FAR, 1) == ("198.51.100.2", 7000)
    assert (workers_address(FAR, 0), workers_address(FAR, 1)) == (None, ("b0", 0))
