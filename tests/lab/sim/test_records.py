"""A record as a line of `requests.jsonl`."""

from __future__ import annotations

from gorgo.core.messages.decision import ShadowScore
from gorgo.lab.sim.records import SimRecord


def record() -> SimRecord:
    return SimRecord(
        id="7",
        scheduled_s=1.23456789,
        sent_s=2.3456789,
        input_tokens=100,
        replica="a",
        region="here",
        cached_tokens=64,
        output_tokens=9,
        ttft_ms=123.45678,
        e2e_s=1.23456789,
        status=200,
        error="why",
        weights_version=3,
        predicted_ttft_ms=120.06,
        estimated_cached_tokens=60,
        attempts=3,
    )


def test_a_line_has_the_keys_of_the_live_replay_in_milliseconds_and_microseconds() -> None:
    assert record().as_json() == {
        "id": "7",
        "scheduled_s": 1.234568,
        "sent_s": 2.345679,
        "replica": "a",
        "region": "here",
        "input_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 9,
        "ttft_ms": 123.457,
        "e2e_s": 1.234568,
        "status": 200,
        "error": "why",
        "weights_version": 3,
        "predicted_ttft_ms": 120.1,
        "estimated_cached_tokens": 60,
    }


def test_missing_values_are_null() -> None:
    line = SimRecord(id="7", scheduled_s=1.0, sent_s=1.0, input_tokens=100).as_json()
    known = {name for name, value in line.items() if value is not None}
    assert known == {"id", "scheduled_s", "sent_s", "input_tokens"}


def test_a_line_under_a_shadow_policy_has_its_rank_and_the_attempts_before() -> None:
    shadowed = record()
    shadowed.shadow = ShadowScore("gorgo-ms", 2, 30.0, 0.1)
    line = shadowed.as_json()
    assert (line["shadow_policy"], line["shadow_rank"], line["retries"]) == ("gorgo-ms", 2, 2)
    shadowed.attempts = 0
    assert shadowed.as_json()["retries"] == 0
