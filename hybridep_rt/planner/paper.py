"""The closed form of the HybridEP paper (arXiv 2510.19470), for one level of equal workers, as pure functions.

D: bytes of token data per worker. P_E: bytes of one worker's experts. G: workers. B: bytes/s per worker. Times in
seconds. In level-0 formulas a "worker" is a DC. Gradient return and de-duplication are not part of this model; see
`economics` for the model that plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridep_rt.errors import PlanError
from hybridep_rt.planner.makers import divisors


@dataclass(frozen=True, slots=True)
class PaperLayer:
    """One MoE layer: D, P_E, G, B, and Lat_PE, the compute in front of the experts, which can hide the All-Gather."""

    token_bytes: float
    expert_bytes: float
    workers: int
    bandwidth_bytes_per_s: float
    pre_expert_s: float

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.bandwidth_bytes_per_s > 0:
            raise PlanError("the paper's model needs at least one worker and a bandwidth above 0")
        if min(self.token_bytes, self.expert_bytes, self.pre_expert_s) < 0:
            raise PlanError("the paper's model needs bytes and seconds that are not negative")


def gemm_s(rows: float, inner: float, columns: float, multiply_adds_per_s: float) -> float:
    """Seconds of a product (L,H)x(H,M): L*H*M/C, with C in multiply-adds per second."""
    return rows * inner * columns / multiply_adds_per_s


def pre_expert_s(attention_s: float, ffn_s: float, dense_layers: int) -> float:
    """Lat_PE = (m+1) Att + m FFN: m dense layers and the MoE layer's own attention come before the experts."""
    return (dense_layers + 1) * attention_s + dense_layers * ffn_s


def compute_s(pre_expert: float, expert_s: float, experts: int) -> float:
    """Lat_comp = Lat_PE + n * Lat_Ep."""
    return pre_expert + experts * expert_s


def a2a_bytes(layer: PaperLayer, p: float = 1.0) -> float:
    """V_A2A = p * D * (G-1)/G: bytes of one All-to-All that leave a worker."""
    return p * layer.token_bytes * (layer.workers - 1) / layer.workers


def ag_bytes(layer: PaperLayer, p: float = 0.0) -> float:
    """V_AG = (1-p) * P_E * (G-1): bytes of expert weights that leave a worker."""
    return (1 - p) * layer.expert_bytes * (layer.workers - 1)


def communication_s(layer: PaperLayer, p: float) -> float:
    """Lat_comm = Lat_AG + 2 * Lat_A2A, each V/B."""
    return (ag_bytes(layer, p) + 2 * a2a_bytes(layer, p)) / layer.bandwidth_bytes_per_s


def overlap_s(layer: PaperLayer, p: float, expert_s: float = 0.0, experts: int = 0) -> float:
    """min(Lat_PE, Lat_AG) + n * Lat_Ep: pre-expert compute hides the All-Gather, never an All-to-All."""
    all_gather_s = ag_bytes(layer, p) / layer.bandwidth_bytes_per_s
    return min(layer.pre_expert_s, all_gather_s) + experts * expert_s


def layer_s(layer: PaperLayer, p: float) -> float:
    """Lat_all(p), the two cases of the paper.

    Case 1, Lat_PE >= Lat_AG: Lat_PE + 2D(G-1)p/(GB). Case 2: p(G-1)(2D - G P_E)/(BG) + (G-1)P_E/B.
    """
    others, workers, bandwidth = layer.workers - 1, layer.workers, layer.bandwidth_bytes_per_s
    if layer.pre_expert_s >= ag_bytes(layer, p) / bandwidth:
        return layer.pre_expert_s + 2 * layer.token_bytes * others * p / (workers * bandwidth)
    slope = others * (2 * layer.token_bytes - workers * layer.expert_bytes) / (bandwidth * workers)
    return p * slope + others * layer.expert_bytes / bandwidth


def best_p(layer: PaperLayer) -> float:
    """The share p* in [0, 1] that minimises `layer_s`.

    2D - G P_E < 0: p* = 1 - B Lat_PE / (P_E (G-1)), clipped; otherwise p* = 0.
    """
    if layer.workers == 1 or 2 * layer.token_bytes >= layer.workers * layer.expert_bytes:
        return 0.0
    hidden = layer.bandwidth_bytes_per_s * layer.pre_expert_s / (layer.expert_bytes * (layer.workers - 1))
    return min(max(1 - hidden, 0.0), 1.0)


def p_of_size(size: int, workers: int) -> float:
    """p = (G-S)/(G-1) of domains of S workers; 0 for a single worker."""
    return (workers - size) / (workers - 1) if workers > 1 else 0.0


def best_size(layer: PaperLayer) -> int:
    """The domain size S, a divisor of G, that minimises `layer_s`; the larger one where two are equal.

    `layer_s` falls up to p* and rises after it, so one of the two feasible neighbours of S* = G - p*(G-1) is the
    best; the nearest of them need not be.
    """
    ideal = layer.workers - best_p(layer) * (layer.workers - 1)
    sizes = divisors(layer.workers)
    below = max((size for size in sizes if size <= ideal), default=1)
    above = min((size for size in sizes if size >= ideal), default=layer.workers)
    return min((above, below), key=lambda size: layer_s(layer, p_of_size(size, layer.workers)))
