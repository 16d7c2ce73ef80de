"""The MoE layer that a model is built from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from hybridep_rt.codecs.codec import Codecs, make_codec
from hybridep_rt.codecs.record import Record
from hybridep_rt.codecs.update import Step
from hybridep_rt.errors import ConfigError
from hybridep_rt.metrics import CodecFigures
from hybridep_rt.moe.change import full_change, layer_change
from hybridep_rt.moe.exchange import Exchange, ExchangeFunction, TokenCodecs
from hybridep_rt.moe.experts import Tensors, expert_kind, expert_seed, initial_tensors
from hybridep_rt.moe.handover import Handover, layer_state, load_home_state, load_layer_state, part_of
from hybridep_rt.moe.holdings import Holdings
from hybridep_rt.moe.router import Router
from hybridep_rt.moe.tables import LayerTables, layer_tables
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.plan import LayerPlan
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.emulated import EmulatedCompute
from hybridep_rt.runtime.ownership import Ownership
from hybridep_rt.runtime.session import Runtime
from hybridep_rt.runtime.start import current


class MoELayer(nn.Module):
    """Top-k routed experts over all workers of all DCs, dropless. [..., hidden] -> [..., hidden].

    Only the experts homed at this worker are parameters here, named `experts.<global id>.<tensor>`. Their start depends
    on (seed, layer, global id) alone, so that every layout starts equal. After a forward, `aux_loss` is
    `aux_coefficient` * load-balancing loss + `z_coefficient` * z-loss of this worker's tokens: add it to your loss.

    `runtime`: default is the one that `hybridep_rt.init()` made.

    Raises ConfigError for sizes that make no sense.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        runtime: Runtime | None = None,
        expert: str = "swiglu",
        renormalise: bool = True,
        aux_coefficient: float = 0.01,
        z_coefficient: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(hidden, ffn, num_experts, top_k) < 1 or top_k > num_experts:
            raise ConfigError(
                f"a MoE layer needs sizes of at least 1 and top_k <= num_experts, not hidden={hidden}, ffn={ffn}, "
                f"num_experts={num_experts}, top_k={top_k}"
            )
        self._runtime = runtime = runtime or current()
        self._kind = expert_kind(expert)
        self._shapes = self._kind.shapes(hidden, ffn)
        self.shape = LayerShape(hidden, ffn, num_experts, top_k, sum(rows * columns for rows, columns in self._shapes))
        self._number, home = runtime.register(self, num_experts)
        self.router = Router(
            hidden, num_experts, top_k, renormalise=renormalise, seed=expert_seed(seed, self._number, -1)
        )
        self.experts = nn.ModuleDict()
        for e in (e for e in range(num_experts) if home[e] == runtime.rank):
            tensors = initial_tensors(self._kind, hidden, ffn, expert_seed(seed, self._number, e))
            self.experts[str(e)] = nn.ParameterDict(dict(zip(self._kind.names, tensors, strict=True)))
        self.aux_coefficient = aux_coefficient
        self.z_coefficient = z_coefficient
        self.aux_loss = torch.zeros(())
        self._plan: LayerPlan | None = None
        self._exchange: Exchange | None = None
        self._holdings: Holdings | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """sum over the top-k experts of gate weight * expert(token). All workers call it in the same order."""
        if self._exchange is None or self._holdings is None:
            raise ConfigError("call runtime.attach(model, optimizer) before the first forward")
        x_TH = x.reshape(-1, x.shape[-1])
        index_TK, weight_TK, balance, z_loss = self.router(x_TH)
        self.aux_loss = self.aux_coefficient * balance + self.z_coefficient * z_loss
        training = torch.is_grad_enabled()
        if training and self._runtime.routing_sample is not None:
            self._runtime.routing_sample.observe(self._number, index_TK)
        position = self._runtime.clock.forward(self._number, training=training)
        anchor = torch.zeros((), device=x.device, requires_grad=training)
        out_TH: torch.Tensor = ExchangeFunction.apply(  # type: ignore[no-untyped-call]
            self._exchange, self._holdings, position, self._after_backward, anchor, x_TH, index_TK, weight_TK
        )
        return out_TH.view_as(x)

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts homed here, by global id."""
        return list(self.experts.parameters())

    def bind(self, plan: LayerPlan) -> None:
        """Build this worker's executor for a plan; called by `attach`."""
        runtime = self._runtime
        tables = layer_tables(plan, runtime.layout, runtime.address)
        self._plan = plan
        self._holdings = Holdings(
            self._number,
            tables,
            self._kind.apply if runtime.emulated is None else partial(emulated_expert, runtime.emulated),
            self._shapes,
            self._homes(),
            like=self.router.weight.detach(),
            site=runtime.site,
            wan=runtime.wan,
            codecs=runtime.codecs,
            ahead=runtime.rung.codecs,
            collectives=runtime.collectives,
            background=runtime.background,
            trace=runtime.trace,
        )
        self._exchange = self._make_exchange(tables)

    def settle(self) -> None:
        """Wait for weights that are on their way. Raises ConfigError where gradients wait for the optimizer step."""
        if not self._bound.is_settled:
            raise ConfigError(
                f"layer {self._number} holds gradients of a backward pass that is not over: "
                "plans change between optimizer.step() and the next forward"
            )
        self._bound.settle()

    def hand_over(self, plan: LayerPlan, at: Position, ownership: Ownership) -> None:
        """Begin to change plans: send what is owed and the experts whose homes leave. Does not wait."""
        assert self._plan is not None
        runtime, at = self._runtime, at._replace(layer=self._number)
        change = layer_change(self._plan, plan, runtime.layout)
        self._plan, self._handover = plan, Handover(change, self._bound, runtime.address, runtime.wan, at)
        self._joining = layer_tables(change.joining, runtime.layout, runtime.address)
        self._handover.settle_debts()
        for move in self._handover.leaving:
            bank = self.experts.pop(str(move.expert))
            self._handover.send_expert(move, [bank.get_parameter(name) for name in self._kind.names], ownership)

    def take_over(self, at: Position, ownership: Ownership) -> None:
        """Wait for the experts whose homes are here now, and send the weights that new copies begin with."""
        assert self._plan is not None
        like, holdings, records = self.router.weight.detach(), self._bound, {}
        for move in self._handover.coming:
            tensors, records[move.expert] = self._handover.receive_expert(move, self._shapes)
            self._add_expert(move.expert, [tensor.to(like.device) for tensor in tensors])
        tables = layer_tables(self._plan, self._runtime.layout, self._runtime.address)
        holdings.rebind(tables, self._homes())
        for expert, record in records.items():
            load_home_state(holdings, expert, record, like)
            bank = self.experts[str(expert)]
            for number, name in enumerate(self._kind.names):
                ownership.adopt(bank.get_parameter(name), part_of(record, f"tensor.{number}."))
        self._handover.collect_debts(self._shapes, like.dtype, like.device)
        self._exchange = self._make_exchange(tables)
        holdings.publish_to(self._joining, at._replace(layer=self._number))

    def catch_up(self, at: Position) -> None:
        """Wait for the weights of new copies: the change is over."""
        self._bound.refresh_from(self._joining, at._replace(layer=self._number))
        del self._joining

    def state(self) -> Record:
        """What this worker remembers of the layer beside the model and the optimizer: for a checkpoint."""
        return layer_state(self._bound)

    def load_state(self, state: Record, at: Position) -> None:
        """Go on from a checkpoint under the same plan, and send what all copies begin with: `catch_up` ends it."""
        assert self._plan is not None
        load_layer_state(self._bound, state, self.router.weight.detach())
        joining = full_change(self._plan, self._runtime.layout).joining
        self._joining = layer_tables(joining, self._runtime.layout, self._runtime.address)
        self._bound.publish_to(self._joining, at._replace(layer=self._number))

    def change_codecs(self, codecs: Codecs) -> None:
        """Use other codecs from now on; called by the runtime of every worker between two steps."""
        self._bound.change_codecs(codecs)
        if self._exchange is not None:
            self._exchange.codecs = self._token_codecs(codecs)

    def publish(self, step: Step | None = None, *, lag: int = 0) -> None:
        """See `Holdings.publish`."""
        self._bound.publish(step, lag=lag)

    def return_gradients(self, step: int) -> None:
        """See `Holdings.return_gradients`."""
        self._bound.return_gradients(step)

    def collect(self, step: int, divisor: int) -> None:
        """See `Holdings.collect`."""
        self._bound.collect(step, divisor)

    def _token_codecs(self, codecs: Codecs) -> TokenCodecs:
        width = self.shape.hidden
        return TokenCodecs(make_codec(codecs.tokens, width=width), make_codec(codecs.backward_tokens, width=width))

    def codec_figures(self) -> CodecFigures:
        """See `Holdings.codec_figures`."""
        return self._bound.codec_figures()

    def memory(self, codecs: Codecs) -> dict[str, int]:
        """See `Holdings.memory`."""
        return self._bound.memory(codecs)

    def exact_copies(self, position: Position) -> AbstractContextManager[None]:
        """See `Holdings.exact_copies`."""
        return self._bound.exact_copies(position._replace(layer=self._number))

    def _homes(self) -> dict[int, list[nn.Parameter]]:
        return {int(e): [bank.get_parameter(name) for name in self._kind.names] for e, bank in self.experts.items()}

    def _add_expert(self, expert: int, tensors: list[torch.Tensor]) -> None:
        """Own one more expert; banks stay in the order of global ids."""
        self.experts[str(expert)] = nn.ParameterDict(dict(zip(self._kind.names, tensors, strict=True)))
        for name in sorted(self.experts, key=int):
            self.experts[name] = self.experts.pop(name)

    def _make_exchange(self, tables: LayerTables) -> Exchange:
        runtime = self._runtime
        return Exchange(
            tables,
            runtime.layout,
            runtime.site,
            runtime.wan,
            chunks=runtime.chunks,
            codecs=self._token_codecs(runtime.codecs),
            device=self.router.weight.device,
            trace=runtime.trace,
        )

    @property
    def _bound(self) -> Holdings:
        if self._holdings is None:
            raise ConfigError("call runtime.attach(model, optimizer) first")
        return self._holdings

    def _after_backward(self) -> None:
        self._runtime.after_layer_backward(self)


def emulated_expert(compute: EmulatedCompute, tensors: Tensors, x_NH: torch.Tensor) -> torch.Tensor:
    return compute.kernel(x_NH, 2.0 * len(x_NH) * sum(tensor.numel() for tensor in tensors), list(tensors))


def aux_loss(model: nn.Module) -> torch.Tensor:
    """The sum of all MoE layers' `aux_loss` of their last forward."""
    losses = [layer.aux_loss for layer in model.modules() if isinstance(layer, MoELayer)]
    return torch.stack(losses).sum() if losses else torch.zeros(())
