"""Skips loudly what needs the extra `learned`."""

from __future__ import annotations

import pytest

from gorgo.learning import trees

needs_lightgbm = pytest.mark.skipif(
    not trees.available(), reason="BOOSTED TREES SKIPPED: lightgbm is not installed (extra `learned`)"
)
