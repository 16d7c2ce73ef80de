"""What a user says about the plan: `auto`, `ep`, `replicate`, `domains:2,1` or a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hybridep_rt.errors import PlanError, TopologyError
from hybridep_rt.planner.makers import domains, plain_ep, replicate_all
from hybridep_rt.planner.plan import LayerPlan, Layout
from topology.domains import parse_sizes

PLAN_SUFFIXES = (".yaml", ".yml", ".json")
_ALLOWED = "allowed: auto, ep, replicate, domains:S0[,S1...] or a .yaml, .yml or .json file"


class Maker(StrEnum):
    """Who makes the plan."""

    AUTO = "auto"
    EP = "ep"
    REPLICATE = "replicate"
    DOMAINS = "domains"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """A parsed wish. `sizes` is for DOMAINS, `path` for FILE; otherwise they are empty."""

    maker: Maker
    sizes: tuple[int, ...] = ()
    path: str = ""

    def __str__(self) -> str:
        if self.maker is Maker.DOMAINS:
            return "domains:" + ",".join(map(str, self.sizes))
        return self.path or self.maker.value


def parse_plan_spec(text: str) -> PlanSpec:
    """Raise PlanError, which says what is allowed, for any other text. Doesn't touch the file system."""
    name, colon, rest = text.partition(":")
    if name == "domains" and colon:
        return PlanSpec(Maker.DOMAINS, sizes=_sizes(rest))
    if text in (Maker.AUTO, Maker.EP, Maker.REPLICATE):
        return PlanSpec(Maker(text))
    if text.endswith(PLAN_SUFFIXES):
        return PlanSpec(Maker.FILE, path=text)
    raise PlanError(f"plan {text!r} is not known; {_ALLOWED}")


def make_layer(spec: PlanSpec, layout: Layout, num_experts: int, scaling: Sequence[int] | None = None) -> LayerPlan:
    """The layer that a spec names: EP, REPLICATE or DOMAINS, which need no more knowledge.

    Raises PlanError for AUTO and FILE, and where the sizes don't fit the topology.
    """
    match spec.maker:
        case Maker.EP:
            return plain_ep(layout, num_experts)
        case Maker.REPLICATE:
            return replicate_all(layout, num_experts)
        case Maker.DOMAINS:
            return domains(layout, num_experts, spec.sizes, scaling)
    raise PlanError(f"plan {str(spec)!r} can't be made for one layer; allowed here: ep, replicate, domains:S0[,S1...]")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except TopologyError as error:
        raise PlanError(str(error)) from None
