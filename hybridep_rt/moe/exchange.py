"""Dispatch and combine of one layer over all DCs, forward and backward, as one autograd function.

Order of one forward (the backward mirrors it): tokens for other DCs leave at once, in chunks and staged by
destination; the DC's own tokens are computed while those travel; then the other DCs' chunks are computed as they
arrive, in a fixed order, and answered; last, the answers to this DC's tokens are added up, in the order of the DCs.
The order of collectives inside the DC is therefore the same at all its workers, whatever arrives when.

Shapes: T tokens of this worker, H hidden, K experts per token, E experts, P (row, expert, weight) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from hybridep_rt.codecs.buffers import as_bytes
from hybridep_rt.codecs.codec import Codec
from hybridep_rt.moe.spread import Batch, Spread, spread_backward, spread_forward
from hybridep_rt.moe.tables import LayerTables
from hybridep_rt.moe.wire import pack_batch, unpack_batch, unpack_rows, unpack_rows_and_pairs
from hybridep_rt.planner.plan import Layout
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.trace import Recorder
from hybridep_rt.transport.ports import SiteGroup, WanPort


@dataclass(frozen=True, slots=True)
class Sent:
    """One chunk of this worker's tokens at another DC: which rows and (token, choice) pairs it has."""

    to: Address
    chunk: int
    rows: torch.Tensor
    pairs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Visited:
    """One chunk of another DC's tokens that was computed here: who sent how many rows and pairs of it."""

    chunk: int
    sources: tuple[Address, ...]
    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    spread: Spread
    round: int


@dataclass(slots=True)
class Trace:
    """What the backward pass of one forward needs."""

    position: Position
    local: Spread
    local_pairs: torch.Tensor
    sent: list[Sent]
    visited: list[Visited]
    shape: tuple[int, int]
    choices: int


class TokenCodecs(NamedTuple):
    """Of the tokens and their results, and of the gradients that come back for both."""

    forward: Codec
    backward: Codec


