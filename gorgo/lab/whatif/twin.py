"""The twin's estimate: the log's time simulated again, under the log's policy and under the other one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gorgo.config.load import load_config
from gorgo.lab.results import ResultRow
from gorgo.lab.simulate.api import run_policies


@dataclass(frozen=True, slots=True)
class Twin:
    """Two simulated runs of the same requests on the same fleet: all decisions by the log's policy, or by the other."""

    logged: ResultRow
    other: ResultRow

    def times_ms(self) -> Mapping[str, tuple[float | None, float | None]]:
        """Return the times of both, ms."""
        rows = (self.logged, self.other)
        return {
            "mean TTFT": _pair(*(row.ttft_ms.mean for row in rows)),
            "p95 TTFT": _pair(*(row.ttft_ms.p95 for row in rows)),
            "mean E2E": _pair(*(None if row.e2e_s.mean is None else 1e3 * row.e2e_s.mean for row in rows)),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the times by name."""
        return {name: {"logged": before, "other": after} for name, (before, after) in self.times_ms().items()}


def simulate_twin(
    requests: str | Path,
    *,
    logged: tuple[str, Mapping[str, float]],
    other: tuple[str, Mapping[str, float]],
    config: Path,
    fleet: str | None,
) -> Twin:
    """Return both runs. `logged` and `other` are policies with their weights; raises what `gorgo simulate` does."""
    loaded = load_config(config)
    rows = []
    for policy, weights in (logged, other):
        rows += run_policies(
            requests,
            [policy],
            weights={policy: dict(weights)},
            config=loaded,
            fleet=fleet,
            baselines=(),
            n_jobs=1,
        )
    return Twin(*rows)


def _pair(before: float | None, after: float | None) -> tuple[float | None, float | None]:
    return before, after
