"""A record as a line of `requests.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gorgo.core.messages.decision import ShadowScore
from gorgo.lab.sim.records import SimRecord
from gorgo.policies.registry import make_policy
from tests.lab.sim.test_scenarios import conversations, run


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


# Simulated engines that find part of each prefix: what the Router expects of them is what they find.


FEED = conversations(600)


def errors(records: Sequence[SimRecord]) -> float:
    """Differences of estimated and found cached tokens, of all found tokens."""
    pairs = [(record.estimated_cached_tokens or 0, record.cached_tokens or 0) for record in records]
    return sum(abs(estimated - found) for estimated, found in pairs) / sum(found for _, found in pairs)


@pytest.mark.parametrize(
    ("scenario", "at_most"), [("partial-hits-30", 0.2), ("partial-hits-60", 0.1), ("checkpoints-1024", 0.05)]
)
def test_what_is_expected_of_an_engine_that_finds_part_of_a_prefix_is_what_it_finds(
    scenario: str, at_most: float
) -> None:
    """Items of 512 tokens are found whole, so that a share of 30 % is no share of each prefix."""
    assert errors(run(scenario, make_policy("gorgo-ms"), FEED).records) < at_most


def test_engines_that_find_everything_are_expected_to() -> None:
    assert errors(run("steady", make_policy("gorgo-ms"), FEED).records) < 0.01
