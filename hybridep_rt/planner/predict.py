"""Predictions: any number of plans at once, or one plan as a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.events import Outcome, Recorder, run
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes, layer_times
from hybridep_rt.planner.plan import LayerPlan
from hybridep_rt.planner.site_plan import SitePlan, from_layer
from hybridep_rt.planner.volumes import Counter


class Predictor:
    """Predicts steps of one job; remembers what it has counted."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._counters: dict[object, Counter] = {}
        self._spreads: list[object] = []

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
        return run(self.job, layers, record)

    def site_plans(self, plan: Sequence[LayerPlan]) -> tuple[SitePlan, ...]:
        """The DCs' view of a plan, equal layers once."""
        views = {layer: from_layer(layer, self.job.layout) for layer in set(plan)}
        return tuple(views[layer] for layer in plan)

    def _times(self, layer: int, plans: Sequence[SitePlan]) -> LayerTimes:
        spreads = {id(plan.spread) for plan in plans}
        if len(spreads) > 1:
            raise PlanError("plans that spread work differently inside a DC can't be weighed in one go")
        spread = plans[0].spread
        key = (self.job.kind(layer), id(spread))
        if key not in self._counters:
            self._spreads.append(spread)  # ids are unique only among living objects
            self._counters[key] = Counter(self.job, layer, spread)
        return layer_times(self.job, layer, self._counters[key].volumes(plans))
