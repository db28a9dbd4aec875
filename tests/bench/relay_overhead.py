"""What the relay adds, as ratios against the engine itself, nginx and sglang-router; the parts are in `relay`.

`GORGO_BENCH_SHORT=1` makes it one short round; `python -m tests.bench.relay --profile` shows where the time goes.
"""

from __future__ import annotations

from tests.bench.relay import bench, scenarios


def run() -> None:
    """Measure for about a quarter of an hour and print the table and the budgets."""
    bench.run(scenarios.plan_from_environment())
