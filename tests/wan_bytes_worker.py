"""One worker of a real job that counts what it sends: python -m tests.wan_bytes_worker FOLDER, under `hybridep run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hybridep_rt
from tests.test_wan_bytes import work

HIDDEN, FFN = 256, 512


def main(folder: Path) -> None:
    runtime = hybridep_rt.init()
    sent, _, dense = work(runtime, HIDDEN, FFN)
    (folder / f"{runtime.rank}.json").write_text(json.dumps({"sent": sum(sent.values()), "dense": dense}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
