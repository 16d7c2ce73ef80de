"""Predictions: any number of plans at once, or one plan as a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.events import Outcome, Recorder, run
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes, layer_times
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.plan import LayerPlan
from hybridep_rt.planner.site_plan import SitePlan, from_layer
from hybridep_rt.planner.volumes import Counter

_FEW_DCS = 64
_FOLLOWED = 4


class Predictor:
    """Predicts steps of one job; remembers what it has counted.

    With more than `_FEW_DCS`, of many equal layers only a few are played and the rest extrapolated.
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
            return _extrapolated(run(self.job, layers[: _FOLLOWED - 1]), run(self.job, layers[:_FOLLOWED]), count)
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
        return layer_times(self.job, layer, self._counters[key].volumes(self.job, plans))


def _extrapolated(fewer: Outcome, more: Outcome, layers: int) -> Outcome:
    """Each further layer adds what the last one added."""
    further = layers - _FOLLOWED

    def last(a: Array, b: Array) -> Array:
        return b + further * (b - a)

    return Outcome(
        end_s=last(fewer.end_s, more.end_s),
        forward_s=last(fewer.forward_s, more.forward_s),
        parts={name: last(fewer.parts[name], part) for name, part in more.parts.items()},
        sent_bytes={name: last(fewer.sent_bytes[name], sent) for name, sent in more.sent_bytes.items()},
    )
