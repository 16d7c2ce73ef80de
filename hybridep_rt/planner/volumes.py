"""How much of what a layer moves and computes under a plan, counted over routing samples. Pure.

A token crosses to a DC once, whatever it needs there. All per micro-batch, [source, target] = [d, r]:
    rows     tokens of d that need an expert which r serves for it
    choices  their (token, expert) pairs there
    compute  seconds of r's busiest worker with them, forward
    visits   experts that the worker with most of them computes for them
Shapes: D datacenters, T sampled tokens, K choices, E experts, W workers per DC, M rows of a routing table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.site_plan import Ints, SitePlan, Spread

_AT_ONCE = 1 << 22
"""Sampled choices that are sorted in one go."""


@dataclass(frozen=True, slots=True, eq=False)
class Volumes:
    """[..., D, D] each: see the module; `copies`: experts homed in the first DC that the second holds.

    [..., D]: `published`: experts with copies elsewhere, `held`: copies of the worker with most; of each DC.
    `spread_in_s`: seconds in which copies spread inside a DC after they came in.
    """

    rows: Array
    choices: Array
    compute_s: Array
    visits: Array
    copies: Array
    published: Array
    held: Array
    spread_in_s: Array


class Counter:
    """Counts the rows of one layer kind's routing tables; what was counted once is remembered."""

    def __init__(self, job: Job, layer: int, spread: Spread) -> None:
        self._job = job
        self._shape = job.work.layers[layer]
        self._routing = job.routing_of(layer)
        self._spread = spread
        self._flops = 2.0 * self._shape.parameters_per_expert
        self._known: dict[tuple[int, bytes], tuple[Array, Array, Array, Array]] = {}

    def volumes(self, job: Job, plans: Sequence[SitePlan]) -> Volumes:
        """Of all `plans`, with them as leading axis. `job` may differ from the first in tokens and links."""
        routes = np.stack([plan.route for plan in plans])
        keys = [[(self._source(dc), row.tobytes()) for dc, row in enumerate(route)] for route in routes]
        self._count_new(keys, routes)
        rows, choices, load, visits = (
            np.array([[self._known[key][part] for key in each] for each in keys]) for part in range(4)
        )
        tokens = job.tokens[:, None]
        rows, choices = rows * tokens, choices * tokens
        compute_s = load * tokens * self._flops + self._inside_s(job, rows, choices)
        return Volumes(
            rows,
            choices,
            compute_s,
            visits,
            copies=np.stack([_copies(plan) for plan in plans]),
            published=np.stack([_published(plan) for plan in plans]),
            held=np.stack([plan.copies.max(1) for plan in plans]),
            spread_in_s=self._spread_in_s(job, plans),
        )

    def _source(self, dc: int) -> int:
        """Whose samples a DC's tokens follow."""
        return dc if len(self._routing.choices) > 1 else 0

    def _count_new(self, keys: list[list[tuple[int, bytes]]], routes: Ints) -> None:
        new: defaultdict[int, dict[tuple[int, bytes], Ints]] = defaultdict(dict)
        for each, route in zip(keys, routes, strict=True):
            for key, row in zip(each, route, strict=True):
                if key not in self._known:
                    new[key[0]][key] = row
        for source, rows in new.items():
            counted = self._count(self._routing.of(source), np.stack(list(rows.values())))
            self._known |= dict(zip(rows, zip(*counted, strict=True), strict=True))

    def _count(self, chosen: Ints, rows: Ints) -> tuple[Array, Array, Array, Array]:
        """[M,D] per table row: crossings, choices, and pairs/rate of the busiest worker, all per token; visits."""
        batch = max(1, _AT_ONCE // chosen.size)
        parts = [_distinct(rows[i : i + batch], chosen, self._job.layout.dcs) for i in range(0, len(rows), batch)]
        crossings, choices = (np.concatenate(part) for part in zip(*parts, strict=True))
        loads = [self._load(chosen, rows[i : i + batch]) for i in range(0, len(rows), batch)]
        busiest, visits = (np.concatenate(part) for part in zip(*loads, strict=True))
        return crossings, choices, busiest, visits

    def _load(self, chosen: Ints, rows: Ints) -> tuple[Array, Array]:
        dcs, experts, width = self._spread.share.shape
        pairs = np.bincount(chosen.ravel(), minlength=experts) / len(chosen)
        weights = self._spread.share[rows, np.arange(experts)] * pairs[:, None]
        bins = ((np.arange(len(rows))[:, None] * dcs + rows) * width)[:, :, None] + np.arange(width)
        load, visits = (
            np.bincount(bins.ravel(), each.ravel(), minlength=len(rows) * dcs * width).reshape(len(rows), dcs, width)
            for each in (weights, weights > 0)
        )
        return (load / self._job.rates).max(-1), visits.max(-1)

    def _inside_s(self, job: Job, rows: Array, choices: Array) -> Array:
        """Seconds in which rows go to the workers that hold their experts, and return, inside the DC they are at."""
        workers = np.array(job.layout.workers_per_dc, float)
        rate, delay_s = job.inside_rate
        several = workers > 1
        if not several.any():
            return np.zeros_like(rows)
        at = np.nonzero(rows)
        here = workers[at[-1]]
        others = (here - 1) * (1 - (1 - 1 / here) ** (choices[at] / rows[at]))
        stay = self._spread.stay[at[-1]]
        moved = others * (1 - stay) / np.where(here > 1, 1 - 1 / here, 1.0)
        vector = self._shape.hidden * job.work.token_bytes
        seconds = np.zeros_like(rows)
        seconds[at] = 2 * rows[at] / here * moved * vector / rate + 2 * delay_s * (here > 1)
        return seconds

    def _spread_in_s(self, job: Job, plans: Sequence[SitePlan]) -> Array:
        """Copies beyond a DC's first of each expert come from a worker of the same DC."""
        rate = job.inside_rate[0]
        first = np.array([plan.held.sum(1) - (plan.spread.home == _numbers(plan)).sum(1) for plan in plans], float)
        held = np.array([plan.copies.sum(1) for plan in plans])
        workers = np.array(job.layout.workers_per_dc, float)
        coded = self._shape.parameters_per_expert * job.work.weight_bytes
        seconds: Array = (held - first) / workers * coded / rate
        return seconds


def rough_counts(job: Job, layer: int, plan: SitePlan, samples: int) -> tuple[Array, Array, Array]:
    """Rows and choices [D,D] per micro-batch from so many sampled tokens, and experts' copies."""
    routing = job.routing_of(layer)
    if len(routing.choices) == 1:
        rows, choices = _distinct(plan.route, routing.of(0)[:samples], job.layout.dcs)
    else:
        found = [_distinct(row[None], routing.of(dc)[:samples], job.layout.dcs) for dc, row in enumerate(plan.route)]
        rows, choices = (np.concatenate(part) for part in zip(*found, strict=True))
    return rows * job.tokens[:, None], choices * job.tokens[:, None], _copies(plan)


def _distinct(rows: Ints, chosen: Ints, dcs: int) -> tuple[Array, Array]:
    """[M,D] means over tokens: whether a DC is needed, and by how many choices."""
    small = np.int16 if dcs < 1 << 15 else np.int64
    at = np.sort(rows.astype(small)[:, chosen], axis=-1)
    new = np.ones(at.shape, bool)
    new[..., 1:] = at[..., 1:] != at[..., :-1]
    bins = at.astype(np.int64) + (np.arange(len(rows)) * dcs)[:, None, None]
    needed, choices = (np.bincount(found, minlength=len(rows) * dcs) for found in (bins[new], bins.ravel()))
    return needed.reshape(-1, dcs) / len(chosen), choices.reshape(-1, dcs) / len(chosen)


def _copies(plan: SitePlan) -> Array:
    """[home's DC, subscribing DC] -> experts."""
    dcs = len(plan.held)
    owned = np.zeros((dcs, plan.held.shape[1]))
    owned[plan.spread.home, np.arange(plan.held.shape[1])] = 1.0
    between: Array = owned @ plan.held.T.astype(float)
    np.fill_diagonal(between, 0.0)
    return between


def _published(plan: SitePlan) -> Array:
    """[D] experts homed in a DC that others hold too."""
    wanted = plan.held.sum(0) > 1
    return np.bincount(plan.spread.home[wanted], minlength=len(plan.held)).astype(float)


def _numbers(plan: SitePlan) -> Ints:
    return np.arange(len(plan.held))[:, None]
