"""Two million messages and 20 GB over a link that is cut again and again: the coordinators' memory stays flat."""

from __future__ import annotations

import pytest

from tests.long.soak import MARGIN_BYTES, soak

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


def test_memory_stays_flat() -> None:
    found = soak(1.0)
    assert found.small_messages == 2_000_000
    assert found.large_bytes >= 19_999_000_000
    assert found.reconnects > 0
    assert max(found.growth_bytes) <= MARGIN_BYTES, found
