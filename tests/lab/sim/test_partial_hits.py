"""Simulated engines that find part of each prefix: what the Router expects of them is what they find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gorgo.lab.sim.records import SimRecord
from gorgo.policies.registry import make_policy
from tests.lab.sim.test_scenarios import conversations, run

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
