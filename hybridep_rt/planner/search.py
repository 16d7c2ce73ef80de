"""Which plan is fastest, by the runtime's own model: named plans, and what small changes make of them. Pure.

Candidates: plain EP, expert domains of every size at every level, full replication; groups of DCs that are joined by
fast links; the most popular experts copied everywhere; as much as the memory holds. From each that fits, the steepest
descent over `moves`, all layers of a kind alike; then layers may differ. The result is deterministic and never
predicted worse than anything that was weighed on the way.

Too many DCs for that (`_LOCAL_MOST`) are planned by the named plans alone; of very many (`_PLAYED_DCS_MOST`) only
those are played through whose busiest links have least to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.auto import all_sizes, size_name
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.makers import divisors, domains
from hybridep_rt.planner.moves import Move, apply, double_moves, moves
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.routing import Routing
from hybridep_rt.planner.site_plan import (
    Ints,
    SitePlan,
    Spread,
    canonical_spread,
    consecutive,
    domain,
    from_layer,
    plain,
    site_plan,
)

_LOCAL_MOST = 4096
"""DCs times experts up to which single subscriptions are searched."""
_WEIGHED_MOST = 6_000
"""Plans that are weighed in total before a descent stops; fewer where each has many links (`_LINKS_MOST`)."""
_LINKS_MOST = 400_000
_STEP_PART = 4
"""A step of a descent weighs at most this part of them, the larger moves first; few starts are followed then."""
_PLAYED_DCS_MOST = 128
_PLAYED_MOST = 3
_AT_ONCE = 512
_BETTER = 1e-9
_BUSY = 1e-3
"""Weight of busy links beside the step's time in a descent: of equally fast plans the one that sends less leads on."""
_INNER_MOST = 64
"""Workers up to which domains inside DCs are weighed too."""

