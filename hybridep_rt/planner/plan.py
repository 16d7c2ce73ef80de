"""The Plan: what the executor obeys. Which worker owns each expert, who holds copies, and where tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridep_rt.errors import PlanError


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of each DC. Global worker numbers count DC by DC."""

    workers_per_dc: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.workers_per_dc or min(self.workers_per_dc) < 1:
            raise PlanError(f"every DC needs at least one worker, not {self.workers_per_dc}")

    @property
    def dcs(self) -> int:
        """Number of datacenters."""
        return len(self.workers_per_dc)

    @property
    def workers(self) -> int:
        """Number of workers of all datacenters."""
        return sum(self.workers_per_dc)

    def first(self, dc: int) -> int:
        """Global number of the DC's worker 0."""
        return sum(self.workers_per_dc[:dc])

    def locate(self, worker: int) -> tuple[int, int]:
        """Global worker -> (dc, local index)."""
        if not 0 <= worker < self.workers:
            raise PlanError(f"no worker {worker}: there are {self.workers}")
        dc = 0
        while worker >= self.workers_per_dc[dc]:
            worker -= self.workers_per_dc[dc]
            dc += 1
        return dc, worker

    def number(self, dc: int, local: int) -> int:
        """(dc, local index) -> global worker."""
        if not (0 <= dc < self.dcs and 0 <= local < self.workers_per_dc[dc]):
            raise PlanError(f"no worker {local} in DC {dc}")
        return self.first(dc) + local

    def landing(self, local: int, dc: int) -> int:
        """Local index in `dc` that receives what the worker of local index `local` elsewhere sends there."""
        return local % self.workers_per_dc[dc]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One MoE layer. E experts, D datacenters, G workers (global numbers).

    `home[e]`: the worker that owns e. `holders[e]`: sorted workers with its home or a copy. `route[d][e]`: the DC that
    serves DC d's tokens for e. `serve[m][e]`: the worker of m's own DC that computes tokens for e which are at m, or
    -1 where that DC holds no copy.
    """

    home: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    route: tuple[tuple[int, ...], ...]
    serve: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer, E."""
        return len(self.home)

    def check(self, layout: Layout) -> None:
        """Raise PlanError unless every token finds its expert under this plan."""
        experts = self.num_experts
        if experts < 1:
            raise PlanError("a layer needs at least one expert")
        _check_shape("holders", self.holders, experts)
        _check_shape("route", self.route, layout.dcs, experts)
        _check_shape("serve", self.serve, layout.workers, experts)
        dc_of = [layout.locate(worker)[0] for worker in range(layout.workers)]
        for expert in range(experts):
            holders = self.holders[expert]
            if not 0 <= self.home[expert] < layout.workers:
                raise PlanError(f"expert {expert}: home {self.home[expert]} is not a worker")
            if list(holders) != sorted(set(holders)) or not all(0 <= h < layout.workers for h in holders):
                raise PlanError(f"expert {expert}: holders must be sorted, distinct workers, not {holders}")
            if self.home[expert] not in holders:
                raise PlanError(f"expert {expert}: its home {self.home[expert]} must be among its holders {holders}")
            holding_dcs = {dc_of[h] for h in holders}
            for dc in range(layout.dcs):
                if self.route[dc][expert] not in holding_dcs:
                    raise PlanError(
                        f"expert {expert}: DC {dc}'s tokens go to DC {self.route[dc][expert]}, where nobody holds it"
                    )
            for worker in range(layout.workers):
                server = self.serve[worker][expert]
                if dc_of[worker] not in holding_dcs:
                    if server != -1:
                        raise PlanError(f"expert {expert}: no worker near worker {worker} holds it, serve must be -1")
                elif server not in holders or dc_of[server] != dc_of[worker]:
                    raise PlanError(f"expert {expert}: worker {worker} must be served by a holder in its own DC")


@dataclass(frozen=True, slots=True)
class Plan:
    """A frozen decision for all MoE layers of a model, with the reason a person understands.

    `terms`: what each plan that was weighed would cost, one line each; not kept in plan files.
    """

    epoch: int
    layout: Layout
    layers: tuple[LayerPlan, ...]
    reason: str
    terms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            try:
                layer.check(self.layout)
            except PlanError as error:
                raise PlanError(f"layer {number}: {error.reason}") from None


def check_successor(old: Plan, new: Plan) -> None:
    """Raise PlanError unless a run under `old` can go on under `new`."""
    if new.epoch != old.epoch + 1:
        raise PlanError(f"the plan after epoch {old.epoch} must have epoch {old.epoch + 1}, not {new.epoch}")
    if new.layout != old.layout:
        raise PlanError(f"the plan is for workers {new.layout.workers_per_dc}, not {old.layout.workers_per_dc}")
    found, needed = ([layer.num_experts for layer in plan.layers] for plan in (new, old))
    if found != needed:
        raise PlanError(f"the plan is for layers of {found} experts, the model has {needed}")


def _check_shape(name: str, rows: Sequence[Sequence[int]], length: int, width: int | None = None) -> None:
    if len(rows) != length:
        raise PlanError(f"{name} must have {length} entries, not {len(rows)}")
    for row in rows:
        if width is not None and len(row) != width:
            raise PlanError(f"each row of {name} must have {width} entries, not {len(row)}")
