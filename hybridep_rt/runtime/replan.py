"""Every so many steps: measure links and routing, and go over to another plan where that pays."""

from __future__ import annotations

import logging
from dataclasses import replace
from statistics import median

import torch

from hybridep_rt.errors import ConfigError
from hybridep_rt.planner.calibration import Calibration, Figure, LinkFigures
from hybridep_rt.planner.plan import Plan
from hybridep_rt.planner.plan_file import dump, parse_plan
from hybridep_rt.planner.replan import Judge, propose
from hybridep_rt.planner.routing import Routing
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase
from hybridep_rt.runtime.link_figures import measure_links
from hybridep_rt.runtime.planning import TopologyPlan
from hybridep_rt.runtime.routing_sample import RoutingSample, routing_of
from hybridep_rt.runtime.session import Runtime

_LOG = logging.getLogger("hybridep_rt")
_CHANNEL = "replan"
_ROOT = Address(0, 0)
_PROBE_BYTES = 16 << 20
"""Sent over all links together at each look."""


class Replanner:
    """Acts after every `every`-th optimizer step of a runtime; the first worker searches and decides for all.

    Links are measured while nothing else is on them: what a busy or an idle link carries says less. Raises ConfigError
    for a number of steps below 1.
    """

    def __init__(self, runtime: Runtime, plans: TopologyPlan, every: int) -> None:
        if every < 1:
            raise ConfigError(f"replan: plans are looked at after a number of steps from 1, not {every}")
        self._runtime = runtime
        self._plans = plans
        self._every = every
        self._judge = Judge()
        self._sample = runtime.routing_sample = RoutingSample()
        runtime.after_step.append(self.after_step)

    def after_step(self) -> None:
        """Called by all workers after each optimizer step."""
        runtime = self._runtime
        if runtime.clock.step % self._every or runtime.layout.dcs < 2 or not runtime.shapes:
            return
        if runtime.load.tokens_per_step is None:
            raise ConfigError("replan needs the tokens of a worker and step: pass attach(..., tokens_per_step=N)")
        runtime.settle()
        calibration = self._measured_links()
        routing = self._measured_routing()
        plan = self._shared(self._decide(calibration, routing) if runtime.address == _ROOT else None)
        if plan is not None:
            runtime.switch(plan)

    def _decide(self, calibration: Calibration, routing: tuple[Routing, ...]) -> Plan | None:
        """At the first worker: the plan to go over to, if any."""
        runtime = self._runtime
        assert runtime.plan is not None
        job, _ = replace(self._plans, calibration=calibration).job(runtime.shapes, runtime.load)
        job = replace(job, routing=routing or job.routing)
        budget_bytes = self._plans.memory_budget_bytes
        proposal = propose(job, runtime.plan.layers, self._every, memory_budget_bytes=budget_bytes)
        changes, why = self._judge.judge(proposal)
        _LOG.info("step %d: %s", runtime.clock.step, why)
        return Plan(runtime.plan.epoch + 1, runtime.layout, proposal.layers, why) if changes else None

    def _shared(self, plan: Plan | None) -> Plan | None:
        """The first worker's answer, at all workers."""
        runtime, at = self._runtime, self._runtime.clock.collective(Phase.SWITCH)
        if runtime.address != _ROOT:
            text = bytes(runtime.wan.receive(_ROOT, _CHANNEL, at).payload).decode(errors="replace")
            return parse_plan(text, "the plan of the first worker", runtime.layout) if text else None
        answer = b"" if plan is None else dump(plan, as_json=True).encode()
        for number in range(1, runtime.layout.workers):
            to = Address(*runtime.layout.locate(number))
            runtime.wan.send(to, _CHANNEL, at, [answer], traffic=Traffic.CONTROL)
        return plan

    def _measured_links(self) -> Calibration:
        """What links between DCs carry now, in the place of an earlier measurement."""
        runtime, topology = self._runtime, self._plans.topology
        figures = torch.zeros(runtime.layout.dcs, runtime.layout.dcs, 2, dtype=torch.float64)
        for heard in measure_links(runtime, topology, _PROBE_BYTES, lambda _: None):
            figures[heard.source, runtime.address.dc] = torch.tensor(
                [median(heard.goodput_bytes_per_s), median(heard.rtt_s)], dtype=torch.float64
            )
        found = runtime.all_reduce(figures).tolist()
        links = {
            (runtime.dc_names[source], runtime.dc_names[to]): LinkFigures(
                Figure.of([found[source][to][0]]), Figure.of([found[source][to][1]])
            )
            for source in range(runtime.layout.dcs)
            for to in range(runtime.layout.dcs)
            if source != to
        }
        before = self._plans.calibration or Calibration(topology.cluster, "", "")
        return replace(before, links=links)

    def _measured_routing(self) -> tuple[Routing, ...]:
        """Of each layer; nothing where some layer saw no token since the last look."""
        runtime = self._runtime
        found = [
            routing_of(
                runtime.all_reduce(self._sample.take(number, shape.top_k, runtime.address, runtime.layout)),
                runtime.layout,
            )
            for number, shape in enumerate(runtime.shapes)
        ]
        measured = [routing for routing in found if routing is not None]
        return tuple(measured) if len(measured) == len(found) else ()
