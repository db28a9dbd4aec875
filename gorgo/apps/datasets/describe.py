"""What is in a trace, in a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.apps.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """Lengths in tokens. `block_reuse` is the share of blocks that an earlier request of the trace had too."""

    requests: int
    duration_s: float
    requests_per_s: float
    input_p50: float
    input_mean: float
    input_p95: float
    output_mean: float
    block_reuse: float


def describe_trace(requests: Sequence[TraceRequest]) -> TraceFigures:
    """Figures of a loaded trace with at least one request."""
    inputs = np.array([request.input_tokens for request in requests], dtype=float)
    duration_s = requests[-1].timestamp_s - requests[0].timestamp_s
    return TraceFigures(
        requests=len(requests),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s if duration_s else float("nan"),
        input_p50=float(np.median(inputs)),
        input_mean=float(inputs.mean()),
        input_p95=float(np.quantile(inputs, 0.95)),
        output_mean=float(np.mean([request.output_tokens for request in requests])),
        block_reuse=_block_reuse(requests),
    )


def _block_reuse(requests: Sequence[TraceRequest]) -> float:
    seen: set[int] = set()
    reused = total = 0
    for request in requests:
        reused += sum(hash_id in seen for hash_id in request.hash_ids)
        total += len(request.hash_ids)
        seen.update(request.hash_ids)
    return reused / total if total else 0.0
