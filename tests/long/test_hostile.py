"""A million inputs for the decoder, and strangers at a coordinator's listeners for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridep_rt.config import Limits
from tests.hostile_bytes import MEMORY_BYTES
from tests.test_coordinator import JobUnderTest, make_topology
from tests.test_hostile import IMPATIENT, besiege, digest_all, peak_bytes

pytestmark = pytest.mark.long

INPUTS = 1_000_000
VISITS_EACH = 100


def test_a_million_inputs() -> None:
    assert digest_all(2, INPUTS).total() == INPUTS


def test_memory_is_bounded() -> None:
    assert peak_bytes(3, INPUTS // 10) < MEMORY_BYTES


def test_a_long_siege(tmp_path: Path) -> None:
    job = JobUnderTest(make_topology((1, 1)), tmp_path, IMPATIENT, Limits(strangers=4))
    job.open()
    besiege(job, VISITS_EACH, deadline_s=1800)
