"""Training over D datacenters of one worker each, as one process with the same losses: what codecs do to learning.

Every DC computes an expert's home on the exact weights and a copy on what came out of the weights' stream, which is the
same at all subscribers. Copies' gradients go through one stream per DC and are added up at the home. Tokens that cross
are coded on each of their four ways. Codecs, router, experts and routes are the runtime's own.

Shapes: N tokens of all DCs in the order of the DCs, equally many each; H hidden, K choices, P (row, expert) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

import hybridep_rt
from hybridep_rt.codecs.codec import Codec, Codecs, follow, make_codec
from hybridep_rt.codecs.feedback import Feedback
from hybridep_rt.codecs.ladder import Rung
from hybridep_rt.codecs.outgoing import Outgoing
from hybridep_rt.codecs.shared import SharedResidual
from hybridep_rt.codecs.update import Step, Update, update_and_encode
from hybridep_rt.moe.experts import KINDS, weighted_sum
from hybridep_rt.moe.layer import MoELayer
from hybridep_rt.moe.moments import HomeMoment
from hybridep_rt.planner.plan import LayerPlan


@dataclass(slots=True)
class Sent:
    """Bytes of one step: all payloads of weights to one subscriber, and of gradients, of all DCs."""

    weights: int = 0
    gradients: int = 0


class _Cross(torch.autograd.Function):
    """Rows as their receiver decodes them, and their gradients as the sender does."""

    @staticmethod
    def forward(ctx: Any, rows_NH: torch.Tensor, codec: Codec, backward: Codec) -> torch.Tensor:
        ctx.codec = backward
        return _decoded(codec, rows_NH)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _decoded(ctx.codec, grads[0].contiguous()), None, None


class _CopyLinear(torch.autograd.Function):
    """x [N,H] by a copy's weights; the weights' gradients of each DC's rows go to `sinks[dc]`."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: torch.Tensor, weight: torch.Tensor, rows: list[int], sinks: list[torch.Tensor | None]
    ) -> torch.Tensor:
        ctx.save_for_backward(x_NH, weight)
        ctx.rows, ctx.sinks = rows, sinks
        return nn.functional.linear(x_NH, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_NH, weight = ctx.saved_tensors
        parts = zip(grads[0].split(ctx.rows), x_NH.split(ctx.rows), strict=True)
        for dc, (grad, x) in enumerate(parts):
            if len(x):
                ctx.sinks[dc] = grad.t() @ x
        return grads[0] @ weight, None, None, None


class _Copy:
    """One tensor of one expert: its stream to the subscribers, and a stream home from each of them."""

    def __init__(self, home: nn.Parameter, subscribers: list[int], dcs: int, rung: Rung) -> None:
        self.home = home
        self.value = home.detach().clone()
        self.gradients: list[torch.Tensor | None] = [None] * dcs
        self._dcs = dcs
        self._received = torch.empty_like(self.value)
        self._codecs = rung.codecs_at(0)
        self._weights = _ends(self._codecs.weights)
        self._outgoing = {dc: Outgoing(self._codecs.gradients, rung.codecs.gradients) for dc in subscribers}
        self._take_gradients(self._codecs.gradients)

    def change(self, codecs: Codecs) -> None:
        """Use other codecs from the next `publish` and the next gradient on."""
        if codecs.weights != self._codecs.weights:
            before, self._weights = self._weights, _ends(codecs.weights)
            for end, other in zip(self._weights, before, strict=True):
                follow(end, other)
        if codecs.gradients != self._codecs.gradients:
            for outgoing in self._outgoing.values():
                outgoing.change(codecs.gradients)
            incoming = self._incoming
            self._take_gradients(codecs.gradients)
            for dc, codec in self._incoming.items():
                follow(codec, incoming[dc])
        self._codecs = codecs

    def share(self, shared: torch.Tensor, version: int) -> None:
        """Of `sr`: what the next payloads are told apart from."""
        for codec in self._weights:
            assert isinstance(codec, SharedResidual)
            codec.set_shared(shared, version)

    def publish(self, update: Update | None) -> int:
        """Bytes to each subscriber."""
        sender, receiver = self._weights
        payload = memoryview(update_and_encode(sender, self.home, update))
        receiver.decode(payload, self.value)
        return payload.nbytes

    def collect(self) -> int:
        """Make the home's gradient the mean over the DCs; bytes from all subscribers."""
        nbytes = 0
        if self._moment is not None and self.home.grad is not None:
            self._moment.observe(self.home.grad)
        total = torch.zeros_like(self.home) if self.home.grad is None else self.home.grad
        for dc, outgoing in self._outgoing.items():
            gradient, self.gradients[dc] = self.gradients[dc], None
            if gradient is None and outgoing.carries:
                gradient = torch.zeros_like(self.home)
            if gradient is not None:
                payload = memoryview(outgoing.encode(gradient))
                self._incoming[dc].decode(payload, self._received)
                total += self._received
                nbytes += payload.nbytes
        self.home.grad = total.div_(self._dcs)
        if self._moment is not None:
            self._moment.add_up(list(self._incoming.values()), self._dcs, self.home.grad)
        return nbytes

    def moment(self) -> torch.Tensor | None:
        """What Adam should divide by, where the gradient's own square says too little."""
        return None if self._moment is None else self._moment.of(self.home.grad)

    def _take_gradients(self, spec: str) -> None:
        self._incoming = {dc: make_codec(spec) for dc in self._outgoing}
        codec = make_codec(spec)
        own = codec.new_moment() if isinstance(codec, Feedback) else None
        self._moment = None if own is None else HomeMoment(own)


class EmulatedLayer(nn.Module):
    """Stands where a `MoELayer` of one worker alone stood, with its router and experts."""

    def __init__(
        self, moe: MoELayer, plan: LayerPlan, rung: Rung, *, expert: str, shared_every: int | None = None
    ) -> None:
        super().__init__()
        self.router = moe.router
        self.experts = moe.experts
        self.aux_loss = torch.zeros(())
        self.sent = Sent()
        self._aux_coefficient, self._z_coefficient = moe.aux_coefficient, moe.z_coefficient
        self._kind = KINDS[expert]
        self._shared_every = shared_every
        self._home = torch.tensor(plan.home)
        self._route = torch.tensor(plan.route)
        self.dcs = len(plan.route)
        self._tokens = [
            make_codec(spec, width=moe.shape.hidden) for spec in (rung.codecs.tokens, rung.codecs.backward_tokens)
        ]
        self._copies: dict[int, list[_Copy]] = {}
        for e, home in enumerate(plan.home):
            # From the home's successor on, as uplinks serve them: float32 sums of second moments depend on the order.
            others = [(home + ahead) % self.dcs for ahead in range(1, self.dcs)]
            subscribers = [dc for dc in others if plan.route[dc][e] == dc]
            if subscribers:
                self._copies[e] = [_Copy(p, subscribers, self.dcs, rung) for p in self._tensors(e)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]; in eval mode every expert is its home. `aux_loss` is the sum over the DCs."""
        x_NH = x.reshape(-1, x.shape[-1])
        if not self.training:
            index_NK, weight_NK, *_ = self.router(x_NH)
            return self._local(x_NH, index_NK, weight_NK).view_as(x)
        routed = [self.router(part) for part in x_NH.chunk(self.dcs)]
        index, weight, balance, z_loss = zip(*routed, strict=True)
        self.aux_loss = self._aux_coefficient * sum(balance) + self._z_coefficient * sum(z_loss)
        return self._spread(x_NH, torch.cat(index), torch.cat(weight)).view_as(x)

    def publish(self, number: int, step: Step | None = None) -> None:
        """After optimizer step `number`, which `step` makes; 0 is before the first: bring the copies up to date."""
        every = self._shared_every
        if every is not None and number % (every or number + 1) == 0:
            self._share(number, step)
        for copy in self._each_copy():
            self.sent.weights += copy.publish(step and step(copy.home, copy.moment()))

    def change(self, codecs: Codecs) -> None:
        """See `_Copy.change`."""
        for copy in self._each_copy():
            copy.change(codecs)

    def collect(self) -> None:
        """After a backward pass: experts' gradients become the mean over the DCs."""
        for copy in self._each_copy():
            self.sent.gradients += copy.collect()
        for e in self.experts.keys() - set(map(str, self._copies)):
            for p in self._tensors(int(e)):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(self.dcs)

    def copied_elements(self) -> int:
        """Values in the copies of one subscriber to all of them."""
        return sum(copy.value.numel() for copy in self._each_copy())

    def distance(self) -> float:
        """How far the copies are from the weights, as a part of the weights' norm."""
        pairs = [(copy.home.detach(), copy.value) for copy in self._each_copy()]
        far = sum(float((home - value).square().sum()) for home, value in pairs)
        return (far / max(sum(float(home.square().sum()) for home, _ in pairs), 1e-30)) ** 0.5

    def _each_copy(self) -> Iterable[_Copy]:
        return chain.from_iterable(self._copies.values())

    def _local(self, x_NH: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        row_P = torch.arange(len(x_NH)).repeat_interleave(index_NK.shape[1])
        held = {e: self._tensors(e) for e in range(len(self._home))}
        return weighted_sum(self._kind.apply, held, x_NH, row_P, index_NK.reshape(-1), weight_NK.reshape(-1))

    def _spread(self, x_NH: torch.Tensor, index_NK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        tokens, experts = len(x_NH), len(self._home)
        row_P = torch.arange(tokens).repeat_interleave(index_NK.shape[1])
        expert_P, weight_P = index_NK.reshape(-1), weight_NK.reshape(-1)
        dc_P = row_P * self.dcs // tokens
        at_P = self._route[dc_P, expert_P]
        crosses_P = at_P != dc_P
        # A token that crosses to a DC is one more row behind all tokens, whatever the number of its experts there.
        visits, visit_P = torch.unique((row_P * self.dcs + at_P)[crosses_P], return_inverse=True)
        visitor_V = visits // self.dcs
        slot_P = row_P.clone()
        slot_P[crosses_P] = tokens + visit_P
        order = torch.argsort(slot_P, stable=True)
        share_P = torch.where(at_P == self._home[expert_P], expert_P, expert_P + experts)
        rows_of = torch.bincount(share_P * self.dcs + dc_P, minlength=2 * experts * self.dcs)
        rows_of_share = rows_of.view(2 * experts, self.dcs).tolist()
        held: dict[int, Any] = {e: self._tensors(e) for e in range(experts)}
        held |= {experts + e: (copies, rows_of_share[experts + e]) for e, copies in self._copies.items()}
        x_RH = torch.cat([x_NH, _Cross.apply(x_NH[visitor_V], *self._tokens)])
        out_RH = weighted_sum(self._apply, held, x_RH, slot_P[order], share_P[order], weight_P[order])
        return out_RH[:tokens].index_add(0, visitor_V, _Cross.apply(out_RH[tokens:], *self._tokens))

    def _apply(self, held: Any, x_NH: torch.Tensor) -> torch.Tensor:
        if isinstance(held, list):
            return self._kind.apply(held, x_NH)
        (up, down), rows = held
        inner = nn.functional.gelu(_CopyLinear.apply(x_NH, up.value, rows, up.gradients))
        return _CopyLinear.apply(inner, down.value, rows, down.gradients)

    def _tensors(self, expert: int) -> list[nn.Parameter]:
        return [self.experts[str(expert)].get_parameter(name) for name in self._kind.names]

    def _share(self, number: int, step: Step | None) -> None:
        for update in (step and step(parameter, None) for parameter in self.experts.parameters()):
            if update is not None:
                update.run()
        for tensor in range(len(self._kind.names)):
            mean = torch.stack([self._tensors(e)[tensor].detach() for e in range(len(self._home))]).mean(0)
            for copies in self._copies.values():
                copies[tensor].share(mean if self._shared_every else torch.zeros_like(mean), number)


class EmulatedDCs:
    """The training of a model whose MoE layers are emulated."""

    def __init__(
        self,
        layers: Iterable[EmulatedLayer],
        optimizer: hybridep_rt.AdamW,
        parameters: Iterable[nn.Parameter],
        rung: Rung,
    ) -> None:
        self.layers = list(layers)
        experts = {id(parameter) for layer in self.layers for parameter in layer.experts.parameters()}
        self._parameters = list(parameters)
        self._dense = [parameter for parameter in self._parameters if id(parameter) not in experts]
        self._dcs = self.layers[0].dcs
        self._optimizer = optimizer
        self._rung = rung
        self._done = 0
        optimizer.publish_with(self._publish)
        self._publish(None)

    def step(self, loss: torch.Tensor, clip: float = math.inf) -> Sent:
        """Backward, update, and new copies; what was sent for it. `loss`: the mean over the DCs, without aux losses.

        `clip`: the largest norm of all gradients together.
        """
        (self._dcs * loss + sum(layer.aux_loss for layer in self.layers)).backward()
        for layer in self.layers:
            layer.sent = Sent()
            layer.collect()
        for parameter in self._dense:
            if parameter.grad is not None:
                parameter.grad.div_(self._dcs)
        if clip < math.inf:
            nn.utils.clip_grad_norm_(self._parameters, clip)
        self._done += 1
        for layer in self.layers:
            layer.change(self._rung.codecs_at(self._done))
        self._optimizer.step()
        self._optimizer.zero_grad()
        sent = [layer.sent for layer in self.layers]
        return Sent(sum(each.weights for each in sent), sum(each.gradients for each in sent))

    def _publish(self, step: Step | None) -> None:
        for layer in self.layers:
            layer.publish(self._done, step)


def _ends(spec: str) -> tuple[Codec, Codec]:
    return make_codec(spec), make_codec(spec)


def _decoded(codec: Codec, rows_NH: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(rows_NH)
    codec.decode(codec.encode(rows_NH), result)
    return result
