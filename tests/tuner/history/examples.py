"""A generation as the campaign records one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tuner.campaign.generation import Generation

_GENERATION = Generation(
    number=0,
    started_s=1_000.0,
    finished_s=1_060.0,
    weights={"w_rtt": 0.5, "w_queue": 0.1},
    weights_version=1,
    sigma=0.5,
    mode="paper",
    optimizer="es",
    n=128,
    objective_ms=1584.0,
    incumbent_objective_ms=None,
    e2e_s_p95=3.28,
    itl_ms_p95=9.0,
    errors=0,
    max_share=0.5,
    accepted=True,
    reason="the start",
)


def generation(number: int = 0, **changes: Any) -> Generation:
    return replace(_GENERATION, number=number, **changes)
