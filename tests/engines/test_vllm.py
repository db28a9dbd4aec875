"""vLLM's metrics, as they are and as they were."""

from __future__ import annotations

import pytest

from gorgo.core.messages.request import EngineSample
from gorgo.engines.vllm import VLLM
from tests.engines.scrapes import METRICS


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
