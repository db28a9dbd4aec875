"""Rows of training whose times follow a known function of load and prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import COLUMNS, TrainingRows

NAMES = (
    "uncached_tokens",
    "uncached_prefill_tokens",
    "queued_requests",
    "is_queued",
    "kv_usage",
    "hit_share",
    "prior_s",
)
TOKEN_S = 1 / 10_000
STEP_S = 0.02


def training_rows(
    count: int, *, seed: int = 0, first_seq: int = 0, noise: float = 0.0, names: tuple[str, ...] = NAMES
) -> TrainingRows:
    """Prompts of 100 to 4,000 tokens before a queue of 0 to 4 requests; the prior knows nothing of the queue."""
    rng = np.random.default_rng(seed)
    values = {
        "uncached_tokens": rng.uniform(100, 4000, count),
        "uncached_prefill_tokens": rng.uniform(0, 8000, count),
        "queued_requests": np.maximum(rng.integers(-4, 5, count), 0).astype(np.float64),
        "kv_usage": rng.random(count),
        "hit_share": rng.random(count),
    }
    values["is_queued"] = (values["queued_requests"] > 0).astype(np.float64)
    values["prior_s"] = 0.05 + (values["uncached_tokens"] + values["uncached_prefill_tokens"]) * TOKEN_S
    ttft = known_ttft_s(values["prior_s"], values["queued_requests"]) * rng.lognormal(0.0, noise, count)
    return rows_of(
        names,
        np.column_stack([values[name] for name in names]).astype(np.float32),
        ttft,
        tpot_s=STEP_S * (1.0 + values["kv_usage"]),
        first_seq=first_seq,
    )


def known_ttft_s(prior_s: NDArray[np.float64], queued: NDArray[np.float64]) -> NDArray[np.float64]:
    return prior_s + 0.2 * queued


def rows_of(
    names: tuple[str, ...],
    features: NDArray[np.float32],
    ttft_s: NDArray[np.float64],
    *,
    tpot_s: NDArray[np.float64] | None = None,
    censored: NDArray[np.bool_] | None = None,
    first_seq: int = 0,
) -> TrainingRows:
    """Rows dispatched a second apart, numbered from `first_seq`."""
    empty = TrainingRows.empty(names, len(ttft_s))
    rows = replace(
        empty,
        features=features,
        dispatched_s=first_seq + np.arange(len(ttft_s), dtype=np.float64),
        ttft_s=ttft_s,
        tpot_s=np.full(len(ttft_s), np.nan) if tpot_s is None else tpot_s,
        e2e_s=ttft_s + 1.0,
        first_seq=first_seq,
    )
    return rows if censored is None else replace(rows, censored=censored)


def numbered(count: int, first: int = 0) -> TrainingRows:
    """Rows with one feature, which is their number."""
    number = np.arange(first, first + count, dtype=np.float64)
    return rows_of(("prompt_tokens",), number[:, None].astype(np.float32), number, first_seq=first)


def numbers(rows: TrainingRows) -> list[int]:
    """Numbers of rows of `numbered`; every column of a row is of the same one."""
    found = rows.features[:, 0].astype(np.int64)
    assert (rows.ttft_s == found).all()
    assert (rows.dispatched_s == found).all()
    assert all(len(getattr(rows, name)) == len(found) for name in COLUMNS)
    return [int(number) for number in found]


def with_censoring(rows: TrainingRows, *, seed: int, patience_s: float) -> TrainingRows:
    """The same rows where a client gives up after a random time, mostly before the first token of slow rows."""
    patience = np.random.default_rng(seed).exponential(patience_s, len(rows))
    censored = patience < rows.ttft_s
    return replace(rows, ttft_s=np.where(censored, patience, rows.ttft_s), censored=censored)
