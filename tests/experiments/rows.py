"""Result rows with the few figures that verdicts look at."""

from __future__ import annotations

from gorgo.lab.results import ResultRow, Spread


def row(
    policy: str = "gorgo-ms", *, seed: int = 0, ttft_ms: float | None = 100.0, e2e_s: float | None = 1.0
) -> ResultRow:
    """One run whose p50 is half its p95."""
    return ResultRow(
        trace="made",
        time_scale=1.0,
        policy=policy,
        weights=None,
        seed=seed,
        source="simulated",
        n=10,
        errors=0,
        ttft_ms=_spread(ttft_ms),
        e2e_s=_spread(e2e_s),
        itl_ms=Spread(),
        cache_hit=0.5,
        cache_hit_estimated=None,
        share={"a": 1.0},
        prediction_error_ms=Spread(),
        slip_ms_p95=0.0,
    )


def _spread(p95: float | None) -> Spread:
    return Spread() if p95 is None else Spread(p95 / 2, p95 / 2, p95, p95)
