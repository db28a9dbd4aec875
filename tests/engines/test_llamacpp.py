"""llama.cpp's metrics and slots."""

from __future__ import annotations

from gorgo.core.messages.request import EngineSample
from gorgo.engines.llamacpp import LlamaCpp
from tests.engines.scrapes import LLAMACPP_SLOTS, METRICS


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
