"""Makers of plans: plain EP, expert domains, full replication, and copies placed by hand.

A token at worker m of DC d for expert e goes to DC `route[d][e]`. If that is another DC it lands there at local index
`m_local mod W`, and is computed by `serve[landing worker][e]`. In a symmetric tree the two tables together follow the
rule t_l = floor(home_l / S_l) * S_l + (m_l mod S_l) at every level l: at most one hop per level, level 0 first.

The rule is `topology.domains`'; it answers for one pair of workers, so the tables here are made by arithmetic on whole
columns, and the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybridep_rt.errors import PlanError, TopologyError
from hybridep_rt.planner.plan import LayerPlan, Layout
from topology.domains import Domains
from topology.location import Tree


def block_homes(num_experts: int, layout: Layout) -> tuple[int, ...]:
    """Contiguous blocks: worker w owns experts floor(w*E/G) .. floor((w+1)*E/G)-1. Blocks may differ by one expert."""
    if num_experts < 1:
        raise PlanError(f"a layer needs at least one expert, not {num_experts}")
    workers = layout.workers
    return tuple(((expert + 1) * workers - 1) // num_experts for expert in range(num_experts))


def plain_ep(layout: Layout, num_experts: int, *, homes: Sequence[int] | None = None) -> LayerPlan:
    """No copies: every token goes to its expert's home. The paper's p = 1."""
    return domains(layout, num_experts, (1,), homes=homes)


def replicate_all(layout: Layout, num_experts: int, *, homes: Sequence[int] | None = None) -> LayerPlan:
    """Every worker of every DC holds every expert, so no token moves. The paper's p = 0.

    In a symmetric tree these are domains of full size at every level. `domains` with S_0 = D alone is the smaller
    sibling: each DC holds every expert once, and EP goes on inside each DC.
    """
    home = _homes(layout, num_experts, homes)
    everyone = tuple(range(layout.workers))
    return LayerPlan(
        home=home,
        holders=(everyone,) * num_experts,
        route=tuple((dc,) * num_experts for dc in range(layout.dcs)),
        serve=tuple((worker,) * num_experts for worker in everyone),
    )


def domains(
    layout: Layout,
    num_experts: int,
    sizes: Sequence[int],
    scaling: Sequence[int] | None = None,
    *,
    homes: Sequence[int] | None = None,
) -> LayerPlan:
    """Expert domains of `sizes` S_l, level 0 first; levels that are not named have size 1.

    `scaling`: SF_l of a symmetric tree, level 0 first, or None; it is needed for sizes above 1 inside a DC. DCs form
    consecutive groups of S_0 that share their experts. A copy sits at its home's local index (mod W_d in an uneven
    tree), and at all workers of the home's inner domains.

    Raises PlanError where a size doesn't divide its level, or the tree has no such level.
    """
    home = _homes(layout, num_experts, homes)
    tree = _tree(layout, scaling)
    full = complete_sizes(tree, sizes)
    inner = None if tree.scaling is None else (tree.scaling[1:], full[1:])
    spots = [layout.locate(worker) for worker in home]
    servers = [_servers(layout, spot, full[0], inner) for spot in spots]
    return LayerPlan(
        home=home,
        holders=tuple(tuple(sorted({s for s in column if s >= 0})) for column in servers),
        route=tuple(tuple(_routed(dc, spot[0], full[0]) for spot in spots) for dc in range(layout.dcs)),
        serve=tuple(zip(*servers, strict=True)),
    )


def subscribe(layout: Layout, home: Sequence[int], holders: Sequence[Sequence[int]]) -> LayerPlan:
    """The canonical routes of any set of holders.

    A DC that holds an expert serves itself, all others go to the home's DC. Inside a DC a worker that holds the expert
    serves itself, else the home does, else the copy at the home's local index mod W_d, else the DC's first holder.
    """
    route: list[list[int]] = [[] for _ in range(layout.dcs)]
    serve: list[list[int]] = [[] for _ in range(layout.workers)]
    for owner, members in zip(home, holders, strict=True):
        home_dc, home_local = layout.locate(owner)
        holding = set(members)
        first = 0
        for dc, count in enumerate(layout.workers_per_dc):
            workers = range(first, first + count)
            preferred = first + layout.landing(home_local, dc)
            default = preferred if preferred in holding else next((m for m in workers if m in holding), -1)
            route[dc].append(home_dc if default < 0 else dc)
            for worker in workers:
                serve[worker].append(worker if worker in holding else default)
            first += count
    return LayerPlan(
        home=tuple(home),
        holders=tuple(tuple(sorted(members)) for members in holders),
        route=tuple(map(tuple, route)),
        serve=tuple(map(tuple, serve)),
    )


def complete_sizes(tree: Tree, sizes: Sequence[int]) -> tuple[int, ...]:
    """`sizes` with 1 for every level that is not named. Raises PlanError, which names the allowed sizes."""
    try:
        return Domains(tree, tuple(sizes)).sizes
    except TopologyError as error:
        raise PlanError(str(error)) from None


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor, ascending: the feasible domain sizes of a level of that scaling factor."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _homes(layout: Layout, num_experts: int, homes: Sequence[int] | None) -> tuple[int, ...]:
    if homes is None:
        return block_homes(num_experts, layout)
    if len(homes) != num_experts:
        raise PlanError(f"homes must have {num_experts} entries, not {len(homes)}")
    return tuple(homes)


def _tree(layout: Layout, scaling: Sequence[int] | None) -> Tree:
    if scaling is not None:
        per_dc = prod(scaling[1:])
        if not scaling or scaling[0] != layout.dcs or any(count != per_dc for count in layout.workers_per_dc):
            raise PlanError(f"scaling factors {tuple(scaling)} don't describe workers per DC {layout.workers_per_dc}")
    return Tree(layout.workers_per_dc, None if scaling is None else tuple(scaling))


def _routed(dc: int, home_dc: int, size: int) -> int:
    return home_dc // size * size + dc % size


def _servers(
    layout: Layout,
    home: tuple[int, int],
    size: int,
    inner: tuple[Sequence[int], Sequence[int]] | None,
) -> list[int]:
    """One expert's column of `serve`: per worker, the worker of its DC that computes, or -1."""
    home_dc, home_local = home
    column: list[int] = []
    for dc, count in enumerate(layout.workers_per_dc):
        first = len(column)
        if dc // size != home_dc // size:
            column += [-1] * count
        elif inner is None:
            column += [first + layout.landing(home_local, dc)] * count
        else:
            column += [first + _inner_server(home_local, local, *inner) for local in range(count)]
    return column


def _inner_server(home: int, worker: int, scaling: Sequence[int], sizes: Sequence[int]) -> int:
    """The rule t_l = floor(home_l/S_l)*S_l + (m_l mod S_l) on local indices, last level fastest."""
    server, stride = 0, 1
    for factor, size in zip(reversed(scaling), reversed(sizes), strict=True):
        home, home_index = divmod(home, factor)
        worker, worker_index = divmod(worker, factor)
        server += stride * (home_index // size * size + worker_index % size)
        stride *= factor
    return server
