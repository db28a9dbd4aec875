"""Whole pages against stored ones: every label, unit, hint, class and place of what an operator reads.

A page is stored with one element on a line. After a change of the page, write them again and read the difference:

    python -m tests.live.admin.page.test_stored_pages
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.live.admin.page.charts import joined
from gorgo.live.admin.page.document import Writer, login_page, off_page, status_page
from gorgo.live.admin.page.recent_stats import RecentStats, ttft_series
from gorgo.live.admin.page.snapshot import Alert, DecisionStatus, Snapshot
from gorgo.live.control.state_file import Frozen
from tests.live.admin.page.made import NOW, change, decision, peer, row, sample, source, status, store, view

STORED = Path(__file__).parent / "stored"


def empty() -> Snapshot:
    """A proxy that has just started: no replica is known well, nothing was routed."""
    return status(
        alerts=[Alert("bad", "No replica can serve a request: the fleet is empty")],
        stats=RecentStats.of([]),
        span_s=0.0,
        up_s=0.0,
        ttft_series=ttft_series([], now=NOW, up_s=0.0),
        regions={"near": [row(blank())], "far": [row(view("eu-0")), row(view("eu-1"))]},
        policy="random",
        weights={},
        bounds={},
        history=[change(policy="random", weights={})],
        decisions=(),
    )


def blank() -> ReplicaSnapshot:
    return view(rtt_ms=None, running_requests=None, queued_requests=None, used_tokens=None, probe_age_s=None)


def busy() -> Snapshot:
    """A proxy with a bad day, of which every sentence of the page has something to say."""
    samples = [
        sample(n, finished_s=NOW - 11.0 * n, ttft_ms=100.0 * n, status=502 if n % 4 == 0 else 200) for n in range(1, 13)
    ]
    full = view(
        models=("m1", "m2"),
        in_flight_requests=2,
        in_flight_tokens=34_567,
        queued_prefill_tokens=1_234,
        backlog_s=0.25,
        running_requests=3,
        queued_requests=4,
        used_tokens=300,
        kv_capacity_tokens=1000,
        scrape_age_s=5.0,
        index_tokens=2_345_678,
        prefill_slowdown=1.5,
        parallel_prefills=1,
        prefill_tokens_per_s=9_876.0,
        probe_age_s=3.0,
    )
    ill = view("eu-0", region="far", state="ejected", ejected_by="probes", ejected_for_s=4.0, in_state_for_s=75.0)
    draining = view("us-1", state="draining", in_flight_requests=1)
    trips = ((NOW - 30.0, 0.090), (NOW - 20.0, None), (NOW - 10.0, 0.110), (NOW, 0.100))
    weights = {"m_rtt": 2.0, "m_queue": 0.25, "m_prefill": 8.0, "fixed": 1.0}
    return status(
        alerts=[Alert("bad", "eu-0 is ejected"), Alert("warn", "2 requests wait")],
        queued=2,
        stats=RecentStats.of(samples),
        ttft_series=ttft_series(samples, now=NOW, up_s=3000.0),
        regions={
            "near": [row(full, tuple(samples), trips), row(draining)],
            "far": [row(ill, trips=((NOW, None), (NOW, None)))],
        },
        unreachable_regions=frozenset({"far"}),
        version=9,
        weights=weights,
        bounds={"m_rtt": (0.25, 4.0), "m_queue": (0.25, 4.0), "m_prefill": (0.25, 4.0), "fixed": (1.0, 1.0)},
        frozen=Frozen("2026-05-01T12:00:00.000+00:00", "weekend", "mara"),
        history=[
            *(change(n) for n in range(1, 8)),
            change(8, policy="gorgo", weights={"w": 0.5}, by="mara", reason="slow path"),
            change(9, weights=weights | {"m_queue": 1.0}, source="config"),
            change(10, weights=weights, by="mara"),
        ],
        decisions=decisions(),
        fleet_sources=[
            source("<qwen>", problem_count=7, problems=[f"qwen-{n}: no region" for n in range(7)]),
            source("dns", kind="dns", up=False, error="Name or service not known", age_s=75.0, replicas=1),
            source("pool", kind="inference-pool", up=False, synced=False, age_s=None, replicas=0),
        ],
        store=store(
            peer(),
            peer("eu-3/<b>", age_s=3.0, counts=False, differences={"policy": "policy gorgo, here gorgo-ms"}),
            peer("eu-4/9c", counts=False, differences={"format": "its reports have records of another version"}),
            joined=False,
            fault="full",
            error="OutOfMemoryError: maxmemory",
        ),
    )


def decisions() -> list[DecisionStatus]:
    """One of each kind."""
    terms = {f"term{n}": np.array([1.0 + n, 200.0 * n, np.nan if n else -1.0, 0.0]) for n in range(7)}
    costs = decision(
        "costs",
        attempt=2,
        candidates=("us-0", "eu-0", "ap-0", "sa-0"),
        terms=terms,
        cost=np.array([28.0, 4200.0, np.nan, 28.0]),
        excluded={"x-1": "ejected", "x-0": "draining"},
        prompt_tokens=12_000,
        estimated_cached_tokens=9_000,
        best_cached_tokens=9_001,
    )
    slow = sample(
        ttft_ms=700.0,
        e2e_s=2.345,
        output_tokens=1_700,
        cached_tokens=9_500,
        retries=2,
        hedged=True,
        status=503,
        ttft_parts_ms={"router": 1.0, "network": 95.0},
    )
    silent = sample(ttft_ms=None, cached_tokens=None, output_tokens=None, status=499)
    many = decision(
        "many",
        candidates=tuple(f"c{n}" for n in range(18)),
        row=17,
        terms={"rtt": np.arange(18.0)},
        cost=np.arange(18.0),
        prompt_tokens=0,
        best_cached_tokens=50,
    )
    return [
        DecisionStatus(costs, "near", slow, followed=False),
        DecisionStatus(decision("cancelled"), "near", silent, followed=False),
        DecisionStatus(decision("without", terms={}, cost=None, predicted_ttft_s=None), None, sample(), followed=False),
        DecisionStatus(decision("unbalanced", fallback="unbalanced"), "near", None, followed=False),
        DecisionStatus(decision("failed"), "near", None, followed=True),
        DecisionStatus(many, "near", sample(ttft_ms=350.0), followed=False),
        DecisionStatus(decision("late"), "near", sample(ttft_ms=351.0, status=500), followed=False),
    ]


def page_of(shown: Snapshot, *, every_s: int | None = None) -> str:
    return status_page(shown, {name: joined(part(shown)) for name, part in Writer().parts.items()}, every_s=every_s)


PAGES: dict[str, Callable[[], str]] = {
    "calm": lambda: page_of(status()),
    "empty": lambda: page_of(empty(), every_s=10),
    "busy": lambda: page_of(busy()),
    "durable": lambda: page_of(status(frozen=Frozen("2026-05-01T12:00:00.000+00:00"), durable=True)),
    "login": login_page,
    "wrong_token": lambda: login_page(wrong=True),
    "off": lambda: off_page("TOKEN"),
}


def lines_of(name: str) -> list[str]:
    return PAGES[name]().replace("<", "\n<").strip().splitlines()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_it_is_stored(name: str) -> None:
    assert lines_of(name) == (STORED / f"{name}.html").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    for name in PAGES:
        (STORED / f"{name}.html").write_text("\n".join(lines_of(name)) + "\n", encoding="utf-8")
