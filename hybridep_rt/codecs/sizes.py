"""What a choice of codecs takes, per value: bytes on the wire, and bytes of memory wherever something is kept."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from hybridep_rt.codecs.codec import Codecs, bytes_per_element, options_of

if TYPE_CHECKING:
    import torch

    from hybridep_rt.codecs.ladder import Rung

_FLOAT32_BYTES = 4
_FED_BACK = ("4bit", "2bit", "ternary", "1bit", "topk")


def wire_bytes(codecs: Codecs, dtype: torch.dtype, hidden: int, ffn: int) -> dict[str, float]:
    """Between key frames and after a warm-up, by the names of the planner's `Workload`.

    `hidden`: width of a token; times `ffn`, an expert's inner width: values of each of its tensors.

    Tokens and their gradients cross equally often, so that their mean counts. The mean of a layer's experts that `sr`
    sums every so often is left out.
    """
    ways = (codecs.tokens, codecs.backward_tokens)
    return {
        "token_bytes": sum(bytes_per_element(way, dtype, width=hidden) for way in ways) / len(ways),
        "weight_bytes": bytes_per_element(codecs.weights, dtype, elements=hidden * ffn),
        "gradient_bytes": bytes_per_element(codecs.gradients, dtype, elements=hidden * ffn),
    }


def feedback_bytes(spec: str) -> int:
    """Memory per value at a sender of gradients: what is owed, strides and the second moment."""
    owed = _FLOAT32_BYTES if spec.partition(":")[0] in _FED_BACK else 0
    return owed + _strides_bytes(spec) + _moment_bytes(spec)


def _strides_bytes(spec: str) -> int:
    return _FLOAT32_BYTES if spec.partition(":")[0] == "ternary" or options_of(spec).get("adapt") else 0


def _moment_bytes(spec: str) -> int:
    return _FLOAT32_BYTES if options_of(spec).get("vs") else 0


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of memory per parameter of an expert that codecs need.

    `copy`: at every holder but the home, beside weights and gradient. `feedback`: at the worker through which a DC's
    gradients leave. `replica`: at the home of an expert that others hold. `returning`: at the home, for each DC that
    returns gradients, strides and its second moment, and `own_moment` once if any does.
    """

    copy: int
    feedback: int
    replica: int
    returning: int
    own_moment: int

    @classmethod
    def of(cls, codecs: Codecs, dtype: torch.dtype) -> HeldBytes:
        """For copies of that dtype."""
        weights, chosen = codecs.weights.partition(":")[0], options_of(codecs.weights)
        is_delta = weights.startswith("delta")
        velocity = _FLOAT32_BYTES if chosen.get("predict") else 0
        # Copies that are no float32 can't hold a stream's state themselves.
        state = velocity + (_FLOAT32_BYTES if is_delta and str(dtype) != "torch.float32" else 0)
        moment = _moment_bytes(codecs.gradients)
        return cls(
            copy=state,
            feedback=feedback_bytes(codecs.gradients),
            replica=_FLOAT32_BYTES + velocity if is_delta else 0,
            returning=moment + _strides_bytes(codecs.gradients),
            own_moment=2 * moment,
        )

    @classmethod
    def of_rung(cls, rung: Rung, dtype: torch.dtype) -> HeldBytes:
        """Each as much as the rung's warm-up needs, or the steps after it."""
        phases = (cls.of(codecs, dtype) for codecs in (rung.codecs_at(0), rung.codecs))
        return cls(*map(max, *map(astuple, phases)))

    def workload_bytes(self, copy_bytes: float) -> dict[str, float]:
        """By the names of the planner's `Workload`, where a DC's only holder is where its gradients leave.

        `copy_bytes`: of a copy's weights and gradient.
        """
        return {
            "copy_bytes": copy_bytes + self.copy + self.feedback,
            "home_bytes": float(self.replica + self.own_moment),
            "subscriber_bytes": float(self.returning),
        }
