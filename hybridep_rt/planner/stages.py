"""Layers' times laid out by stage, as the schedule reads them. Pure.

[..., x, s] is the link from DC x to DC x - 1 - s (mod D), for s in 0..D-2. "Visitors" of x are the links *to* x, from
DC x - 1 - s: in that order a DC serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridep_rt.planner.job import Job
from hybridep_rt.planner.layer_times import LayerTimes, Way
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.site_plan import Flags


class Stages:
    """Translates between [source, target] and stages."""

    def __init__(self, dcs: int) -> None:
        here, stage = np.arange(dcs)[:, None], np.arange(dcs - 1)[None, :]
        other = (here - 1 - stage) % dcs
        self._dcs = dcs
        self._other = other
        self._of = (here * dcs + other).ravel()
        self._to = (other * dcs + here).ravel()
        self._visitors = (other * (dcs - 1) + (other - 1 - here) % dcs).ravel()

    def of(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """[P,D,D] -> links out of each DC, by stage."""
        return self._take(matrix, self._of)

    def to(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """[P,D,D] -> links into each DC, in the order of its visitors."""
        return self._take(matrix, self._to)

    def visitors(self, staged_links: Array) -> Array:
        """Links by stage -> the same links as their targets see them."""
        return self._take(staged_links, self._visitors)

    def targets(self, values: Array) -> Array:
        """[P,D] -> by stage, the value of each link's target."""
        return values[:, self._other]

    def _take(self, values: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
        return values.reshape(len(values), -1)[:, index].reshape(len(values), self._dcs, self._dcs - 1)


@dataclass(frozen=True, slots=True, eq=False)
class StagedWay:
    """One exchange. By stage: `sends`, `answers` (to a visitor of that stage), `out_s`, `back_s`, `wire_s` of both.
    [P, D]: `up_s`, `down_s`: seconds of the DC's uplink and downlink with all of it.

    [P, D, chunks * (D-1)], visitors in their order: `lead` (see `events`), `total_s` running sum of their compute.
    [P, D]: `own_s`, `visitors_s`: compute.
    """

    sends: Flags
    answers: Flags
    any_visits: bool
    out_s: Array
    back_s: Array
    wire_s: Array
    up_s: Array
    down_s: Array
    lead: Array
    total_s: Array
    own_s: Array
    visitors_s: Array
    encode_s: Array
    decode_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class StagedOnce:
    """What is sent once per step, weights or gradients: by stage where and how long, and [P, D] likewise."""

    sent: Flags
    ups: Flags
    downs: Flags
    link_s: Array
    up_s: Array
    down_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayer:
    """As `LayerTimes`, by stage."""

    forward: StagedWay
    backward: StagedWay
    weights: StagedOnce
    weights_encode_s: Array
    weights_decode_s: Array
    gradients: StagedOnce
    gradients_encode_s: Array
    gradients_decode_s: Array
    has_copies: bool


def staged(job: Job, layers: Sequence[LayerTimes]) -> list[StagedLayer]:
    """Each distinct layer is laid out once."""
    stages = Stages(job.layout.dcs)
    known = {id(times): times for times in layers}
    laid_out = {key: _layer(job, stages, times) for key, times in known.items()}
    return [laid_out[id(times)] for times in layers]


def _layer(job: Job, stages: Stages, times: LayerTimes) -> StagedLayer:
    return StagedLayer(
        forward=_way(job, stages, times.forward),
        backward=_way(job, stages, times.backward),
        weights=_once(job, stages, times.weights_bytes, times.weights_s),
        weights_encode_s=times.weights_encode_s,
        weights_decode_s=times.weights_decode_s,
        gradients=_once(job, stages, times.gradients_bytes, times.gradients_s),
        gradients_encode_s=times.gradients_encode_s,
        gradients_decode_s=times.gradients_decode_s,
        has_copies=times.has_copies,
    )


def _once(job: Job, stages: Stages, sent_bytes: Array, wire_s: Array) -> StagedOnce:
    up, down = sent_bytes.sum(-1), sent_bytes.sum(-2)
    return StagedOnce(
        sent=stages.of(sent_bytes) > 0,
        ups=up > 0,
        downs=down > 0,
        link_s=stages.of(wire_s),
        up_s=up / job.network.uplink,
        down_s=down / job.network.downlink,
    )


def _way(job: Job, stages: Stages, way: Way) -> StagedWay:
    came = stages.to(way.visits)
    total_s, lead = _visitors(job, stages, way, came)
    out_s, back_s = stages.of(way.out_s), stages.of(way.back_s)
    here = np.arange(job.layout.dcs)
    return StagedWay(
        sends=stages.of(way.visits),
        answers=came,
        any_visits=bool(came.any()),
        out_s=out_s,
        back_s=back_s,
        wire_s=out_s + back_s,
        up_s=(way.out_bytes + way.back_bytes).sum(-1) / job.network.uplink,
        down_s=(way.out_bytes + way.back_bytes).sum(-2) / job.network.downlink,
        lead=lead,
        total_s=total_s,
        own_s=way.compute_s[:, here, here] + job.compute.exchange_s,
        visitors_s=total_s[:, :, -1] if total_s.shape[-1] else np.zeros(total_s.shape[:2]),
        encode_s=way.encode_s,
        decode_s=way.decode_s,
    )


def _visitors(job: Job, stages: Stages, way: Way, came: Flags) -> tuple[Array, Array]:
    """Chunk after chunk, within each the visitors in their order."""
    chunks, fixed_s = job.chunks, job.compute.exchange_s
    each = np.where(came, stages.to(way.compute_s) / chunks + fixed_s, 0.0)
    total_s = np.tile(each, (1, 1, chunks)).cumsum(-1)
    wire_s, delay_s = stages.to(way.out_s), stages.to(job.network.delay_s[None])
    travel = [np.where(came, wire_s * (chunk + 1) / chunks + delay_s, -np.inf) for chunk in range(chunks)]
    return total_s, np.concatenate(travel, axis=-1) - (total_s - np.tile(each, (1, 1, chunks)))
