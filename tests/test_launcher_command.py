"""The mpirun command for one machine, for several, and for one site of a job."""

from __future__ import annotations

import pytest

from hybridep_rt.errors import ConfigError
from launcher.command import Machine, UserCommand, mpirun_command, parse_user_command, ranks, started_dcs
from topology import Topology, parse

LINKS = "links:\n  a <-> b: {bandwidth: 1 Gbit/s, rtt: 1 ms}\n"
ONE_MACHINE = parse("cluster: c\ndatacenters:\n  a: {workers: 1}\n  b: {workers: 2}\n" + LINKS)
HOSTS = parse(
    "cluster: c\ndatacenters:\n  a: {hosts: [{workers: 1}]}\n"
    "  b: {hosts: [{address: b0, workers: 2}, {address: b1, workers: 4}]}\n" + LINKS
)
MACHINE = Machine("/venv/bin/mpirun", "/venv/bin/python", "/scratch", is_root=False)
USER = UserCommand("train.py", ("--steps", "3"))


def programs(topology: Topology, site: str | None = None) -> list[str]:
    command = mpirun_command(started_dcs(topology, site), "t.yaml", USER, MACHINE, ["HYBRIDEP_RUN_TOKEN"])
    return " ".join(command).split(" : ")


def test_one_machine() -> None:
    first, *others = programs(ONE_MACHINE)
    entry = "/venv/bin/python -P -m mpi4py -m launcher.entry"
    assert first.startswith(
        "/venv/bin/mpirun --oversubscribe --bind-to none --output tag --mca pml ob1 --mca btl self,sm "
    )
    assert first.endswith(f" -n 1 {entry} coordinator --topology t.yaml --dc a")
    assert others == [
        f"-n 1 {entry} worker --topology t.yaml --dc a -- train.py --steps 3",
        f"-n 1 {entry} coordinator --topology t.yaml --dc b",
        f"-n 2 {entry} worker --topology t.yaml --dc b -- train.py --steps 3",
    ]
    assert "-x" not in first.split()


def test_several_machines() -> None:
    first, *others = programs(HOSTS)
    assert "--mca btl self,sm,tcp" in first
    assert "-x HYBRIDEP_RUN_TOKEN" in first
    assert "/scratch" not in first
    wheres = [program.partition(" /venv/bin/python")[0] for program in others]
    assert first.partition(" -host ")[2].startswith("localhost -n 1 ")
    assert wheres == ["-host localhost -n 1", "-host b0 -n 1", "-host b0 -n 2", "-host b1 -n 4"]


def test_one_site_starts_only_its_own_processes() -> None:
    assert all("--dc b" in program for program in programs(ONE_MACHINE, "b"))
    assert len(programs(ONE_MACHINE, "b")) == 2
    with pytest.raises(ConfigError, match="no DC 'c', there are: a, b"):
        programs(ONE_MACHINE, "c")


def test_ranks_are_in_the_order_of_the_programs() -> None:
    assert [rank.tag for rank in ranks(ONE_MACHINE.datacenters)] == [
        "a/coordinator",
        "a/0",
        "b/coordinator",
        "b/0",
        "b/1",
    ]
    assert ranks(ONE_MACHINE.datacenters)[4].describe() == 'worker 1 of DC "b"'
    assert ranks(ONE_MACHINE.datacenters)[2].describe() == 'coordinator of DC "b"'


def test_root_is_allowed_only_where_it_is_root() -> None:
    root = Machine("mpirun", "python", "/scratch", is_root=True)
    assert "--allow-run-as-root" in mpirun_command(ONE_MACHINE.datacenters, "t", USER, root, [])
    assert "--allow-run-as-root" not in mpirun_command(ONE_MACHINE.datacenters, "t", USER, MACHINE, [])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python train.py -m x", UserCommand("train.py", ("-m", "x"))),
        ("train.py --a -- b", UserCommand("train.py", ("--a", "--", "b"))),
        ("/usr/bin/python3.12 t.py", UserCommand("t.py", ())),
        ("python3 -m pkg.mod 1", UserCommand("pkg.mod", ("1",), is_module=True)),
        ("-m pkg", UserCommand("pkg", (), is_module=True)),
    ],
)
def test_user_commands(words: str, expected: UserCommand) -> None:
    assert parse_user_command(words.split()) == expected
    assert parse_user_command(expected.words) == expected


@pytest.mark.parametrize("words", ["", "python", "python -m", "python -u train.py", "python -c pass"])
def test_commands_that_run_nothing(words: str) -> None:
    with pytest.raises(ConfigError):
        parse_user_command(words.split())
