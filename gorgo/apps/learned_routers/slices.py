"""Figures over time: a run in slices of equal time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorgo.apps.learned_routers.model_errors import ModelForecasts
from gorgo.core.messages.decision import Decision
from gorgo.sim.records import SimRecord

#: Slices of a run.
SLICES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlice:
    """Figures of the requests that arrived within a slice of the run.

    `error_ratio` is of the predictions of decisions, whoever made them; `predicted_ttft_ms` and `predicted_tpot_ms` are
    means of what the model in use predicts for those outcomes, beside `modelled_ttft_ms` and `modelled_tpot_ms`,
    which are the means measured of the same outcomes. `best_hit` is that of the replica with most of the prompt.
    """

    begins_s: float
    n: int
    ttft_ms_mean: float | None
    ttft_ms_p99: float | None
    tpot_ms_mean: float | None
    e2e_ms_per_token: float | None
    error_ratio: float | None
    hit: float | None
    best_hit: float | None
    predicted_ttft_ms: float | None = None
    modelled_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    modelled_tpot_ms: float | None = None


def slices_of(
    records: Sequence[SimRecord], decisions: Mapping[str, Decision], forecasts: ModelForecasts
) -> list[TimeSlice]:
    """Return the slices of a run, of all its requests."""
    edges = np.linspace(0.0, max((record.scheduled_s for record in records), default=0.0) + 1e-9, SLICES + 1)
    begins = np.searchsorted(np.array([record.scheduled_s for record in records]), edges)
    return [
        _slice(float(edge), records[begin:end], decisions, forecasts.between(float(edge), float(end_s)))
        for edge, end_s, begin, end in zip(edges[:-1], edges[1:], begins[:-1], begins[1:], strict=True)
    ]


def _slice(
    begins_s: float, records: Sequence[SimRecord], decisions: Mapping[str, Decision], forecasts: ModelForecasts
) -> TimeSlice:
    good = [record for record in records if record.error is None and record.ttft_ms is not None]
    ttft_ms = [record.ttft_ms or 0.0 for record in good]
    spoken = [record for record in good if record.e2e_s is not None and (record.output_tokens or 0) > 1]
    tpot_ms = [
        ((record.e2e_s or 0.0) * 1e3 - (record.ttft_ms or 0.0)) / ((record.output_tokens or 0) - 1) for record in spoken
    ]
    per_token = [(record.e2e_s or 0.0) * 1e3 / (record.output_tokens or 1) for record in spoken]
    errors = [
        abs(record.predicted_ttft_ms - (record.ttft_ms or 0.0)) / (record.ttft_ms or 1.0)
        for record in good
        if record.predicted_ttft_ms is not None
    ]
    chosen = [decisions[record.id] for record in records if record.id in decisions]
    prompts = sum(one.prompt_tokens for one in chosen)
    return TimeSlice(
        begins_s=begins_s,
        n=len(records),
        ttft_ms_mean=_mean(ttft_ms),
        ttft_ms_p99=float(np.quantile(ttft_ms, 0.99)) if ttft_ms else None,
        tpot_ms_mean=_mean(tpot_ms),
        e2e_ms_per_token=_mean(per_token),
        error_ratio=_mean(errors),
        hit=sum(one.estimated_cached_tokens for one in chosen) / prompts if prompts else None,
        best_hit=sum(one.best_cached_tokens for one in chosen) / prompts if prompts else None,
        **_modelled(forecasts),
    )


def _modelled(forecasts: ModelForecasts) -> dict[str, float | None]:
    pairs = {
        "ttft_ms": (forecasts.predicted_ttft_s, forecasts.ttft_s),
        "tpot_ms": (forecasts.predicted_tpot_s, forecasts.tpot_s),
    }
    found: dict[str, float | None] = {}
    for name, (predicted_s, measured_s) in pairs.items():
        known = np.isfinite(predicted_s) & np.isfinite(measured_s)
        found[f"predicted_{name}"] = _mean(predicted_s[known] * 1e3)
        found[f"modelled_{name}"] = _mean(measured_s[known] * 1e3)
    return found


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    return float(np.mean(values)) if len(values) else None
