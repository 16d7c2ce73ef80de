"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# A shared machine may be slow at any moment, so examples have no deadline of their own (tests have). In CI the same
# examples are tried every time; elsewhere new ones.
settings.register_profile("suite", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("suite")