Layers = tuple[SitePlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A plan that was weighed: `parts` are seconds of its last DC; `copy_bytes` the worker with most copies."""

    name: str
    layers: Layers
    step_s: float
    parts: dict[str, float]
    copy_bytes: float
    fits: bool
    canonical: bool
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest option that fits, the named ones that were weighed, fastest first, and how many in all."""

    choice: Option
    named: tuple[Option, ...]
    weighed: int


def search(predictor: Predictor, *, memory_budget_bytes: float | None = None) -> Found:
    """`memory_budget_bytes`: for the copies of one worker, None: no limit. Raises PlanError for a negative one."""
    if memory_budget_bytes is not None and not memory_budget_bytes >= 0:
        raise PlanError(f"the memory budget must be bytes from 0, not {memory_budget_bytes}")
    return _Search(predictor, np.inf if memory_budget_bytes is None else memory_budget_bytes).run()


class _Search:
    def __init__(self, predictor: Predictor, budget_bytes: float) -> None:
        self._predictor = predictor
        self._job = predictor.job
        self._budget_bytes = budget_bytes
        self._weighed = 0
        self._best: Option | None = None
        counts = {shape.num_experts for shape in self._job.work.layers}
        self._spreads = {count: canonical_spread(self._job.layout, count) for count in counts}

    def run(self) -> Found:
        named = self._weigh_named()
        dcs = self._job.layout.dcs
        if dcs > 1 and dcs * max(self._spreads) <= _LOCAL_MOST:
            starts = _distinct([option for option in named if option.canonical and option.fits])
            ends = [self._descend(start, moves) for start in starts[: max(2, self._most // self._step_most(moves))]]
            lowest = self._descend(min(ends, key=lambda option: option.score), _all_moves)
            self._refine_layers(_distinct([lowest, *ends, *starts]))
        assert self._best is not None  # plain EP always fits
        ranked = sorted(named, key=lambda option: (not option.fits, option.step_s, option.copy_bytes))
        return Found(self._best, tuple(ranked), self._weighed)

    def _weigh_named(self) -> list[Option]:
        starts = list(_named(self._job, self._spreads))
        if self._job.layout.dcs <= _PLAYED_DCS_MOST:
            starts += [(f"popular:{count}", layers) for count, layers in self._popular()]
        if np.isfinite(self._budget_bytes) and self._budget_bytes > 0:
            starts.append(("filled", self._filled()))
        found = self._weigh([(name, layers, True) for name, layers in self._promising(starts)])
        found += self._weigh([each for option in found if not option.fits for each in self._parts_of(option)])
        inner = [(name, layers, False) for name, layers in _inner(self._job)]
        return found + [option for each in inner for option in self._weigh([each])]

    def _promising(self, starts: list[tuple[str, Layers]]) -> list[tuple[str, Layers]]:
        """Plain EP, and of very many DCs only the plans that are least bound by their busiest link or worker."""
        if self._job.layout.dcs <= _PLAYED_DCS_MOST:
            return starts
        fitting = [start for start in starts[1:] if copy_bytes(self._job, start[1]) <= self._budget_bytes]
        bounds = {name: self._predictor.least_s(layers) for name, layers in fitting}
        return [starts[0], *sorted(fitting, key=lambda start: (bounds[start[0]], start[0]))[: _PLAYED_MOST - 1]]

    def _weigh(self, candidates: Sequence[tuple[str, Layers, bool]]) -> list[Option]:
        found: list[Option] = []
        for first in range(0, len(candidates), self._batch):
            batch = candidates[first : first + self._batch]
            outcome = self._predictor.predict([layers for _, layers, _ in batch])
            sent = sum(outcome.sent_bytes.values(), np.zeros_like(outcome.sent_bytes["tokens"]))
            busy_s = (sent / self._job.network.bandwidth).sum((-1, -2)) / self._job.layout.dcs
            for number, (name, layers, canonical) in enumerate(batch):
                last = int(outcome.end_s[number].argmax())
                parts = {part: float(seconds[number, last]) for part, seconds in outcome.parts.items()}
                step_s = float(outcome.step_s[number])
                held_bytes = copy_bytes(self._job, layers)
                fits = held_bytes <= self._budget_bytes
                score = step_s + _BUSY * float(busy_s[number])
                found.append(Option(name, layers, step_s, parts, held_bytes, fits, canonical, score))
        self._weighed += len(found)
        for option in found:
            if option.fits and (self._best is None or _key(option) < _key(self._best)):
                self._best = option
        return found

    def _step_most(self, moves_of: Callable[[Spread, Routing], list[Move]]) -> int:
        """Plans that the first step of a descent weighs."""
        spread = self._spreads[self._job.work.layers[0].num_experts]
        return min(len(moves_of(spread, self._job.routing_of(0))), self._most // _STEP_PART) + 1

    @property
    def _most(self) -> int:
        return min(_WEIGHED_MOST, _LINKS_MOST // self._job.layout.dcs**2)

    @property
    def _batch(self) -> int:
        """Plans at once: as many as keep matrices small."""
        return max(1, min(_AT_ONCE, (1 << 20) // self._job.layout.dcs**2))

    def _descend(self, start: Option, moves_of: Callable[[Spread, Routing], list[Move]]) -> Option:
        """Follow the best move (or all good ones, or half of them ...) until none helps."""
        job = self._job
        kinds = {job.kind(layer): layer for layer in reversed(range(len(job.work.layers)))}
        options = {
            kind: moves_of(self._spreads[kind[0].num_experts], job.routing_of(layer))[: self._most // _STEP_PART]
            for kind, layer in kinds.items()
        }
        current, improved = start, True
        while improved and self._weighed < self._most:
            improved = False
            for kind, layer in kinds.items():
                better = self._best_neighbour(current, kind, current.layers[layer], options[kind])
                if better is not None:
                    current, improved = better, True
        return current

    def _best_neighbour(
        self, current: Option, kind: tuple[LayerShape, int], plan: SitePlan, tried: Sequence[Move]
    ) -> Option | None:
        made = [(move, changed) for move in tried if (changed := apply(plan, move)) is not None]
        near = self._neighbours(current, kind, [changed for _, changed in made])
        good = sorted(
            (number for number, option in enumerate(near) if option.fits and _improves(option, current)),
            key=lambda number: (near[number].score, number),
        )
        if not good:
            return None
        together = []
        for count in (1 << power for power in range(1, len(good).bit_length())):
            joined: SitePlan = plan
            for number in good[:count]:
                joined = apply(joined, made[number][0]) or joined
            together.append(joined)
        reached = [near[good[0]], *(o for o in self._neighbours(current, kind, together) if o.fits)]
        return min(reached, key=lambda option: option.score)

    def _neighbours(self, current: Option, kind: tuple[LayerShape, int], plans: Sequence[SitePlan]) -> list[Option]:
        """`current` with the layers of a kind replaced."""
        alike = [self._job.kind(layer) == kind for layer in range(len(current.layers))]
        return self._weigh(
            [
                ("searched", tuple(new if same else old for same, old in zip(alike, current.layers, strict=True)), True)
                for new in plans
            ]
        )

    def _refine_layers(self, options: Sequence[Option]) -> None:
        """Let the first layers, whose experts nothing hides, and the last ones follow another of the known plans."""
        count = len(self._job.work.layers)
        if count == 1 or self._best is None or not self._best.canonical:
            return
        ep = tuple(plain(self._spreads[shape.num_experts]) for shape in self._job.work.layers)
        others = [*(option.layers for option in options), ep]
        cuts = sorted({max(1, round(count * part / 8)) for part in range(8)})
        best = self._best.layers
        mixed = [
            (*first[:cut], *second[cut:])
            for cut in cuts
            for other in others
            for first, second in ((best, other), (other, best))
        ]
        self._weigh([("searched by layer", layers, True) for layers in mixed])

    def _popular(self) -> Iterator[tuple[int, Layers]]:
        """The most chosen experts of all, copied to every DC."""
        most = max(self._spreads)
        if self._job.layout.dcs == 1:
            return
        for count in (1 << power for power in range(most.bit_length())):
            if count < most:
                yield count, self._each_layer(partial(self._top, count))

    def _top(self, count: int, layer: int) -> SitePlan:
        spread = self._spreads[self._job.work.layers[layer].num_experts]
        chosen = _popularity(self._job, layer).sum(0)
        which = np.zeros_like(plain(spread).held)
        which[:, np.argsort(-chosen, kind="stable")[:count]] = True
        return apply(plain(spread), Move(which, np.zeros_like(which))) or plain(spread)

    def _parts_of(self, option: Option) -> Iterator[tuple[str, Layers, bool]]:
        """A plan that doesn't fit, in as many layers as do: evenly spaced, or the last, whose experts come early."""
        count = len(option.layers)
        some = int(count * self._budget_bytes / option.copy_bytes)
        if not 0 < some < count:
            return
        spaced = {round((number + 0.5) * count / some - 0.5) for number in range(some)}
        ep = tuple(plain(self._spreads[shape.num_experts]) for shape in self._job.work.layers)
        for name, chosen in (("spaced", spaced), ("last", set(range(count - some, count)))):
            layers = tuple(option.layers[n] if n in chosen else ep[n] for n in range(count))
            yield f"{option.name} in {some} {name} layers", layers, True

    def _filled(self) -> Layers:
        """Each worker's copies: the experts that its DC chooses most, as many as fit, equally in all layers."""
        total = sum(shape.parameters_per_expert for shape in self._job.work.layers) * self._job.work.copy_bytes
        room = int(self._budget_bytes // total)

        def fill(layer: int) -> SitePlan:
            spread = self._spreads[self._job.work.layers[layer].num_experts]
            held = plain(spread).held.copy()
            for dc, wanted in enumerate(np.broadcast_to(_popularity(self._job, layer), held.shape)):
                for worker in range(self._job.layout.workers_per_dc[dc]):
                    here = np.flatnonzero((spread.share[dc, :, worker] > 0) & ~held[dc])
                    held[dc, here[np.argsort(-wanted[here], kind="stable")][:room]] = True
            route = np.where(held, np.arange(len(held))[:, None], spread.home)
            return site_plan(spread, held, route)

        return self._each_layer(fill)

    def _each_layer(self, make: Callable[[int], SitePlan]) -> Layers:
        """Layers of a kind alike."""
        made: dict[object, SitePlan] = {}
        for layer in range(len(self._job.work.layers)):
            if self._job.kind(layer) not in made:
                made[self._job.kind(layer)] = make(layer)
        return tuple(made[self._job.kind(layer)] for layer in range(len(self._job.work.layers)))


def _all_moves(spread: Spread, routing: Routing) -> list[Move]:
    return moves(spread, routing) + double_moves(spread)


def groups(network_rate: Array) -> list[Ints]:
    """Every grouping of DCs that single linkage makes of [D,D] rates: those joined by links above a limit."""
    dcs = len(network_rate)
    both = np.minimum(network_rate, network_rate.T)
    found: dict[bytes, Ints] = {}
    for limit in np.unique(both[~np.eye(dcs, dtype=bool)])[::-1]:
        members = np.arange(dcs)
        for a, b in np.argwhere(both >= limit):
            members[members == members[b]] = members[a]
        members = np.unique(members, return_inverse=True)[1]
        if 1 < members.max() + 1 < dcs:
            found[members.tobytes()] = members
    return list(found.values())


def _named(job: Job, spreads: dict[int, Spread]) -> Iterator[tuple[str, Layers]]:
    dcs = job.layout.dcs
    memberships = {("ep" if size == 1 else f"domains:{size}"): consecutive(dcs, size) for size in divisors(dcs)}
    if dcs <= _INNER_MOST:
        known = {members.tobytes() for members in memberships.values()}
        for members in groups(job.network.bandwidth):
            if members.tobytes() not in known:
                memberships["groups:" + "+".join(_group_names(job, members))] = members
    for name, members in memberships.items():
        made = {count: plain(spread) if name == "ep" else domain(spread, members) for count, spread in spreads.items()}
        yield name, tuple(made[shape.num_experts] for shape in job.work.layers)


def _group_names(job: Job, members: Ints) -> list[str]:
    names = np.array(job.topology.dc_names)
    return ["".join(["(", ",".join(names[members == group]), ")"]) for group in range(int(members.max()) + 1)]


def _inner(job: Job) -> Iterator[tuple[str, Layers]]:
    """Domains that reach inside DCs."""
    if job.topology.scaling is None or job.layout.workers > _INNER_MOST:
        return
    for sizes in all_sizes(job.topology):
        if any(size > 1 for size in sizes[1:]):
            counts = {shape.num_experts for shape in job.work.layers}
            made = {n: from_layer(domains(job.layout, n, sizes, job.topology.scaling), job.layout) for n in counts}
            yield size_name(sizes, job.topology), tuple(made[shape.num_experts] for shape in job.work.layers)


def _popularity(job: Job, layer: int) -> Array:
    """[S,E] choices of each sampled source."""
    count = job.work.layers[layer].num_experts
    return np.array([np.bincount(chosen.ravel(), minlength=count) for chosen in job.routing_of(layer).choices], float)


def copy_bytes(job: Job, layers: Layers) -> float:
    """Memory of the worker with most: its copies, and what it remembers of its own experts that others hold."""
    work, total = job.work, np.zeros_like(layers[0].copies)
    for plan, shape in zip(layers, work.layers, strict=True):
        total += plan.copies * (shape.parameters_per_expert * work.copy_bytes)
        if work.home_bytes or work.subscriber_bytes:
            others = plan.held.sum(0) - 1
            each = shape.parameters_per_expert * (work.home_bytes * (others > 0) + work.subscriber_bytes * others)
            np.add.at(total, (plan.spread.home, plan.spread.slot), each)
    return float(total.max())


def _key(option: Option) -> tuple[float, float]:
    """Faster first; of equally fast ones that with fewer copies."""
    return (float(f"{option.step_s:.9e}"), option.copy_bytes)


def _improves(option: Option, current: Option) -> bool:
    return option.score < current.score * (1 - _BETTER)


def _distinct(options: Sequence[Option]) -> list[Option]:
    """Options that hold different copies, fastest first."""
    found = {
        tuple(layer.held.tobytes() + layer.route.tobytes() for layer in o.layers[:1]): o for o in reversed(options)
    }
    return sorted(found.values(), key=lambda option: (option.step_s, option.name))
