"""Small random planning problems, and the best of all their plans: 3 DCs x 6 experts have 2^12."""

from __future__ import annotations

from itertools import product

import numpy as np

from hybridep_rt.planner import routing
from hybridep_rt.planner.economics import LayerShape, Workload
from hybridep_rt.planner.job import Compute, Job
from hybridep_rt.planner.predict import Predictor
from hybridep_rt.planner.search import search
from hybridep_rt.planner.site_plan import SitePlan, canonical_spread, site_plan
from topology.model import Topology
from topology.read import parse

DCS, EXPERTS = 3, 6


def problem(seed: int) -> Job:
    """Links of 10 Mbit/s to 1 Gbit/s, even or not; small and large experts, few and many tokens, even or skewed use."""
    rng = np.random.default_rng(seed)
    hidden, ffn = int(rng.choice([256, 512, 1024])), int(rng.choice([512, 2048]))
    top_k = int(rng.integers(1, 4))
    shape = LayerShape(hidden, ffn, EXPERTS, top_k, 3 * hidden * ffn)
    work = Workload(
        (shape,) * int(rng.integers(1, 4)),
        between(rng, 64, 65536),
        token_bytes=float(rng.choice([1, 2])),
        weight_bytes=between(rng, 0.2, 2),
        gradient_bytes=between(rng, 0.2, 2),
        micro_batches=int(rng.integers(1, 3)),
        token_chunks=int(rng.choice([1, 4])),
        pre_expert_s=between(rng, 1e-4, 1),
    )
    if rng.random() < 0.5:
        chosen = routing.uniform(EXPERTS, top_k, samples=256, seed=seed)
    else:
        chosen = routing.zipf(EXPERTS, top_k, float(rng.uniform(0.5, 2)), samples=256, seed=seed)
    compute = Compute(flops_per_s=between(rng, 1e10, 1e13), pre_expert_flops_per_token=8.0 * hidden**2)
    return Job(_topology(rng), work, (chosen,), compute)


def best_of_all(predictor: Predictor) -> float:
    """Seconds of the fastest plan that treats all layers alike."""
    job = predictor.job
    spread, here = canonical_spread(job.layout, EXPERTS), np.arange(DCS)[:, None]
    own = spread.home == here
    plans: list[tuple[SitePlan, ...]] = []
    for copies in product((False, True), repeat=int((~own).sum())):
        held = own.copy()
        held[~own] = copies
        plans.append((site_plan(spread, held, np.where(held, here, spread.home)),) * len(job.work.layers))
    batches = [plans[first : first + 1024] for first in range(0, len(plans), 1024)]
    return float(min(predictor.predict(batch).step_s.min() for batch in batches))


def excess(seed: int) -> float:
    """By which share the search's choice is slower than the best plan."""
    predictor = Predictor(problem(seed))
    return search(predictor).choice.step_s / best_of_all(predictor) - 1


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _topology(rng: np.random.Generator) -> Topology:
    even, base = rng.random() < 0.3, between(rng, 10, 1000)

    def rate() -> float:
        return base if even else between(rng, 10, 1000)

    places = "\n".join(f"  {name}: {{workers: {rng.integers(1, 3)}, uplink: {rate():.0f} Mbit/s}}" for name in "abc")
    links = "\n".join(
        f"  {a} -> {b}: {{bandwidth: {rate():.0f} Mbit/s, rtt: {rng.integers(1, 80)} ms}}"
        for a, b in product("abc", repeat=2)
        if a != b
    )
    return parse(f"cluster: t\ndatacenters:\n{places}\nlinks:\n{links}")
