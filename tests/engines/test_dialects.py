"""Dialects of engines: what the metrics and reports of each say, and hostile texts."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest

from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import OpenAI
from gorgo.engines.exposition import MAX_CHARACTERS, MAX_LINE, MAX_LINES, MAX_TEXT, read_gauges, read_series
from gorgo.engines.llamacpp import LlamaCpp
from gorgo.engines.sglang import SGLang
from gorgo.engines.vllm import VLLM
from gorgo.lab.engine_server.stats import EngineStats
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import PROFILES
from gorgo.lab.sim.engine.request import EngineRequest
from tests.engines.scrapes import LLAMACPP_SLOTS, METRICS

# --- Dialects of engines: what the metrics and reports of SGLang, vLLM, llama.cpp and other OpenAI servers say.


# SGLang: sums over its ranks, and counters that one rank does not tell.
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


# vLLM's metrics, as they are and as they were.
def test_a_real_scrape_is_read_to_the_token() -> None:
    sample = VLLM().read_metrics(METRICS["vllm"])
    assert (sample.running_requests, sample.queued_requests) == (8.0, 3.0)
    assert sample.kv_capacity_tokens == 12_800.0
    assert sample.prompt_tokens_total == 4_226.0
    # 63 of 399 blocks, as the engine counts them.
    assert sample.used_tokens == pytest.approx(12_800 * 63 / 399)


def test_names_before_version_0_10_are_read_too() -> None:
    text = """
vllm:num_requests_running{model_name="m"} 4.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""
    expected = EngineSample(running_requests=4.0, queued_requests=1.0, used_tokens=4_000.0, kv_capacity_tokens=16_000.0)
    assert VLLM().read_metrics(text) == expected


def test_data_parallel_engines_add_up_each_with_its_own_pool() -> None:
    text = """
vllm:num_requests_running{engine="0"} 4.0
vllm:num_requests_running{engine="1"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:cache_config_info{engine="0",kv_cache_size_tokens="1000"} 1.0
vllm:cache_config_info{engine="1",kv_cache_size_tokens="2000"} 1.0
"""
    sample = VLLM().read_metrics(text)
    assert (sample.running_requests, sample.used_tokens, sample.kv_capacity_tokens) == (6.0, 1_000.0, 3_000.0)


def test_a_share_of_a_pool_of_unknown_size_is_no_amount() -> None:
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:cache_config_info{engine="0",num_gpu_blocks="None"} 1.0'
    assert VLLM().read_metrics(text) == EngineSample()


def test_prompt_tokens_since_the_start_add_up_over_engines() -> None:
    text = 'vllm:prompt_tokens_total{engine="0"} 10.0\nvllm:prompt_tokens_total{engine="1"} 5.0'
    assert VLLM().read_metrics(text).prompt_tokens_total == 15.0


# llama.cpp's metrics and slots.
def test_a_real_scrape_tells_requests_and_of_tokens_only_those_since_its_start() -> None:
    expected = EngineSample(running_requests=2.0, queued_requests=3.0, prompt_tokens_total=440.0)
    assert LlamaCpp().read_metrics(METRICS["llamacpp"]) == expected


def test_versions_that_still_told_their_kv_tokens_are_read() -> None:
    assert LlamaCpp().read_metrics("llamacpp:kv_cache_tokens 1234").used_tokens == 1_234.0


def test_real_slots_tell_places_and_what_they_hold() -> None:
    sample = LlamaCpp().read_capacity(LLAMACPP_SLOTS)
    assert (sample.running_requests, sample.max_running_requests) == (2.0, 2.0)
    assert sample.used_tokens is not None
    assert sample.used_tokens > 400


def test_the_pool_is_never_guessed_because_slots_may_share_it() -> None:
    assert LlamaCpp().read_capacity(LLAMACPP_SLOTS).kv_capacity_tokens is None


def test_a_slot_that_tells_no_tokens_leaves_their_number_unknown() -> None:
    slots = [{"is_processing": True}, {"is_processing": False, "n_prompt_tokens": 5}]
    sample = LlamaCpp().read_capacity(slots)
    assert (sample.running_requests, sample.used_tokens, sample.max_running_requests) == (1.0, None, 2.0)


def test_a_number_of_tokens_that_no_float_holds_is_unknown() -> None:
    assert LlamaCpp().read_capacity([{"is_processing": True, "n_prompt_tokens": 10**400}]).used_tokens is None


# A server of which only the API is known.
def test_nothing_but_the_api_is_asked_for() -> None:
    assert OpenAI().probe_path == "/v1/models"
    assert OpenAI().metrics_path is None
    assert OpenAI().loads_path is None


# --- Metrics texts of hostile engines: what is read of them, and how little of the processor they take.


#: Seconds of the processor for one text: hundreds of times the usual, a fraction of what a quadratic search takes.
LIMIT_S = 0.5


def test_name_that_starts_another_is_read_once() -> None:
    assert read_gauges("ab 1\na 2\nab_c 4\n", {"a", "ab"}) == {"a": 2.0, "ab": 1.0}


def test_first_and_last_line_are_read() -> None:
    assert read_gauges("a 1\nb 2", {"a", "b"}) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "labels",
    [
        "a" * 8000,
        'a="' * 2600,
        'a="\\\\' * 1600,
        ", " * 4000,
        "," + " " * 8000,
        'a="b",' * 1300,
        "}" * 8000,
        "} " * 4000,
    ],
)
def test_labels_of_any_form_take_time_in_proportion_to_their_length(labels: str) -> None:
    line = f"vllm:cache_config_info{{{labels}}} 1\n"
    assert len(line) <= MAX_LINE
    text = line * (MAX_CHARACTERS // len(line))
    began = thread_time()
    VLLM().read_metrics(text)
    read_gauges(text, {"vllm:cache_config_info"})
    assert thread_time() - began < LIMIT_S


@pytest.mark.parametrize(
    "text",
    [
        "a{" + "x" * MAX_LINE + "} 1",
        "a 1\n" * (MAX_LINES + 1),
        ("a " + "1" * 1000 + "\n") * (MAX_CHARACTERS // 1000),
        "a 1\n" + "b 1\n" * (MAX_TEXT // 4),
    ],
)
def test_text_with_more_than_the_bounds_is_not_read(text: str) -> None:
    assert read_gauges(text, {"a"}) == {}
    assert read_series(text, {"a"}) == {}


def test_many_other_lines_hinder_nothing() -> None:
    other = 'engine_histogram_bucket{le="0.5"} 1\n'
    text = other * (MAX_TEXT // len(other) - 1) + "a 1\n"
    began = thread_time()
    assert read_gauges(text, {"a", "b", "c"}) == {"a": 1.0}
    assert thread_time() - began < LIMIT_S
