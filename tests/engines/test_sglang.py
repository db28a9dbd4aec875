from __future__ import annotations

from typing import Any

import pytest

from gorgo.engines.exposition import MAX_TEXT
from gorgo.engines.sglang import SGLang
from gorgo.lab.engine_server.stats import EngineStats
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import PROFILES
from gorgo.lab.sim.engine.request import EngineRequest
from tests.engines.scrapes import METRICS


def rank(**more: Any) -> dict[str, Any]:
    return {"num_running_reqs": 1, "total_prefill_uncached_tokens": 1000, "total_prefill_busy_us": 250_000, **more}


def test_prefill_counters_are_sums_over_ranks_in_seconds() -> None:
    sample = SGLang().read_capacity({"loads": [rank(), rank(total_prefill_busy_us=750_000)]})
    assert (sample.prefill_tokens_total, sample.prefill_busy_s_total) == (2000.0, 1.0)


@pytest.mark.parametrize("name", ["total_prefill_uncached_tokens", "total_prefill_busy_us"])
@pytest.mark.parametrize("value", [None, "many", -1, float("nan"), True, 10**400, 1e300])
def test_a_counter_that_one_rank_does_not_tell_is_unknown(name: str, value: object) -> None:
    sample = SGLang().read_capacity({"loads": [rank(), rank(**{name: value})]})
    assert None in (sample.prefill_tokens_total, sample.prefill_busy_s_total)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e308", "9" * 400])
def test_a_gauge_that_counts_nothing_real_is_unknown(value: str) -> None:
    sample = SGLang().read_metrics(f"sglang:num_running_reqs {value}\nsglang:num_queue_reqs 2")
    assert (sample.running_requests, sample.queued_requests) == (None, 2)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_longer_text_than_any_engine_writes_is_unknown(end: str) -> None:
    running = f"sglang:num_running_reqs 3{end}"
    assert SGLang().read_metrics(running + end * 100_000).running_requests == 3
    assert SGLang().read_metrics(running + end * MAX_TEXT).running_requests is None


def test_a_simulated_engine_tells_what_it_prefilled() -> None:
    profile = PROFILES["2xL40S-Qwen3.5-35B-A3B-FP8-estimate"]
    engine: EngineModel[EngineRequest] = EngineModel(profile)
    engine.submit(EngineRequest(bytes(4 * 3000), prompt_tokens=3000, output_tokens=1), now=0.0)
    step = engine.start_step(now=0.0)
    assert step is not None
    engine.finish_step(step)
    load = EngineStats(engine, model_name="m", now=0.0).load(1.0)
    sample = SGLang().read_capacity({"loads": [load]})
    assert sample.prefill_tokens_total == 3000
    assert sample.prefill_busy_s_total == pytest.approx(step.ends_s, abs=1e-6)


def test_prompt_tokens_since_the_start_are_read_over_ranks() -> None:
    text = 'sglang:prompt_tokens_total{dp_rank="0"} 7.0\nsglang:prompt_tokens_total{dp_rank="1"} 2.0'
    assert SGLang().read_metrics(text).prompt_tokens_total == 9.0
    assert SGLang().read_metrics(METRICS["sglang"]).prompt_tokens_total == 8_128_902.0