class Experts(Protocol):
    """The experts that this worker computes."""

    def refresh(self) -> None:
        """Bring the copies up to date; a collective of the DC where its plan moves weights inside it."""

    def compute(
        self, x_NH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums [N,H] over the pairs of each row."""


class Exchange:
    """The executor of one layer at one worker. Knows only the plan's tables and the two ports."""

    def __init__(
        self,
        tables: LayerTables,
        layout: Layout,
        site: SiteGroup,
        wan: WanPort,
        *,
        chunks: int,
        codecs: TokenCodecs,
        device: torch.device,
        trace: Recorder,
    ) -> None:
        self.trace = trace
        self._tables = tables
        self._layout = layout
        self._site = site
        self._wan = wan
        self._chunks = chunks
        self.codecs = codecs
        self._route_E = torch.tensor(tables.route, device=device)
        self._serve_E = torch.tensor(tables.serve, device=device)

    def forward(
        self, x_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor, experts: Experts, position: Position
    ) -> tuple[torch.Tensor, Trace]:
        """sum_k weight[t,k] * expert_{index[t,k]}(x[t]) for every token, [T,H]."""
        tokens, choices = index_TK.shape
        expert_P = index_TK.reshape(-1)
        weight_P = weight_TK.reshape(-1)
        row_P = torch.arange(tokens, device=x_TH.device).repeat_interleave(choices)
        route_P = self._route_E[expert_P]

        def batch(pairs: torch.Tensor) -> tuple[torch.Tensor, Batch]:
            rows, row_in_batch = torch.unique_consecutive(row_P[pairs], return_inverse=True)
            return rows, Batch(x_TH.index_select(0, rows), row_in_batch, expert_P[pairs], weight_P[pairs])

        sent = []
        for chunk in range(self._chunks):
            first, last = tokens * chunk // self._chunks, tokens * (chunk + 1) // self._chunks
            for dc in self._tables.outgoing:
                pairs = (route_P[first * choices : last * choices] == dc).nonzero().squeeze(1) + first * choices
                rows, content = batch(pairs)
                to = Address(dc, self._layout.landing(self._tables.me.worker, dc))
                payload, counts = pack_batch(content, self.codecs.forward)
                at = position._replace(phase=Phase.DISPATCH, chunk=chunk)
                self._wan.send(to, "dispatch", at, payload, traffic=Traffic.TOKENS, counts=counts)
                sent.append(Sent(to, chunk, rows, pairs))

        experts.refresh()
        local_pairs = (route_P == self._tables.me.dc).nonzero().squeeze(1)
        local = Batch(x_TH, row_P[local_pairs], expert_P[local_pairs], weight_P[local_pairs])
        out_TH, local_spread = spread_forward(
            self._site, self._serve_E, experts.compute, local, position._replace(phase=Phase.DISPATCH, chunk=0)
        )
        visited = self._serve_visitors(x_TH, experts, position)
        for part in sorted(sent, key=lambda part: (part.to, part.chunk)):
            at = position._replace(phase=Phase.COMBINE, chunk=part.chunk)
            answer = self._wan.receive(part.to, "combine", at)
            out_TH.index_add_(0, part.rows, unpack_rows(answer, self.codecs.forward, len(part.rows), x_TH))
        return out_TH, Trace(position, local_spread, local_pairs, sent, visited, (tokens, x_TH.shape[1]), choices)

    def backward(self, trace: Trace, grad_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the tokens [T,H] and of the gate weights [T,K]."""
        position, (tokens, _), choices = trace.position, trace.shape, trace.choices
        for part in trace.sent:
            at = position._replace(phase=Phase.COMBINE_GRADIENT, chunk=part.chunk)
            payload = [self.codecs.backward.encode(grad_TH.index_select(0, part.rows))]
            self._wan.send(part.to, "combine-gradient", at, payload, traffic=Traffic.TOKENS, counts=(len(part.rows),))
        grad_x, local_weights = spread_backward(self._site, trace.local, grad_TH, position._replace(chunk=0))
        grad_weight_P = local_weights.new_zeros(tokens * choices)
        grad_weight_P[trace.local_pairs] = local_weights
        self._return_visitors(trace, grad_TH)
        for part in sorted(trace.sent, key=lambda part: (part.to, part.chunk)):
            at = position._replace(phase=Phase.DISPATCH_GRADIENT, chunk=part.chunk)
            answer = self._wan.receive(part.to, "dispatch-gradient", at)
            rows, pairs = unpack_rows_and_pairs(answer, self.codecs.backward, len(part.rows), len(part.pairs), grad_TH)
            grad_x.index_add_(0, part.rows, rows)
            grad_weight_P[part.pairs] = pairs.to(grad_weight_P.dtype)
        return grad_x, grad_weight_P.reshape(tokens, choices)

    def _serve_visitors(self, like: torch.Tensor, experts: Experts, position: Position) -> list[Visited]:
        visited: list[Visited] = []
        for chunk in range(self._chunks):
            at = position._replace(phase=Phase.DISPATCH, chunk=chunk)
            for dc, workers in self._tables.incoming:
                sources = tuple(Address(dc, worker) for worker in workers)
                batches = [
                    unpack_batch(
                        self._wan.receive(source, "dispatch", at), self.codecs.forward, like, len(self._tables.route)
                    )
                    for source in sources
                ]
                number = len(visited) + 1
                y_NH, spread = spread_forward(
                    self._site, self._serve_E, experts.compute, _join(batches, like), at._replace(chunk=number)
                )
                rows = tuple(len(batch.x_NH) for batch in batches)
                back = position._replace(phase=Phase.COMBINE, chunk=chunk)
                for source, part in zip(sources, y_NH.split(rows) if rows else (), strict=True):
                    payload = [self.codecs.forward.encode(part)]
                    self._wan.send(source, "combine", back, payload, traffic=Traffic.TOKENS, counts=(len(part),))
                pairs = tuple(len(batch.row_P) for batch in batches)
                visited.append(Visited(chunk, sources, rows, pairs, spread, number))
        return visited

    def _return_visitors(self, trace: Trace, like: torch.Tensor) -> None:
        for visit in trace.visited:
            at = trace.position._replace(phase=Phase.COMBINE_GRADIENT, chunk=visit.chunk)
            grads = [
                unpack_rows(self._wan.receive(source, "combine-gradient", at), self.codecs.backward, rows, like)
                for source, rows in zip(visit.sources, visit.rows, strict=True)
            ]
            grad_NH = torch.cat([*grads, like.new_empty((0, like.shape[1]))])
            grad_x, grad_weight = spread_backward(self._site, visit.spread, grad_NH, at._replace(chunk=visit.round))
            if not visit.sources:
                continue
            back = trace.position._replace(phase=Phase.DISPATCH_GRADIENT, chunk=visit.chunk)
            parts = zip(visit.sources, grad_x.split(visit.rows), grad_weight.split(visit.pairs), strict=True)
            for source, rows, pairs in parts:
                payload = [self.codecs.backward.encode(rows), as_bytes(pairs.to(like.dtype))]
                counts = (len(rows), len(pairs))
                self._wan.send(source, "dispatch-gradient", back, payload, traffic=Traffic.TOKENS, counts=counts)


def _join(batches: list[Batch], like: torch.Tensor) -> Batch:
    """One batch of all rows, in order; also for no batches at all (a worker where nobody lands)."""
    first_rows, rows = [], 0
    for batch in batches:
        first_rows.append(rows)
        rows += len(batch.x_NH)
    nothing = torch.empty(0, dtype=torch.int64, device=like.device)
    return Batch(
        torch.cat([*(batch.x_NH for batch in batches), like.new_empty((0, like.shape[1]))]),
        torch.cat([*(batch.row_P + first for batch, first in zip(batches, first_rows, strict=True)), nothing]),
        torch.cat([*(batch.expert_P for batch in batches), nothing]),
        torch.cat([*(batch.weight_P for batch in batches), like.new_empty(0)]),
    )


class ExchangeFunction(torch.autograd.Function):
    """Ties one forward of an `Exchange` to its backward. `done` is called when the backward has run."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        experts: Experts,
        position: Position,
        done: Callable[[], None],
        anchor: torch.Tensor,
        x_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
    ) -> torch.Tensor:
        """`anchor` requires grad, so that the backward runs at every worker even where no token does."""
        with exchange.trace.span("compute", f"forward of layer {position.layer}"):
            out_TH, ctx.trace = exchange.forward(x_TH, index_TK, weight_TK, experts, position)
        ctx.exchange, ctx.done = exchange, done
        return out_TH

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """One backward per forward: the saved activations are freed as they are used."""
        if ctx.trace is None:
            raise RuntimeError("a MoE layer's graph can be walked backwards once only")
        with ctx.exchange.trace.span("compute", f"backward of layer {ctx.trace.position.layer}"):
            grad_x, grad_weight = ctx.exchange.backward(ctx.trace, grads[0].contiguous())
        ctx.trace = None
        ctx.done()
        return None, None, None, None, None, grad_x, None, grad_weight
