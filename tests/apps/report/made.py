"""Result folders made for the tests, by the code that replays write theirs with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.apps.replay.records import ReplayRecord
from gorgo.apps.results import ResultRow, Spread, write_results

REPLICAS = ("us-0", "eu-0", "ap-0")


def records(latencies_ms: Sequence[float], **changes: Any) -> list[ReplayRecord]:
    """A request per latency, a tenth of a second apart, over three replicas in turn."""
    return [
        ReplayRecord(
            **{
                "id": str(number),
                "scheduled_s": number / 10,
                "sent_s": number / 10,
                "input_tokens": 1000,
                "replica": REPLICAS[number % 3],
                "region": REPLICAS[number % 3][:2],
                "cached_tokens": 500,
                "output_tokens": 9,
                "ttft_ms": value,
                "e2e_s": value / 100,
                "status": 200,
                **changes,
            }
        )
        for number, value in enumerate(latencies_ms)
    ]


def row(made: Sequence[ReplayRecord], policy: str | None = "gorgo", **changes: Any) -> ResultRow:
    """The row of these requests."""
    good = [record for record in made if record.error is None]
    ttft_ms = [record.ttft_ms for record in good if record.ttft_ms is not None]
    off_ms = [
        abs(r.predicted_ttft_ms - r.ttft_ms) for r in good if r.ttft_ms is not None and r.predicted_ttft_ms is not None
    ]
    values: dict[str, Any] = {
        "trace": "small.jsonl",
        "time_scale": 1.0,
        "policy": policy,
        "weights": None,
        "seed": 0,
        "source": "simulated",
        "n": len(made),
        "errors": len(made) - len(good),
        "ttft_ms": Spread.of(ttft_ms),
        "e2e_s": Spread.of([value / 100 for value in ttft_ms]),
        "itl_ms": Spread(),
        "cache_hit": 0.5,
        "cache_hit_estimated": 0.52,
        "share": {name: sum(r.replica == name for r in good) / len(good) for name in REPLICAS} if good else {},
        "prediction_error_ms": Spread.of(off_ms),
        "slip_ms_p95": 0.0,
    }
    return ResultRow(**{**values, **changes})


def write_run(folder: Path, made: Sequence[ReplayRecord], policy: str = "gorgo", **changes: Any) -> ResultRow:
    """results.json and requests.jsonl of one run, as a replay leaves them."""
    one = row(made, policy, **changes)
    write_results(folder, [one])
    lines = [json.dumps(record.as_json()) for record in made]
    (folder / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return one


def write_sweep(
    folder: Path, medians_ms: Mapping[str, Mapping[float, float]], *, seeds: int = 1, n: int = 40, **changes: Any
) -> None:
    """A run per policy, load and seed; the same draw for every policy at a load and seed."""
    for policy, loads in medians_ms.items():
        for time_scale, median_ms in loads.items():
            for seed in range(seeds):
                draw = np.random.default_rng([seed, int(100 * time_scale)]).lognormal(0, 0.5, n)
                made = records([float(median_ms * value) for value in draw])
                where = folder / f"{policy}-{time_scale:g}-{seed}"
                write_run(where, made, policy, time_scale=time_scale, seed=seed, **changes)


def generation(number: int, **changes: Any) -> dict[str, Any]:
    """One entry of history.json."""
    return {
        "number": number,
        "weights": {"w_rtt": 0.5, "w_queue": 0.1},
        "sigma": 0.5,
        "objective_ms": 900.0,
        "incumbent_objective_ms": 1000.0,
        "accepted": True,
        "reason": "lower p95 TTFT",
        **changes,
    }
