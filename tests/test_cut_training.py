"""The WAN link is cut at random moments, in the middle of frames and both ways at once: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cutting import free_port, same_bits, train
from tests.launched import Launch, launching
from tests.proxy import Proxy


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    yield from launching(tmp_path)


def test_a_run_whose_link_is_cut_ends_with_the_same_bits(launch: Launch, tmp_path: Path) -> None:
    with Proxy(free_port()) as calm, Proxy(free_port(), cut_after_bytes=60_000, cuts=12) as rough:
        train(launch, tmp_path, "calm", "domains:2", 10, calm)
        train(launch, tmp_path, "rough", "domains:2", 10, rough)
        assert rough.cuts > 5
    same_bits(tmp_path, "calm", "rough")
