"""The homes' own weights at every copy, to see what coded copies cost: beside the streams, which go on untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from hybridep_rt.codecs.buffers import as_bytes, as_tensor
from hybridep_rt.moe.tables import LayerTables
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.transport.ports import SiteGroup, WanPort


def exact_copies(
    tables: LayerTables,
    shapes: Sequence[tuple[int, int]],
    parameters: Mapping[int, Sequence[torch.nn.Parameter]],
    *,
    like: torch.Tensor,
    site: SiteGroup,
    wan: WanPort,
    at: Position,
) -> dict[int, list[torch.Tensor]]:
    """Tensors of the experts that this worker has copies of, as their homes have them. All workers call it at once."""
    channel, sizes = f"exact/{at.layer}", [prod(shape) for shape in shapes]
    flat = {e: torch.cat([p.detach().reshape(-1) for p in tensors]) for e, tensors in parameters.items()}
    for expert in tables.homes:
        for to in tables.subscribers[expert]:
            wan.send(to, channel, at._replace(chunk=expert), [as_bytes(flat[expert])], traffic=Traffic.EXPERTS)
    for expert in tables.gateway_of:
        message = wan.receive(tables.home_of[expert], channel, at._replace(chunk=expert))
        flat[expert] = as_tensor(message.payload, like.dtype, (sum(sizes),)).to(like.device)
    if tables.site_spreads:
        nothing = like.new_empty(0)
        parcels = [(torch.cat([nothing, *(flat[e] for e in experts)]),) for experts in tables.weight_spread]
        for experts, (values,) in zip(tables.weight_gather, site.exchange(at, parcels), strict=True):
            flat.update(zip(experts, values.split(sum(sizes)), strict=False))
    return {
        expert: [part.view(shape) for part, shape in zip(flat[expert].split(sizes), shapes, strict=True)]
        for expert in tables.held
        if expert not in parameters
    }
