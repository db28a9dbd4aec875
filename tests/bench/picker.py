"""What the picker costs behind a real Envoy. `GORGO_BENCH_SHORT=1`: one short round."""

from __future__ import annotations

import os

from tests.bench.behind_envoy import bench


def run() -> None:
    """Print the tables, in nine minutes or two and a half."""
    bench.run(bench.SHORT if os.environ.get("GORGO_BENCH_SHORT") else bench.FULL)
