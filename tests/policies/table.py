"""A table of candidates as tests write it: a few columns by name, the rest empty, all of it read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import Columns
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.policy.weights import Weights

#: Counted or reckoned by the proxy itself, so never NaN.
COUNTS = (
    "in_flight_requests",
    "in_flight_tokens",
    "queued_prefill_tokens",
    "prefill_base_s",
    "prefill_token_s",
    "prefill_kappa_s",
    "slowdown",
    "drained_at_s",
    "head_due_s",
    "waiting_prefill_s",
    "prefill_share",
    "prefill_share_s",
    "connect_round_trips",
    "cache_fill",
)


def table(
    rows: int,
    *,
    cached: Sequence[float] | NDArray[Any] | None = None,
    prompt_tokens: int = 1000,
    slots: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    **given: Any,
) -> Candidates:
    """`rows` candidates. `given` and `cached` are per slot; columns not given are zero (counts) or NaN."""
    slot_of_row = list(range(rows)) if slots is None else list(slots)
    width = max(slot_of_row) + 1
    columns: dict[str, Any] = {}
    for item in fields(Columns):
        default = np.arange(width) * 7919 + 17 if item.name == "salt" else np.zeros(width)
        if item.name not in (*COUNTS, "salt"):
            default = np.full(width, np.nan)
        values = np.array(given.get(item.name, default), dtype=np.uint64 if item.name == "salt" else np.float64)
        values.setflags(write=False)
        columns[item.name] = values
    matched = np.zeros(width) if cached is None else np.array(cached, dtype=np.float64)
    matched.setflags(write=False)
    return Candidates(
        np.array(slot_of_row, dtype=np.intp),
        tuple(names or (f"replica-{slot}" for slot in slot_of_row)),
        Columns(**columns),
        matched,
        prompt_tokens,
        is_all=slot_of_row == list(range(width)),
    )


def request(*, prompt_tokens: int = 1000, head: int = 7, session_id: str | None = None) -> RouteRequest:
    return RouteRequest("r", 0.0, prompt_tokens, b"", 64.0, head, session_id=session_id)


def choose(
    policy: Policy, candidates: Candidates, *, seed: int = 0, asked: RouteRequest | None = None, **weights: float
) -> Choice:
    values = Weights.of(policy.weight_specs, weights)
    return policy.choose(asked or request(), candidates, values, np.random.default_rng(seed))


def rows_chosen(policy: Policy, candidates: Candidates, *, draws: int = 200) -> set[int]:
    """Every row that some seed chooses."""
    return {choose(policy, candidates, seed=seed).row for seed in range(draws)}
