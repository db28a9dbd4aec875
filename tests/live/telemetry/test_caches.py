"""What is known of each replica's cache: in metrics, the fleet, the page and the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.core.messages.cache_source import CacheSourceStats, KvEventStats
from gorgo.formatting import cache_line, reports_cache
from gorgo.live.cache_push.source import PushStats
from gorgo.live.cache_states import CacheState
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats
from gorgo.live.telemetry.caches import CacheMetrics
from gorgo.live.telemetry.metric_table import CACHE_METRICS, CACHE_REPORTS
from tests.live.cache_push.test_pushes import TOKENS, Engine
from tests.proxy.conftest import Start, config_for, with_replica
from tests.proxy.fakes import DONE, delta, stream


def state(feed: KvFeedStats | None = None, pushes: PushStats | None = None, **changes: Any) -> CacheState:
    fields: dict[str, Any] = {
        "source": "push",
        "complete": True,
        "block_tokens": 16,
        "blocks": 70,
        "speculated_blocks": 0,
        "age_s": 1.5,
        "requests": 2,
        "estimated_tokens": 90,
        "reported_tokens": 100,
        "phantom_tokens": 4,
        "missed_tokens": 14,
        "events": KvEventStats(),
    }
    return CacheState("here", CacheSourceStats(**{**fields, **changes}), pushes or PushStats(), feed)


def samples(found: CacheState) -> dict[tuple[str, ...], float]:
    metrics = CacheMetrics()
    metrics.read = lambda: {"r0": found}
    return {
        (
            sample.name,
            *(value for name, value in sample.labels.items() if name not in ("replica", "region")),
        ): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_metrics_have_the_source_its_age_and_its_errors() -> None:
    found = samples(state())
    assert found["gorgo_cache_source", "push"] == 1
    assert found["gorgo_cache_reported_blocks",] == 70
    assert found["gorgo_cache_report_age_seconds",] == 1.5
    assert (found["gorgo_cache_phantom_tokens_total",], found["gorgo_cache_missed_tokens_total",]) == (4, 14)
    assert {name for name, *_ in found} == CACHE_METRICS


def test_age_of_a_source_without_reports_is_absent() -> None:
    assert ("gorgo_cache_report_age_seconds",) not in samples(state(source="history", age_s=None))


def test_every_count_of_feeds_and_pushes_has_its_result() -> None:
    feed = KvFeedStats(
        messages=1, rejected_messages=2, rejected_events=3, gaps=4, restarts=5, replays=6, failed_replays=7
    )
    pushes = PushStats(snapshots=8, evictions=9, stale=10, lost=11, limited=12, silences=13)
    found = samples(state(feed, pushes))
    reports = {result: found["gorgo_cache_reports_total", result] for result in CACHE_REPORTS}
    assert list(reports.values()) == [1, 5, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (state(source="history", age_s=None), False),
        (state(), True),
        (state(source="events"), True),
        (state(KvFeedStats(state=FeedState.SILENT), source="history"), True),
        (state(pushes=PushStats(silences=1), source="history"), True),
    ],
)
def test_terminal_shows_caches_with_reports_or_with_lost_ones(found: CacheState, shown: bool) -> None:
    assert reports_cache(found.as_dict()) is shown


def test_line_names_the_state_and_faults_of_a_feed() -> None:
    feed = KvFeedStats(state=FeedState.GAP, gaps=2, replays=3, failed_replays=1)
    line = cache_line(state(feed, source="events", complete=False, requests=0).as_dict())
    assert line == "events, incomplete, 70 blocks, newest 2 s ago, feed gap, gaps 2, replays 3, failed replays 1"


async def test_pushes_are_seen_in_metrics_fleet_status_and_page(start: Start) -> None:
    replicas = [await start.replica(stream(delta("a"), DONE))]
    config = with_replica(config_for(replicas), 0, push_token_env="PUSH_0")
    proxy = await start.proxy(config, replicas, environ=TOKENS)
    engine = Engine(proxy)
    await engine.sync([1, 2, 3])
    engine.sequence += 2
    await engine.evict([1])
    metrics = (await proxy.admin.get("/metrics")).text
    assert 'gorgo_cache_source{cache_source="push",region="here",replica="r0"} 1.0' in metrics
    assert 'gorgo_cache_reported_blocks{region="here",replica="r0"} 2.0' in metrics
    assert 'gorgo_cache_reports_total{region="here",replica="r0",result="lost"} 2.0' in metrics
    (row,) = (await proxy.admin.get("/admin/fleet")).json()["replicas"]
    assert (row["cache"]["source"], row["cache"]["blocks"], row["cache"]["pushes"]["lost"]) == ("push", 2, 2)
    (shown,) = (await proxy.admin.get("/admin/status")).json()["replicas"]
    assert shown["cache"]["source"] == "push"
