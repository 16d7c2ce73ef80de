"""How a worker process gets its Runtime: from the launcher's environment, or alone in the world without it."""

from __future__ import annotations

import atexit
import os

from hybridep_rt.codecs.ladder import Rung, parse_rung
from hybridep_rt.config import Limits
from hybridep_rt.errors import ConfigError
from hybridep_rt.metrics import Metrics
from hybridep_rt.planner.calibration_file import load_calibration
from hybridep_rt.planner.plan import Layout
from hybridep_rt.planner.plan_spec import parse_plan_spec
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.link import Job
from hybridep_rt.runtime.emulated import EmulatedCompute
from hybridep_rt.runtime.environment import Environment, Settings
from hybridep_rt.runtime.planning import TopologyPlan
from hybridep_rt.runtime.replan import Replanner
from hybridep_rt.runtime.session import Runtime
from hybridep_rt.trace import SPANS_MAX, Recorder
from hybridep_rt.transport.memory import MemoryWan
from hybridep_rt.transport.ports import SiteGroup
from hybridep_rt.transport.site_torch import SoloSite, open_site
from hybridep_rt.transport.worker_link import WorkerLink
from topology import Datacenter, Topology, load, parse

_ALONE = "cluster: alone\nlevels:\n  - {name: dc, count: 1, bandwidth: 1 Gbit/s, latency: 0 ms}\n"
_current: Runtime | None = None


def init(*, codec: str = "", staleness: int = 0, replan: int = 0) -> Runtime:
    """Join the job; returns once every worker of every DC is there.

    Under `hybridep run` (or the same mpirun line) role, DC, topology, plan and codecs come from the environment. In a
    plain `python train.py` there is one worker, so that a program can be tried and debugged alone.

    `codec`: a rung and what differs from it, as `parse_rung` reads it, where neither the command line nor the topology
    names one. `staleness`: 1 for copies of experts that are one optimizer step behind, where neither says it.
    `replan`: look for a better plan after every so many optimizer steps, where neither says it; 0: never.

    Raises ConfigError, HandshakeRefused, ConnectFailed, PeerLost, DeadlineExceeded.
    """
    global _current
    if _current is not None:
        raise ConfigError("hybridep_rt.init() was called twice")
    environment = Environment.read(os.environ)
    _current = _alone(parse_rung(codec)) if environment is None else _join(environment, codec, staleness, replan)
    atexit.register(_current.shutdown)
    return _current


def current() -> Runtime:
    """The Runtime that `init` made. Raises ConfigError before `init`."""
    if _current is None:
        raise ConfigError("call hybridep_rt.init() first")
    return _current


def fail(reason: str) -> None:
    """Tell all workers of all DCs that this one failed, in one line; waits at most a second. No-op before `init`."""
    if _current is not None:
        atexit.unregister(_current.shutdown)
        _current.fail(reason)


def _join(environment: Environment, codec: str, staleness: int, replan: int) -> Runtime:
    settings = environment.settings
    topology = load(settings.topology)
    dc = topology.dc_index(environment.dc)
    address = Address(dc, environment.worker)
    layout = Layout(topology.workers_per_dc)
    rung = parse_rung(settings.codecs or topology.codec or codec)
    chunks = settings.chunks or 1
    metrics = Metrics(Recorder(SPANS_MAX) if settings.trace else None)
    digest = topology.digest()
    job = Job(topology.cluster, digest, settings.epoch, settings.run_token)
    emulated = _emulated(settings, topology)
    plans = TopologyPlan(
        parse_plan_spec(settings.plan),
        topology,
        chunks,
        settings.epoch,
        None if emulated is None else emulated.flops_per_s,
        load_calibration(settings.calibration) if settings.calibration else None,
        None if settings.memory_gb is None else settings.memory_gb * 1e9,
    )
    link = WorkerLink.connect(
        environment.endpoint, address, job, topology.dc_names, settings.timeouts, Limits(), metrics
    )

    def make_site() -> SiteGroup:
        datacenter = topology.datacenters[dc]
        _use_loopback(datacenter)
        return open_site(
            link,
            datacenter.workers,
            host=datacenter.hosts[0].address or "127.0.0.1",
            dc_name=datacenter.name,
            timeout_s=settings.timeouts.operation_s,
        )

    runtime = Runtime(
        address=address,
        layout=layout,
        dc_names=topology.dc_names,
        make_site=make_site,
        wan=link,
        plans=plans,
        topology_digest=digest,
        rung=rung,
        chunks=chunks,
        staleness=next(n for n in (settings.staleness, topology.staleness, staleness) if n is not None),
        trace_path=settings.trace,
        metrics=metrics,
        emulated=emulated,
    )
    every = next(n for n in (settings.replan, topology.replan, replan) if n is not None)
    if every:
        Replanner(runtime, plans, every)
    return runtime


def _emulated(settings: Settings, topology: Topology) -> EmulatedCompute | None:
    flops_per_s = settings.emulate_compute_flops_per_s or topology.emulate_compute_flops_per_s
    return None if flops_per_s is None else EmulatedCompute(flops_per_s)


def _use_loopback(datacenter: Datacenter) -> None:
    """gloo picks an interface by the host's name unless told; on one host, loopback is right."""
    if len(datacenter.hosts) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _alone(rung: Rung) -> Runtime:
    topology: Topology = parse(_ALONE, "<one worker>")
    address = Address(0, 0)
    wan = MemoryWan(topology.workers_per_dc, dc_names=topology.dc_names)
    return Runtime(
        address=address,
        layout=Layout(topology.workers_per_dc),
        dc_names=topology.dc_names,
        make_site=SoloSite,
        wan=wan.port(address),
        plans=TopologyPlan(parse_plan_spec("ep"), topology, 1, 0),
        rung=rung,
        metrics=wan.metrics[address],
    )
