"""Predicted against measured: which component is off, with both figures, and when that is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep_rt.planner.comparison import StepWatch, described, deviations, measured_parts, predicted_parts
from hybridep_rt.planner.events import Outcome

PREDICTED = {"compute": 0.5, "tokens": 1.0, "experts": 0.0, "gradients": 0.1, "dense": 0.2}


def test_waits_become_components_and_the_rest_is_compute() -> None:
    waits = {
        (0, 1, "dispatch"): 0.2,
        (1, 1, "combine-gradient"): 0.3,
        (0, 1, "experts/0"): 0.1,
        (1, 1, "gradients/1"): 0.05,
        (-1, 1, "reduce"): 0.07,
        (-1, 1, "total"): 0.03,
        (-1, 1, "user/mine"): 9.0,
    }
    found = measured_parts(2.0, waits)
    assert found == pytest.approx({"tokens": 0.5, "experts": 0.1, "gradients": 0.05, "dense": 0.1, "compute": 1.25})


def test_a_prediction_is_one_dcs_and_the_wait_for_the_last() -> None:
    parts = {"compute": 0.3, "codecs": 0.2, "tokens": 1.0, "experts": 0.0, "gradients": 0.1, "dense": 0.1}
    arrays = {name: np.array([[seconds, 2 * seconds]]) for name, seconds in parts.items()}
    outcome = Outcome(np.array([[1.7, 3.4]]), np.zeros((1, 2)), arrays, {})
    assert predicted_parts(outcome, 0) == pytest.approx(PREDICTED | {"dense": 0.1 + 1.7})
    assert predicted_parts(outcome, 1)["dense"] == pytest.approx(0.2)


def test_what_is_off_by_a_fifth_is_named_with_both_figures_worst_first() -> None:
    assert deviations(PREDICTED, PREDICTED) == []
    assert deviations(PREDICTED, PREDICTED | {"tokens": 1.19}) == []
    assert deviations(PREDICTED, PREDICTED | {"tokens": 1.5, "compute": 1.5}) == [
        "compute: 1.5 s per step where 500 ms was predicted",
        "tokens: 1.5 s per step where 1 s was predicted",
    ]


def test_what_does_not_matter_is_not_named() -> None:
    assert deviations(PREDICTED, PREDICTED | {"gradients": 0.17}) == []
    assert deviations(PREDICTED, PREDICTED | {"experts": 0.3}) == ["experts: 300 ms per step where 0 ms was predicted"]


def test_people_read_all_components() -> None:
    text = described(PREDICTED, PREDICTED | {"tokens": 1.5})
    assert text.startswith("step 2.3 s (1.8 s predicted): compute 500 ms (500 ms), tokens 1.5 s (1 s), experts 0 ms")


def test_the_watch_compares_after_8_steps_then_after_16() -> None:
    watch = StepWatch(PREDICTED)
    waits = {(0, 1, "dispatch"): 100.0}
    assert watch.stepped(1000.0, waits) is None  # the step that warms up took very long
    for step in range(1, 8):
        assert watch.stepped(1000.0 + 2.0 * step, {(0, 1, "dispatch"): 100.0 + step}) is None
    found = watch.stepped(1016.0, {(0, 1, "dispatch"): 108.0})
    assert found == pytest.approx({"compute": 1.0, "tokens": 1.0, "experts": 0.0, "gradients": 0.0, "dense": 0.0})
    for step in range(1, 16):
        assert watch.stepped(1016.0 + step, {(0, 1, "dispatch"): 108.0}) is None
    found = watch.stepped(1032.0, {(0, 1, "dispatch"): 108.0})
    assert found is not None
    assert found["compute"] == pytest.approx(1.0)
    assert found["tokens"] == 0.0
