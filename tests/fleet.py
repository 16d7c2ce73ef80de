"""All workers of all DCs as threads of this process, over the in-memory ports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.ladder import Rung
from hybridep_rt.errors import HybridEPError, PeerLost
from hybridep_rt.planner.plan import Plan
from hybridep_rt.protocol.address import Address
from hybridep_rt.runtime.planning import FixedPlan, PlanSource
from hybridep_rt.runtime.session import Runtime
from hybridep_rt.trace import Recorder
from hybridep_rt.transport.memory import MemorySite, MemoryWan


def run_fleet(
    plan: Plan,
    work: Callable[[Runtime], Any],
    *,
    seed: int = 0,
    chunks: int = 1,
    codecs: Codecs | None = None,
    rung: Rung | None = None,
    plans: PlanSource | None = None,
    operation_s: float = 20.0,
    staleness: int = 0,
    trace_path: str = "",
) -> list[Any]:
    """`work(runtime)` at every worker at once; results by global number. The first worker's error is raised.

    `rung` says more than `codecs`: also when they set in.
    `plans`: where the plan comes from instead; `plan` gives the layout.
    """
    layout = plan.layout
    dc_names = tuple("abcdefgh"[: layout.dcs])
    wan = MemoryWan(layout.workers_per_dc, dc_names=dc_names, seed=seed, operation_s=operation_s)
    if trace_path:
        for metrics in wan.metrics.values():
            metrics.trace = Recorder(10_000)
    sites = [MemorySite(size, operation_s=operation_s) for size in layout.workers_per_dc]
    results: list[Any] = [None] * layout.workers
    errors: list[tuple[int, BaseException]] = []

    def worker(number: int) -> None:
        address = Address(*layout.locate(number))
        try:
            runtime = Runtime(
                address=address,
                layout=layout,
                dc_names=dc_names,
                make_site=lambda: sites[address.dc].member(address.worker),
                wan=wan.port(address),
                plans=plans or FixedPlan(plan),
                rung=rung or Rung("exact", codecs or Codecs(), 0),
                chunks=chunks,
                staleness=staleness,
                trace_path=trace_path,
                metrics=wan.metrics[address],
            )
            results[number] = work(runtime)
            runtime.shutdown()
        except BaseException as error:
            errors.append((number, error))
            lost = PeerLost(address.describe(), str(error))
            wan.fail(error if isinstance(error, HybridEPError) else lost)
            for site in sites:
                site.fail(lost)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(layout.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wan.close()
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    if errors:
        raise errors[0][1]
    return results
