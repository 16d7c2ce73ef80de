"""What the planner counts, against a real job's messages with their envelopes and frame headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridep_rt.codecs.ladder import LADDER, Rung
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.makers import domains
from hybridep_rt.planner.plan import Layout
from tests.test_wan_bytes import EXPERTS, predicted_bytes
from tests.wan_bytes_worker import FFN, HIDDEN
from topology import parse

pytestmark = pytest.mark.long
SITES = "cluster: bytes\nlevels:\n  - {name: dc, count: 4, bandwidth: 10 Gbit/s, latency: 1 ms}\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_a_job_sends_what_was_predicted(tmp_path: Path, rung: Rung) -> None:
    path = tmp_path / "sites.yaml"
    path.write_text(SITES.replace("bytes", f"bytes-{os.getpid()}"))
    command = [sys.executable, "-m", "launcher.cli", "run", str(path), "--plan", "domains:2"]
    command += ["--codec", f"{rung.name},warm_up=0", "--", "python", "-m", "tests.wan_bytes_worker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    shape = LayerShape(HIDDEN, FFN, EXPERTS, EXPERTS, 3 * HIDDEN * FFN)
    layer = domains(Layout((1,) * 4), EXPERTS, (2,))
    for dc in range(4):
        found = json.loads((tmp_path / f"{dc}.json").read_text())
        predicted = predicted_bytes(replace(rung, warm_up_steps=0), parse(SITES), layer, shape, found["dense"], dc)
        assert found["sent"] == pytest.approx(predicted, rel=0.02)
