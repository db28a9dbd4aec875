"""What a simulated engine tells of itself, after steps whose times and tokens are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.lab.engine_server.stats import EngineStats
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import EngineRequest

#: A prefill takes a second and a millisecond a token; a decode step half a second.
PROFILE = EngineProfile(
    name="slow",
    prefill_base_s=1.0,
    prefill_tokens_per_s=1000.0,
    prefill_kappa_s=0.0,
    chunk_tokens=200,
    decode_base_s=0.5,
    decode_per_request_s=0.0,
    decode_kv_s=0.0,
    kv_tokens=1000,
    max_running_requests=4,
)


def word(letter: str, tokens: int = 100) -> bytes:
    return letter.encode() * 4 * tokens


@pytest.fixture
def engine() -> EngineModel[EngineRequest]:
    return EngineModel(PROFILE)


def step(engine: EngineModel[EngineRequest], now: float) -> float:
    """One step from `now`; when it ends."""
    taken = engine.start_step(now=now)
    assert taken is not None
    engine.finish_step(taken)
    return taken.ends_s


def scraped(stats: EngineStats, now: float) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels beyond those that every line has."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(stats.exposition(now)):
        for sample in family.samples:
            assert (sample.labels["engine_type"], sample.labels["model_name"]) == ("unified", "m")
            rest = tuple(text for name, text in sample.labels.items() if name not in ("engine_type", "model_name"))
            found.setdefault(sample.name.removeprefix("sglang:"), {})[rest] = sample.value
    return found


def test_loads_and_metrics_are_those_of_the_steps_so_far(engine: EngineModel[EngineRequest]) -> None:
    """A of 120 tokens has ended, B has the first 100 of them and runs, and C with 60 waits."""
    stats = EngineStats(engine, model_name="m", now=0.0)
    first = EngineRequest(word("a", 120), prompt_tokens=120, output_tokens=2)
    engine.submit(first, now=0.0)
    assert step(engine, 0.0) == pytest.approx(1.12)
    stats.first_token(first, 1.12)
    assert step(engine, 1.12) == pytest.approx(1.62)
    # All but the last token of a prompt can come from the cache: B prefills one.
    second = EngineRequest(word("a"), prompt_tokens=100, output_tokens=3)
    engine.submit(second, now=2.0)
    assert step(engine, 2.0) == pytest.approx(3.001)
    stats.first_token(second, 3.001)
    engine.submit(EngineRequest(word("c", 60), prompt_tokens=60, output_tokens=5), now=3.5)
    load = stats.load(4.0)
    assert load == {
        "timestamp": 4.0,
        "dp_rank": 0,
        "num_running_reqs": 1,
        "num_waiting_reqs": 1,
        "num_waiting_uncached_tokens": 60,
        "num_used_tokens": 100,
        "num_total_tokens": 160,
        "num_active_tokens": 100,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": 1000,
        "max_running_requests": 4,
        "token_usage": 0.1,
        # Three tokens in four seconds.
        "gen_throughput": 0.75,
        "cache_hit_rate": 99 / 220,
        "utilization": 0.25,
        "total_prefill_uncached_tokens": 121,
        "total_prefill_busy_us": 2_121_000,
    }
    values = scraped(stats, 4.0)
    buckets = values.pop("time_to_first_token_seconds_bucket")
    assert {name: value for name, by_label in values.items() for value in by_label.values()} == pytest.approx(
        {
            "num_running_reqs": 1.0,
            "num_queue_reqs": 1.0,
            "num_used_tokens": 100.0,
            "token_usage": 0.1,
            "full_token_usage": 0.1,
            "cache_hit_rate": 0.45,
            "max_total_num_tokens": 1000.0,
            "max_running_requests": 4.0,
            "kv_available_tokens": 880.0,
            "kv_evictable_tokens": 20.0,
            "kv_used_tokens": 100.0,
            "gen_throughput": 0.75,
            "utilization": 0.25,
            "prompt_tokens_total": 220.0,
            "generation_tokens_total": 3.0,
            "evicted_tokens_total": 0.0,
            "num_requests_total": 3.0,
            "num_aborted_requests_total": 0.0,
            "cached_tokens_total": 99.0,
            # 1.12 s and 1.001 s.
            "time_to_first_token_seconds_sum": 2.121,
            "time_to_first_token_seconds_count": 2.0,
        }
    )
    assert list(values["cached_tokens_total"]) == [("device",)]
    assert [value for (bound,), value in buckets.items() if float(bound) <= 1.0] == [0.0] * 6
    assert [value for (bound,), value in buckets.items() if float(bound) > 1.0] == [2.0] * 13


def test_a_bucket_holds_all_up_to_its_bound(engine: EngineModel[EngineRequest]) -> None:
    stats = EngineStats(engine, model_name="m", now=0.0)
    request = EngineRequest(word("a"), prompt_tokens=100, output_tokens=2)
    engine.submit(request, now=10.0)
    for ttft_s in (0.0, 0.1, 0.125, 400.0, 401.0):
        stats.first_token(request, 10.0 + ttft_s)
    buckets = {bound: value for (bound,), value in scraped(stats, 0.0)["time_to_first_token_seconds_bucket"].items()}
    # SGLang's own bounds.
    assert [float(bound) for bound in buckets] == [
        *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
        float("inf"),
    ]
    assert [buckets[bound] for bound in ("0.1", "0.2", "200.0", "400.0", "+Inf")] == [2.0, 3.0, 3.0, 4.0, 5.0]


def test_throughput_is_since_a_scrape_of_five_seconds_ago(engine: EngineModel[EngineRequest]) -> None:
    stats = EngineStats(engine, model_name="m", now=0.0)

    def at(now: float, tokens: int) -> float:
        engine.totals.generated_tokens = tokens
        return stats.throughput(now)

    # Less than a second counts as one.
    assert at(0.5, 10) == 10.0
    assert at(2.0, 30) == 15.0
    # The scrape at 0.5 is not five seconds old yet, the beginning is.
    assert at(5.4, 54) == pytest.approx(10.0)
    # Now it is: 50 tokens more in five seconds. Then that at 2.0 is.
    assert at(5.5, 60) == 10.0
    assert at(7.0, 85) == 11.0
    # After a pause the latest one before it counts, also for a second scrape at the same time.
    assert [at(50.0, 128), at(50.0, 128)] == [1.0, 1.0]
    assert at(51.0, 172) == pytest.approx(87 / 44)


def test_an_engine_that_has_done_nothing_has_no_share_of_it(engine: EngineModel[EngineRequest]) -> None:
    load: dict[str, Any] = EngineStats(engine, model_name="m", now=0.0).load(0.0)
    assert (load["cache_hit_rate"], load["gen_throughput"], load["token_usage"]) == (0.0, 0.0, 0.0)
