"""Results made for the tests: files as replays write them, and cells without files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.report.runs import Cell, Comparison, Requests, Run
from gorgo.lab.results import ResultRow, Spread, write_results

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


def row(policy: str | None = "gorgo", each_ms: Sequence[float] = (1.0,), **changes: Any) -> ResultRow:
    """The row of a run with these latencies."""
    values: dict[str, Any] = {
        "trace": "small.jsonl",
        "time_scale": 1.0,
        "policy": policy,
        "weights": None,
        "seed": 0,
        "source": "simulated",
        "n": len(each_ms),
        "errors": 0,
        "ttft_ms": Spread.of(each_ms),
        "e2e_s": Spread.of([value / 100 for value in each_ms]),
        "itl_ms": Spread(),
        "cache_hit": 0.5,
        "cache_hit_estimated": 0.52,
        "share": {"us-0": 0.5, "eu-0": 0.5},
        "prediction_error_ms": Spread(),
        "slip_ms_p95": 0.0,
    }
    return ResultRow(**{**values, **changes})


def write_run(folder: Path, ttft_ms: Sequence[float], policy: str = "gorgo", **changes: Any) -> ResultRow:
    """results.json and requests.jsonl of one run, as a replay writes them."""
    one = row(policy, ttft_ms, **changes)
    write_results(folder, [one])
    lines = [json.dumps(record.as_json()) for record in records(ttft_ms)]
    (folder / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return one


def write_sweep(folder: Path, medians_ms: Mapping[str, Mapping[float, float]], *, seeds: int = 1, **more: Any) -> None:
    """A run per policy, load and seed; the same draw for every policy at a load and seed."""
    for policy, loads in medians_ms.items():
        for time_scale, median_ms in loads.items():
            for seed in range(seeds):
                draw = np.random.default_rng([seed, int(100 * time_scale)]).lognormal(0, 0.5, 40)
                where = folder / f"{policy}-{time_scale:g}-{seed}"
                write_run(where, (median_ms * draw).tolist(), policy, time_scale=time_scale, seed=seed, **more)


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


def p95_cell(policy: str, *p95_ms: float | None, **changes: Any) -> Cell:
    """A run per figure, with the seeds 0, 1, ...; its quantiles of TTFT and E2E are that figure."""
    spreads = [Spread(p50=value, p95=value, p99=value) for value in p95_ms]
    rows = [row(policy, seed=seed, ttft_ms=one, e2e_s=one, **changes) for seed, one in enumerate(spreads)]
    return Cell(policy, policy, tuple(Run(one) for one in rows))


def saved_cell(policy: str, *ttft_ms: Sequence[float], errors: Mapping[str, int] | None = None) -> Cell:
    """A run with saved requests per list of latencies."""
    saved = [Requests(len(values), np.array(values), errors or {}) for values in ttft_ms]
    return Cell(policy, policy, tuple(Run(row(policy), requests) for requests in saved))


def comparison(loads: Mapping[float, Sequence[Cell]], *, source: str = "simulated") -> Comparison:
    return Comparison("t", source, {time_scale: tuple(cells) for time_scale, cells in loads.items()})
