"""`hybridep topology`: a topology file drawn as a tree, its WAN links, and who sends experts or tokens to whom."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree as Drawing

from topology import Datacenter, Link, LinkTable, Topology, load
from topology.describe import describe
from topology.domains import Domains, Role, parse_sizes
from topology.location import Tree
from topology.units import format_bit_rate, format_byte_rate, format_share, format_size, format_time

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_ROLE_COLOURS: Mapping[Role, str] = {"AG": "bold green", "A2A": "bold yellow"}
_EXCHANGES = "Who sends experts (AG) and tokens (A2A) to whom"
_BRANCHES_MAX = 8
_LINKS_MAX = 24
_WORKERS_MAX = 32
_PARTS_MAX = 5
_ADDRESSES_MAX = 3


@click.command("topology")
@click.argument("file", metavar="FILE")
@click.option(
    "--domains", "sizes", metavar="S0,S1,...", default="1", help="Expert domain sizes, outermost level first."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in SI units instead.")
def topology(file: str, sizes: str, as_json: bool) -> None:
    """Draw the topology in FILE (a YAML file, or preset:NAME), and who exchanges what with whom."""
    found = load(file)
    domains = Domains(Tree.of(found), parse_sizes(sizes))
    if as_json:
        click.echo(json.dumps(describe(found, domains), indent=2))
    else:
        Console(highlight=False).print(view(found, domains))


def view(topology: Topology, domains: Domains) -> RenderableType:
    """Everything about a topology, for a terminal. Large trees are summarised."""
    parts: list[RenderableType] = [_head(topology), _drawing(topology, domains)]
    if len(topology.datacenters) > 1:
        parts.append(_titled("WAN links", "each direction on its own", _links(topology)))
    parts.append(_titled(_EXCHANGES, _domains_in_words(domains), _exchanges(topology, domains)))
    return Group(*(Padding(part, (1, 1, 0, 1), expand=False) for part in parts), "")


def _titled(title: str, remark: str, part: RenderableType) -> Group:
    return Group(Text.assemble((title, "bold"), f"  {remark}"), part)


def _head(topology: Topology) -> Text:
    tree = Tree.of(topology)
    shape = "uneven" if tree.scaling is None else f"symmetric, {' × '.join(map(str, tree.scaling))}"
    facts = [_count(len(topology.datacenters), "DC"), _count(tree.workers, "worker"), shape]
    if topology.emulate:
        facts.append("WAN emulated")
    facts.append("no TLS between DCs" if topology.insecure else "TLS between DCs")
    return Text.assemble(
        (topology.cluster, "bold"),
        f"  {' · '.join(facts)}\n",
        (f"{topology.source}  digest {topology.digest()[:12]}", "dim"),
    )


def _drawing(topology: Topology, domains: Domains) -> Drawing:
    """The tree of DCs, nodes and workers. DCs that share experts have one colour."""
    wan = "" if topology.levels is None else f"  {_level_in_words(topology, 0)}"
    root = Drawing(Text.assemble(("WAN", "bold"), wan), guide_style="dim")
    for index in _few(root, len(topology.datacenters), "DCs"):
        dc, first = topology.datacenters[index], domains.tree.first[index]
        colour = _COLOURS[index // domains.sizes[0] % len(_COLOURS)]
        label = Text(dc.name, f"bold {colour}")
        if topology.levels is None:
            _add_hosts(root, label, dc, first, colour)
        else:
            _add_level(root, label, _dc_facts(dc), topology, 1, range(first, first + dc.workers), colour)
    return root


def _dc_facts(dc: Datacenter) -> str:
    facts = [", ".join(host.address or "this machine" for host in dc.hosts[:_ADDRESSES_MAX])]
    if len(dc.hosts) > _ADDRESSES_MAX:
        facts = [_count(len(dc.hosts), "host")]
    if dc.wan is not None:
        facts.append(f"WAN {_address(dc.wan)}" + (f" (listens on {_address(dc.listen)})" if dc.listen else ""))
    rates = (("up", dc.uplink_bytes_per_s), ("down", dc.downlink_bytes_per_s))
    facts += [f"{way} {format_bit_rate(rate)}" for way, rate in rates if rate is not None]
    return " · ".join(facts)


def _address(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _add_hosts(parent: Drawing, label: Text, dc: Datacenter, first: int, colour: str) -> None:
    """One DC of an uneven tree, with its hosts if there are several."""
    if len(dc.hosts) == 1:
        parent.add(_line(label, _workers(range(first, first + dc.workers), colour), _dc_facts(dc)))
        return
    branch = parent.add(_line(label, _dc_facts(dc)))
    starts = list(accumulate((host.workers for host in dc.hosts), initial=first))
    for index in _few(branch, len(dc.hosts), "hosts"):
        host = dc.hosts[index]
        branch.add(_line(host.name, _workers(range(starts[index], starts[index] + host.workers), colour)))


def _add_level(
    parent: Drawing, label: Text, facts: str, topology: Topology, level: int, workers: range, colour: str
) -> None:
    """One worker of the level above in a symmetric tree; `workers` are the workers below it."""
    assert topology.levels is not None
    inside = _level_in_words(topology, level) if level < len(topology.levels) else ""
    if level >= len(topology.levels) - 1:
        parent.add(_line(label, _workers(workers, colour), inside, facts))
        return
    branch = parent.add(_line(label, inside, facts))
    name, count = topology.levels[level].name, topology.levels[level].count
    share = len(workers) // count
    for index in _few(branch, count, f"{name}s"):
        part = workers[index * share : (index + 1) * share]
        _add_level(branch, Text(f"{name} {index}"), "", topology, level + 1, part, colour)


def _line(label: Text | str, *parts: Text | str) -> Text:
    """A label, and after it what is known, with dots between."""
    known = [part if isinstance(part, Text) else Text(part, "dim") for part in parts if part]
    return Text.assemble(label, "  ", Text(" · ", "dim").join(known))


def _level_in_words(topology: Topology, level: int) -> str:
    assert topology.levels is not None
    name, count, link = topology.levels[level].name, topology.levels[level].count, topology.levels[level].link
    rate = format_byte_rate(link.bandwidth_bytes_per_s) if level else format_bit_rate(link.bandwidth_bytes_per_s)
    return f"{count:,} × {name} at {rate}" + (f", {format_time(link.rtt_s)}" if link.rtt_s else "")


def _workers(workers: range, colour: str) -> Text:
    squares = " ".join("■" * min(len(workers), 16)) + (" …" if len(workers) > 16 else "")
    return Text.assemble((squares, colour), f"  worker{'s' * (len(workers) > 1)} {_ranges(workers)}")


def _few(branch: Drawing, count: int, what: str) -> Iterator[int]:
    """All numbers below `count`; of many only the first and the last, with a remark on the branch between them."""
    if count <= _BRANCHES_MAX:
        yield from range(count)
        return
    yield from range(3)
    branch.add(Text(f"… {count - 4:,} more {what} …", style="dim"))
    yield count - 1


def _links(topology: Topology) -> Table:
    assert isinstance(topology.links, LinkTable)
    table = Table(
        "from", "to", *(_right(name) for name in _LINK_COLUMNS), box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    names, links = topology.dc_names, topology.links
    rows = dict(links) if len(links) <= _LINKS_MAX else dict(list(links.special.items())[:_LINKS_MAX])
    for (source, target), link in rows.items():
        table.add_row(names[source], names[target], *_link_cells(link))
    more = len(links.special) - len(rows)
    if more > 0:
        table.add_row("…", f"{more:,} more", *[""] * len(_LINK_COLUMNS))
    others = len(links) - len(links.special)
    if len(links) > _LINKS_MAX and links.common is not None:
        pairs = f"{others:,} {'others' if links.special else 'pairs'}, all alike"
        table.add_row("any", pairs, *_link_cells(links.common))
    return table


_LINK_COLUMNS = ("bandwidth", "round trip", "jitter", "loss", "queue")


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _link_cells(link: Link) -> Sequence[str]:
    return (
        format_bit_rate(link.bandwidth_bytes_per_s),
        format_time(link.rtt_s),
        format_time(link.jitter_s) if link.jitter_s else "–",
        format_share(link.loss) if link.loss else "–",
        "–" if link.queue_bytes is None else format_size(link.queue_bytes),
    )


def _domains_in_words(domains: Domains) -> str:
    if set(domains.sizes) == {1}:
        return "all domains of one: plain expert parallelism"
    return f"expert domains of {' × '.join(map(str, domains.sizes))}"


def _exchanges(topology: Topology, domains: Domains) -> Table:
    """Per worker and level: with whom it shares experts (AG), and with whom it exchanges tokens (A2A)."""
    names = ["dc", "worker"] if topology.levels is None else [level.name for level in topology.levels]
    table = Table("worker", "at", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_footer=True)
    table.columns[0].footer = "pairs"
    for level, name in enumerate(names):
        pairs = {role: f"{number:,}" for role, number in domains.pairs(level).items() if number}
        table.add_column(f"{name} (domain of {domains.sizes[level]})", footer=_roles(pairs))
    workers = domains.tree.workers
    for worker in range(workers if workers <= _WORKERS_MAX else _WORKERS_MAX // 4):
        dc, *inner = domains.tree.locate(worker)
        partners = (domains.partners(worker, level) for level in range(domains.tree.depth))
        cells = [_roles({role: _ranges(others) for role, others in found.items() if others}) for found in partners]
        table.add_row(str(worker), ".".join([topology.dc_names[dc], *map(str, inner)]), *cells)
    if workers > _WORKERS_MAX:
        table.add_row("…", f"{workers - _WORKERS_MAX // 4:,} more")
    return table


def _roles(texts: Mapping[Role, str]) -> Text:
    parts = [Text.assemble((f"{role} ", _ROLE_COLOURS[role]), text) for role, text in texts.items()]
    return Text("   ").join(parts) if parts else Text("–", style="dim")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0–2 5"; of many parts only the first, and how many numbers there are."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = " ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts[:_PARTS_MAX])
    return shown if len(parts) <= _PARTS_MAX else f"{shown} … ({sum(b - a + 1 for a, b in parts)})"
