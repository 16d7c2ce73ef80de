"""A million inputs for the decoder, and strangers at a coordinator's listeners for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile_bytes import MEMORY_BYTES
from tests.test_hostile import besiege, besieged_job, digest_all, peak_bytes

pytestmark = pytest.mark.long

INPUTS = 1_000_000
VISITS_EACH = 100


def test_a_million_inputs() -> None:
    assert digest_all(2, INPUTS).total() == INPUTS


def test_memory_is_bounded() -> None:
    assert peak_bytes(3, INPUTS // 10) < MEMORY_BYTES


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_long_siege(tmp_path: Path, tls: bool) -> None:
    besiege(besieged_job(tmp_path, tls=tls), VISITS_EACH, deadline_s=1800)
