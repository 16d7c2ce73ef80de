"""The paper's closed form against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.errors import PlanError
from hybridep_rt.planner import paper
from hybridep_rt.planner.makers import divisors
from hybridep_rt.planner.paper import PaperLayer

amounts = st.floats(1.0, 1e9)
layers = st.builds(PaperLayer, amounts, amounts, st.integers(1, 48), st.floats(1e3, 1e9), st.floats(0.0, 1e4))


def direct_s(layer: PaperLayer, p: float) -> float:
    """max(Lat_PE, Lat_AG) + 2 Lat_A2A: the critical path, written without the paper's two cases."""
    others, bandwidth = layer.workers - 1, layer.bandwidth_bytes_per_s
    all_gather = (1 - p) * layer.expert_bytes * others / bandwidth
    all_to_all = p * layer.token_bytes * others / layer.workers / bandwidth
    return max(layer.pre_expert_s, all_gather) + 2 * all_to_all


def rounding_s(layer: PaperLayer) -> float:
    """1 - p is exact to 1e-16 only, and is multiplied by the whole all-gather."""
    return 1e-12 * (direct_s(layer, 0.0) + direct_s(layer, 1.0))


@given(layers, st.floats(0, 1))
def test_the_two_cases_are_the_critical_path(layer: PaperLayer, p: float) -> None:
    assert paper.layer_s(layer, p) == pytest.approx(direct_s(layer, p), rel=1e-9, abs=1e-9)


@given(layers)
def test_no_share_beats_the_closed_form(layer: PaperLayer) -> None:
    best = direct_s(layer, paper.best_p(layer))
    grid = [k / 64 for k in range(65)] + [k / (layer.workers - 1) for k in range(layer.workers) if layer.workers > 1]
    assert all(direct_s(layer, p) >= best - rounding_s(layer) for p in grid)


@given(layers)
def test_no_domain_size_beats_the_closed_form(layer: PaperLayer) -> None:
    workers = layer.workers
    times = {s: direct_s(layer, (workers - s) / (workers - 1) if workers > 1 else 0.0) for s in divisors(workers)}
    chosen = paper.best_size(layer)
    assert chosen in times
    assert times[chosen] <= min(times.values()) + rounding_s(layer)


def test_the_nearest_feasible_size_is_not_always_the_best() -> None:
    layer = PaperLayer(token_bytes=580.0, expert_bytes=100.0, workers=12, bandwidth_bytes_per_s=1.0, pre_expert_s=330.0)
    ideal = 12 - paper.best_p(layer) * 11
    assert ideal == pytest.approx(4.3)
    assert paper.best_size(layer) == 6


def test_terms_by_hand() -> None:
    layer = PaperLayer(token_bytes=80.0, expert_bytes=10.0, workers=4, bandwidth_bytes_per_s=2.0, pre_expert_s=5.0)
    assert paper.gemm_s(2, 3, 4, 6.0) == 4.0
    assert paper.pre_expert_s(2.0, 3.0, dense_layers=1) == 7.0
    assert paper.compute_s(7.0, 1.5, experts=2) == 10.0
    assert paper.a2a_bytes(layer) == 60.0
    assert paper.ag_bytes(layer) == 30.0
    assert paper.communication_s(layer, 0.5) == (15.0 + 2 * 30.0) / 2.0
    assert paper.overlap_s(layer, 0.0, expert_s=1.0, experts=3) == 8.0
    assert paper.layer_s(layer, 1.0) == 5.0 + 60.0
    assert paper.best_p(layer) == 0.0
    assert paper.best_size(layer) == 4


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match="bandwidth above 0"):
        PaperLayer(1, 1, 2, 0, 0)
    with pytest.raises(PlanError, match="not negative"):
        PaperLayer(-1, 1, 2, 1, 0)
