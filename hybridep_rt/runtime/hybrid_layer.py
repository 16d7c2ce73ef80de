"""What the runtime asks of a MoE layer that registered itself."""

from __future__ import annotations

import contextlib
from typing import Protocol

from torch import nn

from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.codecs.record import Record
from hybridep_rt.codecs.update import Step
from hybridep_rt.metrics import CodecFigures
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.plan import LayerPlan
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.ownership import Ownership


class HybridLayer(Protocol):
    """What the runtime asks of a MoE layer that registered itself."""

    @property
    def shape(self) -> LayerShape:
        """Sizes that the planner needs."""

    def expert_parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts homed at this worker."""

    def bind(self, plan: LayerPlan) -> None:
        """Get ready to execute this plan."""

    def change_codecs(self, codecs: Codecs) -> None:
        """Use other codecs from the next `publish`, forward and gradient on."""

    def publish(self, step: Step | None = None, *, lag: int = 0) -> None:
        """Send the homes' weights to the DCs that subscribe, each after its update where `step` has one.

        `lag`: by how many versions copies may be behind them in the next forward.
        """

    def settle(self) -> None:
        """Wait for weights that are on their way. Raises ConfigError where gradients are."""

    def hand_over(self, plan: LayerPlan, at: Position, ownership: Ownership) -> None:
        """Begin to change plans: send all that moves to other homes, which are not waited for."""

    def take_over(self, at: Position, ownership: Ownership) -> None:
        """Wait for what moves here, and send what new copies begin with."""

    def catch_up(self, at: Position) -> None:
        """Wait for what new copies begin with."""

    def state(self) -> Record:
        """What this worker remembers beside the model and the optimizer."""

    def load_state(self, state: Record, at: Position) -> None:
        """Go on from that, and send what all copies begin with."""

    def return_gradients(self, step: int) -> None:
        """Send the copies' gradients home, unless that has happened since the last `collect`."""

    def memory(self, codecs: Codecs) -> dict[str, int]:
        """Bytes for copies here, and for what homes keep of copies elsewhere, by what it is."""

    def codec_figures(self) -> CodecFigures:
        """What codecs did to this worker's experts."""

    def exact_copies(self, position: Position) -> contextlib.AbstractContextManager[None]:
        """Inside, copies are what their homes have."""

    def collect(self, step: int, divisor: int) -> None:
        """Add the sum over all DCs / divisor to the homes' gradients."""
