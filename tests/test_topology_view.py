"""`hybridep topology`: what a person sees, and what a program reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.topology_view import topology
from topology import TopologyError

EXAMPLES = Path(__file__).parent.parent / "examples" / "topologies"


def _run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(topology, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_symmetric_tree() -> None:
    output = _run("preset:three-level", "--domains", "2,1,2")
    assert "three-level  2 DCs · 16 workers · symmetric, 2 × 2 × 4" in output
    assert "│   ├── node 0  ■ ■ ■ ■  workers 0–3 · 4 × gpu at 300 GB/s, 5 us" in output
    assert _cells(output, "a ") == ["a", "b", "100 Mbit/s", "40 ms", "–", "–", "–"]
    assert _cells(output, "0 ") == ["0", "a.0.0", "AG 8", "A2A 4", "AG 1", "A2A 2"]
    assert _cells(output, "pairs") == ["pairs", "AG 8", "A2A 8", "AG 8", "A2A 8"]
    assert max(map(len, output.splitlines())) <= 100


def test_an_uneven_tree() -> None:
    output = _run(str(EXAMPLES / "uneven.yaml"))
    assert "├── tiny  ■  worker 3 · this machine · up 60 Mbit/s" in output
    assert "all domains of one: plain expert parallelism" in output
    assert _cells(output, "3 ") == ["3", "tiny.0", "A2A 0–2 4–5", "–"]


def test_hosts_and_addresses(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("""
cluster: c
datacenters:
  x: {hosts: [{address: h1, workers: 20}, {name: n, address: h2, workers: 1}], wan: "[::1]:7000", listen: "h1:7001"}
  y: {workers: 1}
links: {x <-> y: {bandwidth: 1 Gbit/s, rtt: 1 ms, loss: 0.1 %, queue: 64 KiB}}
""")
    output = _run(str(file))
    assert "x  h1, h2 · WAN [::1]:7000 (listens on h1:7001)" in output
    assert "n  ■  worker 20" in output
    assert "■ …  workers 0–19" in output
    assert _cells(output, "x ") == ["x", "y", "1 Gbit/s", "1 ms", "–", "0.1 %", "64 KiB"]


def test_a_large_tree_is_summarised() -> None:
    output = _run("preset:thousand-dc-1g", "--domains", "4,2")
    assert len(output.splitlines()) < 45
    assert "… 996 more DCs …" in output
    assert "999,000 pairs, all alike" in output
    assert _cells(output, "pairs") == ["pairs", "AG 12,000", "A2A 996,000", "AG 4,000", "A2A 12,000"]


def test_json() -> None:
    found = json.loads(_run("preset:three-uneven", "--json"))
    assert found["datacenters"][0]["uplink_bytes_per_s"] == 125e6
    assert found["levels"] is None
    assert {(link["from"], link["to"]) for link in found["links"]["special"]} >= {("lyon", "oslo"), ("oslo", "lyon")}
    assert found["links"]["common"]["bandwidth_bytes_per_s"] == 25e6
    assert found["domains"]["sizes"] == [1, 1]
    assert found["domains"]["workers"][4]["location"] == [1, 0]
    assert found["domains"]["workers"][4]["levels"] == [{"AG": [], "A2A": [0, 2, 6, 8]}, {"AG": [], "A2A": [5]}]


def test_json_of_a_large_tree_lists_no_workers() -> None:
    found = json.loads(_run("preset:thousand-dc-1g", "--json"))
    assert found["domains"]["workers"] is None
    assert found["links"]["special"] == []


@pytest.mark.parametrize("arguments", [["no-such-file.yaml"], ["preset:none"], ["preset:two-dc", "--domains", "3"]])
def test_errors_are_left_to_the_command_group(arguments: list[str]) -> None:
    with pytest.raises(TopologyError):
        CliRunner().invoke(topology, arguments, catch_exceptions=False)


def _cells(output: str, start: str) -> list[str]:
    """The cells of the last row that starts so."""
    row = [line.strip() for line in output.splitlines() if line.strip().startswith(start)][-1]
    return [cell.strip() for cell in row.split("  ") if cell.strip()]
