"""Predictions: any number of plans at once, or one plan as a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.events import Outcome, Recorder, run
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes, layer_times
from hybridep_rt.planner.plan import LayerPlan
from hybridep_rt.planner.site_plan import SitePlan, from_layer
from hybridep_rt.planner.volumes import Counter, Volumes, rough_counts

_FEW_DCS = 64
_FOLLOWED = 5
_ROUGH_SAMPLES = 64


class Predictor:
    """Predicts steps of one job; remembers what it has counted.

    With more than `_FEW_DCS`, the middle one of few layers stands for all others, where layers are alike.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._counters: dict[object, Counter] = {}
        self._spreads: list[object] = []

    def what_if(self, job: Job) -> Predictor:
        """For the same model and routing on other links or with other numbers of tokens; shares what was counted."""
        other = Predictor(job)
        other._counters, other._spreads = self._counters, self._spreads
        return other

    def predict(self, plans: Sequence[Sequence[SitePlan]], record: Recorder | None = None) -> Outcome:
        """`plans[p][l]`: layer l under plan p. Raises PlanError where a plan has another number of layers."""
        count = len(self.job.work.layers)
        if any(len(plan) != count for plan in plans):
            raise PlanError(f"each plan must have {count} layers, as the model")
        known: dict[object, LayerTimes] = {}
        layers = []
        for layer in range(count):
            column = [plan[layer] for plan in plans]
            key = (self.job.kind(layer), tuple(map(id, column)))
            if key not in known:
                known[key] = self._times(layer, column)
            layers.append(known[key])
        alike = len(known) == 1 and record is None
        if alike and count > _FOLLOWED and self.job.layout.dcs > _FEW_DCS:
            return run(self.job, layers[:_FOLLOWED], stretch=count - _FOLLOWED)
        return run(self.job, layers, record)

    def least_s(self, plan: Sequence[SitePlan]) -> float:
        """About what no step can beat: its busiest link, uplink or downlink, or its busiest DC. Nothing is played, and
        few samples are counted."""
        job, work = self.job, self.job.work
        sent, pairs_s = np.zeros_like(job.network.bandwidth), np.zeros(job.layout.dcs)
        rate = job.rates.min(1) * np.array(job.layout.workers_per_dc)
        for layer, site in {(job.kind(n), id(site)): (n, site) for n, site in enumerate(plan)}.values():
            shape, count = work.layers[layer], sum(site is other for other in plan)
            rows, choices, copies = rough_counts(job, layer, site, _ROUGH_SAMPLES)
            np.fill_diagonal(rows, 0.0)
            copied = count * shape.parameters_per_expert * copies
            tokens = 2 * count * work.micro_batches * shape.hidden * work.token_bytes * rows
            sent += tokens + tokens.T + copied * work.weight_bytes + copied.T * work.gradient_bytes
            flops = 2.0 * shape.parameters_per_expert * (1 + job.compute.backward_factor)
            pairs_s += count * work.micro_batches * choices.sum(0) * flops / rate
        network = job.network
        busiest = (sent / network.bandwidth, sent.sum(1) / network.uplink, sent.sum(0) / network.downlink, pairs_s)
        return max(float(seconds.max()) for seconds in busiest)

    def site_plans(self, plan: Sequence[LayerPlan]) -> tuple[SitePlan, ...]:
        """The DCs' view of a plan, equal layers once."""
        views = {layer: from_layer(layer, self.job.layout) for layer in set(plan)}
        return tuple(views[layer] for layer in plan)

    def _times(self, layer: int, plans: Sequence[SitePlan]) -> LayerTimes:
        return layer_times(self.job, layer, self._volumes(layer, plans))

    def _volumes(self, layer: int, plans: Sequence[SitePlan]) -> Volumes:
        spreads = {id(plan.spread) for plan in plans}
        if len(spreads) > 1:
            raise PlanError("plans that spread work differently inside a DC can't be weighed in one go")
        spread = plans[0].spread
        key = (self.job.kind(layer), id(spread))
        if key not in self._counters:
            self._spreads.append(spread)  # ids are unique only among living objects
            self._counters[key] = Counter(self.job, layer, spread)
        return self._counters[key].volumes(self.job, plans)
