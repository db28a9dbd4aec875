"""Statistics of a trace: those of tables 1 and 4 of the GORGO paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.apps.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Statistics of a trace. Lengths are in tokens; None is unknown.

    Parameters
    ----------
    users, requests_per_user:
        None unless every request has its user.
    turns_mean:
        Questions in a prompt, the new one and those of its history, on average over multi-turn requests.
    multi_turn_share:
        Ratio of requests with more than one question in the prompt. Both are None unless every request has its turns.
    block_reuse, user_block_reuse:
        Share of all 512-token blocks that an earlier request of the trace had too, and that an earlier request of the
        same user had. Requests before the trace do not count: the first request of each user is cold.
    """

    requests: int
    duration_s: float
    requests_per_s: float
    users: int | None
    requests_per_user: float | None
    turns_mean: float | None
    multi_turn_share: float | None
    input_p50: float
    input_mean: float
    input_p95: float
    output_mean: float
    block_reuse: float | None
    user_block_reuse: float | None


def describe_trace(requests: Sequence[TraceRequest]) -> TraceStats:
    """Figures of a loaded trace with at least one request, which are in the order of time."""
    inputs = np.array([request.input_tokens for request in requests], dtype=float)
    duration_s = requests[-1].timestamp_s - requests[0].timestamp_s
    users = None if any(request.user is None for request in requests) else len({r.user for r in requests})
    turns_mean, multi_turn_share = _turns(requests)
    return TraceStats(
        requests=len(requests),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s if duration_s else float("nan"),
        users=users,
        requests_per_user=len(requests) / users if users else None,
        turns_mean=turns_mean,
        multi_turn_share=multi_turn_share,
        input_p50=float(np.median(inputs)),
        input_mean=float(inputs.mean()),
        input_p95=float(np.quantile(inputs, 0.95)),
        output_mean=float(np.mean([request.output_tokens for request in requests])),
        block_reuse=_block_reuse(requests),
        user_block_reuse=_block_reuse(requests, by_user=True) if users else None,
    )


def _turns(requests: Sequence[TraceRequest]) -> tuple[float | None, float | None]:
    turns = [request.turns for request in requests if request.turns is not None]
    if len(turns) < len(requests):
        return None, None
    several = [count for count in turns if count > 1]
    return (float(np.mean(several)) if several else None), len(several) / len(turns)


def _block_reuse(requests: Sequence[TraceRequest], *, by_user: bool = False) -> float | None:
    """None where a trace has texts but no ids of blocks."""
    stored_by_user: dict[str | None, set[int]] = {}
    reused = total = 0
    for request in requests:
        stored = stored_by_user.setdefault(request.user if by_user else None, set())
        reused += sum(hash_id in stored for hash_id in request.hash_ids)
        total += len(request.hash_ids)
        stored.update(request.hash_ids)
    return reused / total if total else None
