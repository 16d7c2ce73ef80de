"""What was measured at the sites themselves, and how it replaces what topology and model only say. Pure.

Without a measurement a link carries what TCP leaves of its rate (`TCP_SHARE`), and codecs take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.job import Compute
from topology.model import TCP_SHARE, Datacenter, Link, LinkTable, Topology


class Figure(NamedTuple):
    """The median of several measurements, the least and the most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Figure:
        """Of samples of one quantity."""
        values = sorted(samples)
        return cls(median(values), values[0], values[-1])


class SiteFigures(NamedTuple):
    """One DC, its slowest worker. All in SI units, forward.

    `gemm_flops_per_s`: of experts at the workload's shapes. `backward_factor`: time of their backward against forward.
    `expert_s`, `expert_backward_s`: of each expert that a batch needs, however few its tokens are, beside those.
    `pre_expert_s`: per token, of a layer in front of its experts. `exchange_s`: fixed cost of a batch that the DC
    computes. `update_s`: per parameter, of an optimizer step and what goes with it. `inside_bytes_per_s`: of a worker
    in an all-to-all inside the DC; None where there is only one.
    """

    gemm_flops_per_s: Figure
    backward_factor: Figure
    expert_s: Figure
    expert_backward_s: Figure
    pre_expert_s: Figure
    exchange_s: Figure
    update_s: Figure
    inside_bytes_per_s: Figure | None = None


class LinkFigures(NamedTuple):
    """One direction between two DCs, while the other one was as busy: payload bytes per second, and the round trip."""

    goodput_bytes_per_s: Figure
    rtt_s: Figure


class CodecFigures(NamedTuple):
    """Seconds per element."""

    encode_s: Figure
    decode_s: Figure


@dataclass(frozen=True, slots=True)
class Calibration:
    """By name of the DC, by (source, target), and by KIND=CODEC. Whatever is missing was not measured.

    `date`: ISO 8601. `workload`: the model at whose shapes GeMMs were measured.
    """

    cluster: str
    date: str
    workload: str
    sites: Mapping[str, SiteFigures] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkFigures] = field(default_factory=dict)
    codecs: Mapping[str, CodecFigures] = field(default_factory=dict)

    def check(self, topology: Topology) -> None:
        """Raise PlanError where it is of another cluster, or names DCs that aren't there."""
        if self.cluster != topology.cluster:
            raise PlanError(f"the calibration is of cluster {self.cluster!r}, the topology is {topology.cluster!r}")
        named = {*self.sites, *(name for pair in self.links for name in pair)}
        for name in sorted(named - {*topology.dc_names}):
            raise PlanError(f"the calibration names DC {name!r}, which the topology doesn't have")


def usable(topology: Topology, calibration: Calibration | None = None) -> Topology:
    """The topology with rates that payloads get: measured, else what TCP leaves. For planning only.

    Limits of uplinks and downlinks aren't measured. Raises PlanError where the calibration is another cluster's.
    """

    def limit(rate: float | None) -> float | None:
        return None if rate is None else rate * TCP_SHARE

    def with_limits(dc: Datacenter) -> Datacenter:
        up, down = limit(dc.uplink_bytes_per_s), limit(dc.downlink_bytes_per_s)
        return replace(dc, uplink_bytes_per_s=up, downlink_bytes_per_s=down)

    measured = {}
    if calibration is not None:
        calibration.check(topology)
        measured = {
            (topology.dc_index(source), topology.dc_index(target)): found
            for (source, target), found in calibration.links.items()
        }
    links = _each(topology, lambda link: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * TCP_SHARE))
    table = {
        pair: replace(links[pair], bandwidth_bytes_per_s=found.goodput_bytes_per_s.median, rtt_s=found.rtt_s.median)
        for pair, found in measured.items()
    }
    return replace(
        topology,
        datacenters=tuple(map(with_limits, topology.datacenters)),
        links=LinkTable(links.count, {**links.special, **table}, links.common),
    )


def _each(topology: Topology, change: Callable[[Link], Link]) -> LinkTable:
    links = topology.links
    assert isinstance(links, LinkTable)  # as every Topology makes of its links
    common = None if links.common is None else change(links.common)
    return LinkTable(links.count, {pair: change(link) for pair, link in links.special.items()}, common)


def measured_compute(
    compute: Compute, calibration: Calibration, topology: Topology, specs: Mapping[str, str] | None = None
) -> Compute:
    """`compute` with what was measured. `specs`: the codec of "tokens", "weights" and "gradients", by name."""
    changes: dict[str, float | tuple[float, ...]] = dict(_codec_times(calibration, specs or {}))
    sites = calibration.sites
    if all(name in sites for name in topology.dc_names):
        found = [sites[name] for name in topology.dc_names]
        counts = zip(found, topology.workers_per_dc, strict=True)
        changes["flops_per_s"] = tuple(each.gemm_flops_per_s.median for each, count in counts for _ in range(count))
        changes["backward_factor"] = median(each.backward_factor.median for each in found)
        changes["expert_s"] = max(each.expert_s.median for each in found)
        changes["expert_backward_s"] = max(each.expert_backward_s.median for each in found)
        changes["exchange_s"] = max(each.exchange_s.median for each in found)
        changes["update_s_per_parameter"] = max(each.update_s.median for each in found)
        changes["pre_expert_flops_per_token"] = 0.0
        changes["pre_expert_s_per_token"] = max(each.pre_expert_s.median for each in found)
        inside = [each.inside_bytes_per_s.median for each in found if each.inside_bytes_per_s is not None]
        if inside:
            changes["inside_bytes_per_s"] = min(inside)
    return replace(compute, **changes)  # type: ignore[arg-type]


def _codec_times(calibration: Calibration, specs: Mapping[str, str]) -> dict[str, float]:
    """The planner has one time per element for both ways: their mean."""
    names = {"tokens": "token_codec_s", "weights": "weight_codec_s", "gradients": "gradient_codec_s"}
    return {
        names[kind]: (found.encode_s.median + found.decode_s.median) / 2
        for kind, spec in specs.items()
        if kind in names and (found := calibration.codecs.get(f"{kind}={spec}")) is not None
    }


def slowest(found: Sequence[SiteFigures]) -> SiteFigures:
    """A DC is as fast as its slowest worker; the spread is that of all its workers."""

    def worst(figures: Sequence[Figure], pick: Callable[[Iterable[float]], float]) -> Figure:
        middle = pick(each.median for each in figures)
        return Figure(middle, min(each.low for each in figures), max(each.high for each in figures))

    inside = [each.inside_bytes_per_s for each in found if each.inside_bytes_per_s is not None]
    return SiteFigures(
        worst([each.gemm_flops_per_s for each in found], min),
        worst([each.backward_factor for each in found], max),
        worst([each.expert_s for each in found], max),
        worst([each.expert_backward_s for each in found], max),
        worst([each.pre_expert_s for each in found], max),
        worst([each.exchange_s for each in found], max),
        worst([each.update_s for each in found], max),
        worst(inside, min) if inside else None,
    )
