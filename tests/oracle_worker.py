"""One worker of the oracle over real processes: every case of a list, one after the other, in one job.

Usage: python -m tests.oracle_worker FOLDER, under `hybridep run`; leaves one file of results per case and worker.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

import hybridep_rt
from hybridep_rt.planner.makers import block_homes, domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import LayerPlan, Layout, Plan
from hybridep_rt.runtime.planning import FixedPlan
from hybridep_rt.runtime.session import Runtime
from tests.oracle import Case, train_distributed

EXPERTS = 7


def cases(layout: Layout, scaling: tuple[int, ...] | None) -> list[tuple[list[Plan], Case]]:
    """Every kind of plan and routing that the in-memory oracle covers, once, and a run that goes through them all."""
    sizes = [(layout.dcs,)] if scaling is None else [(2, 1), (1, 2), (2, 2)]
    plans = [plain_ep(layout, EXPERTS), replicate_all(layout, EXPERTS), _crossed(layout)]
    plans += [domains(layout, EXPERTS, size, scaling) for size in sizes]
    tokens = tuple((4 + worker, worker % 2, 3) for worker in range(layout.workers))
    shapes = [Case(EXPERTS, top_k, micro_tokens=tokens, layers=2, chunks=2, clip=0.1) for top_k in (1, 2, EXPERTS)]
    crowded = Case(EXPERTS, 1, renormalise=False, micro_tokens=tokens, router_bias=(0, 0, 9, 0, 0, 0, 0), expert="gelu")
    found = [([Plan(0, layout, (layer,) * 2, "oracle")], shapes[n % 3]) for n, layer in enumerate(plans)]
    moved = plain_ep(layout, EXPERTS, homes=[(expert + 1) % layout.workers for expert in range(EXPERTS)])
    through = [Plan(n, layout, layers, "oracle") for n, layers in enumerate(zip(plans, [moved, *plans], strict=False))]
    return [
        *found,
        ([Plan(0, layout, (plans[0],), "oracle")], crowded),
        ([Plan(0, layout, (plans[1],), "oracle")], crowded),
        (through, dataclasses.replace(shapes[1], steps=len(through))),
    ]


def _crossed(layout: Layout) -> LayerPlan:
    """No domain plan: odd experts have a copy at one worker of the next DC, which serves the DC after that."""
    home = block_homes(EXPERTS, layout)
    holders, route, serve = [], [], []
    for expert, owner in enumerate(home):
        dc = layout.locate(owner)[0]
        copy_dc = (dc + 1) % layout.dcs
        copy = layout.first(copy_dc) + expert % layout.workers_per_dc[copy_dc]
        held = tuple(sorted({owner, copy} if expert % 2 and layout.dcs > 1 else {owner}))
        places = {layout.locate(worker)[0]: worker for worker in held}
        holders.append(held)
        route.append([place if place in places else sorted(places)[-1] for place in range(layout.dcs)])
        serve.append([places.get(layout.locate(worker)[0], -1) for worker in range(layout.workers)])
    return LayerPlan(home, tuple(holders), tuple(zip(*route, strict=True)), tuple(zip(*serve, strict=True)))


def main(folder: Path) -> None:
    base = hybridep_rt.init()
    site = base.site
    scaling = (2, 2) if base.layout.workers_per_dc == (2, 2) else None
    for number, ((plan, *later), case) in enumerate(cases(base.layout, scaling)):
        runtime: Runtime = dataclasses.replace(base, plans=FixedPlan(plan), chunks=case.chunks, make_site=lambda: site)
        result = train_distributed(case, runtime, switches=later)
        torch.save(dataclasses.asdict(result), folder / f"{number}-{base.rank}.pt")
    print("cases done:", number + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
