"""Three results of arXiv 2510.19470 by its own model, under assumptions of ours where the paper leaves them open.

Assumptions: DCs alike, of `GPUS` each; a token chooses k experts evenly and is sent once per choice; B is a DC's
uplink; no expert compute, latency or gradient return. Experts: `GPUS` in each DC, so that a thousand DCs have more than
one has, or a fixed number in all. Nothing is tuned to the paper's numbers: this is what these assumptions give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridep_rt.planner.makers import divisors
from hybridep_rt.planner.paper import PaperLayer, a2a_bytes, ag_bytes, layer_s, p_of_size
from topology.domains import Domains
from topology.location import Tree

GPUS = 8


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Sizes of a layer: `tokens` per GPU, `compression` of expert weights, `pre_expert_s` of its tokens.

    `experts`: in all, however many DCs; None: one for each GPU.
    """

    hidden: int = 1024
    ffn: int = 4096
    top_k: int = 2
    tokens: float = 8192
    element_bytes: float = 2.0
    compression: float = 50.0
    pre_expert_s: float = 0.010
    experts: int | None = None

    def layer(self, dcs: int, bandwidth: float) -> PaperLayer:
        """D, P_E, G and B of one DC among `dcs`."""
        token_bytes = GPUS * self.tokens * self.top_k * self.hidden * self.element_bytes
        per_dc = GPUS if self.experts is None else self.experts / dcs
        expert_bytes = per_dc * 2 * self.hidden * self.ffn * self.element_bytes / self.compression
        return PaperLayer(token_bytes, expert_bytes, dcs, bandwidth, self.pre_expert_s)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that leave a DC per layer forward, as the paper's Fig. 16: all as tokens, and with domains of S."""

    tokens: float
    size: int
    plain_bytes: float
    hybrid_bytes: float


def traffic(model: PaperModel, dcs: int, tokens: Sequence[float]) -> list[Traffic]:
    """For each number of tokens per GPU and every domain size but 1."""
    found = []
    for count in tokens:
        layer = replace(model, tokens=count).layer(dcs, 1.0)
        for size in divisors(dcs)[1:]:
            p = p_of_size(size, dcs)
            hybrid = 2 * a2a_bytes(layer, p) + ag_bytes(layer, p)
            found.append(Traffic(count, size, 2 * a2a_bytes(layer), hybrid))
    return found


@dataclass(frozen=True, slots=True)
class Messages:
    """Per layer forward, as the paper's Table VII: ordered pairs of workers that exchange, by All-Gather and A2A."""

    size: int
    all_gather: int
    all_to_all: int

    @property
    def total(self) -> int:
        """An A2A happens twice, dispatch and combine."""
        return self.all_gather + 2 * self.all_to_all


def messages(workers: int) -> list[Messages]:
    """For every domain size of a level of that many workers."""
    found = []
    for size in divisors(workers):
        pairs = Domains(Tree.symmetric((workers,)), (size,)).pairs(0)
        found.append(Messages(size, 2 * pairs["AG"], 2 * pairs["A2A"]))
    return found


@dataclass(frozen=True, slots=True)
class Speedup:
    """Plain EP's layer time against that at p, as in the paper's Fig. 17."""

    dcs: int
    bandwidth: float
    kind: str
    value: float
    ratio: float


def speedups(
    model: PaperModel, dcs: Sequence[int], bandwidths: Sequence[float], sizes: Sequence[int], shares: Sequence[float]
) -> list[Speedup]:
    """At fixed domain sizes S, and at fixed shares p of what travels as tokens."""
    found = []
    for count in dcs:
        for bandwidth in bandwidths:
            layer = model.layer(count, bandwidth)
            plain_s = layer_s(layer, 1.0)
            for size in sizes:
                if count % size == 0 and size < count:
                    ratio = plain_s / layer_s(layer, p_of_size(size, count))
                    found.append(Speedup(count, bandwidth, "S", size, ratio))
            for p in shares:
                found.append(Speedup(count, bandwidth, "p", p, plain_s / layer_s(layer, p)))
    return found
