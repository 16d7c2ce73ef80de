"""Volumes of one layer under a plan -> seconds on each link and at each DC. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep_rt.planner.economics import CHOICE_BACKWARD_BYTES, CHOICE_FORWARD_BYTES
from hybridep_rt.planner.job import Job
from hybridep_rt.planner.network import Array
from hybridep_rt.planner.site_plan import Flags
from hybridep_rt.planner.volumes import Volumes


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One exchange there and back, per micro-batch: bytes and wire seconds [..., source, target], compute likewise.

    `compute_s`: of source's tokens at target, with the codec's time where these differ. [..., D]: `encode_s` of what a
    DC dispatches, `decode_s` of the answers. `visits`: whether source has any tokens at target. `back` is
    [..., target of the way out, its source].
    """

    visits: Flags
    out_bytes: Array
    back_bytes: Array
    out_s: Array
    back_s: Array
    compute_s: Array
    encode_s: Array
    decode_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """One layer: its two exchanges, and once per step its weights out and gradients home [..., source, target]."""

    forward: Way
    backward: Way
    weights_bytes: Array
    weights_s: Array
    weights_encode_s: Array
    weights_decode_s: Array
    gradients_bytes: Array
    gradients_s: Array
    gradients_encode_s: Array
    gradients_decode_s: Array
    has_copies: bool


def token_bytes(job: Job, layer: int, found: Volumes) -> tuple[Array, Array, Array]:
    """[..., token's DC, expert's DC] per micro-batch: dispatch, a vector per row, and that with gate gradients."""
    here = np.arange(job.layout.dcs)
    vectors = found.rows * (job.work.layers[layer].hidden * job.work.token_bytes)
    vectors[..., here, here] = 0.0
    choices = found.choices.copy()
    choices[..., here, here] = 0.0
    return vectors + choices * CHOICE_FORWARD_BYTES, vectors, vectors + choices * CHOICE_BACKWARD_BYTES


def copied_bytes(job: Job, layer: int, found: Volumes) -> tuple[Array, Array]:
    """[..., source, target] per step: weights and gradients."""
    parameters = job.work.layers[layer].parameters_per_expert
    returned = np.swapaxes(found.copies, -1, -2)
    return found.copies * (parameters * job.work.weight_bytes), returned * (parameters * job.work.gradient_bytes)


def layer_times(job: Job, layer: int, found: Volumes) -> LayerTimes:
    """Of the plans that `found` has as leading axes."""
    shape, work, compute = job.work.layers[layer], job.work, job.compute
    out, back, answer = token_bytes(job, layer, found)
    weights, gradients = copied_bytes(job, layer, found)
    coded = back / work.token_bytes * compute.token_codec_s if work.token_bytes else np.zeros_like(back)
    workers = np.array(job.layout.workers_per_dc, float)
    weight_s, gradient_s = (
        shape.parameters_per_expert * each for each in (compute.weight_codec_s, compute.gradient_codec_s)
    )
    returned = found.copies.sum(-1) / workers
    # A DC's own tokens are one batch, those of another as many as there are chunks.
    batches = np.where(np.eye(job.layout.dcs, dtype=bool), 1, job.chunks) * found.visits
    forward_s = found.compute_s + batches * compute.expert_s
    backward_s = found.compute_s * compute.backward_factor + batches * compute.expert_backward_s
    return LayerTimes(
        _way(job, forward_s, out, back, coded),
        _way(job, backward_s, back, answer, coded),
        weights_bytes=weights,
        weights_s=job.network.wire_s(weights),
        weights_encode_s=found.published / workers * weight_s,
        weights_decode_s=found.held * weight_s + found.spread_in_s,
        gradients_bytes=gradients,
        gradients_s=job.network.wire_s(gradients),
        gradients_encode_s=found.held * gradient_s + found.spread_in_s,
        gradients_decode_s=returned * gradient_s,
        has_copies=bool(found.copies.any()),
    )


def _way(job: Job, compute_s: Array, out: Array, back: Array, coded_s: Array) -> Way:
    """`coded_s`: of a DC's workers together, for one encoding. Visitors are decoded, computed and encoded again."""
    home = np.swapaxes(back, -1, -2)
    workers = np.array(job.layout.workers_per_dc, float)
    own_s = coded_s.sum(-1) / workers
    return Way(
        visits=out > 0,
        out_bytes=out,
        back_bytes=home,
        out_s=job.network.wire_s(out),
        back_s=job.network.wire_s(home),
        compute_s=compute_s + 2 * coded_s / workers,
        encode_s=own_s,
        decode_s=own_s,
    )
