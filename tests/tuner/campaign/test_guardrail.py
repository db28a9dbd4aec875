"""What is refused whatever it gains, and what is rolled back at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.campaign.guardrail import Guardrail, errors_rose, is_concentrated
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample, WindowStats

USUAL = WindowStats(128, 400.0, 4.0, 12.0, 0, 0.4)
SAMPLE = TunerSample(1, 0.0, "a", 1, 300.0, 2.0, 12.0, 200)
OPTIONS = CampaignOptions()


def test_more_errors_than_chance_explains_and_a_crowd_are_refused_with_their_figures() -> None:
    said = errors_rose(replace(USUAL, errors=6), USUAL, 0.05)
    assert said == "errors rose: 6 of 128 requests, 0 of 128 before"
    said = is_concentrated(replace(USUAL, max_share=0.95), USUAL, 0.8)
    assert said == "one replica takes 95% of the requests; 40% before"
    assert is_concentrated(replace(USUAL, max_share=0.7), USUAL, 0.8) is None
    assert is_concentrated(replace(USUAL, max_share=None), USUAL, 0.8) is None


def test_errors_are_weighed_by_the_requests_of_each_window() -> None:
    # Three errors, all under the offspring, which had a quarter of the requests: (1/4)^3 = 0.0156.
    offspring, incumbent = replace(USUAL, n=100, errors=3), replace(USUAL, n=300)
    assert errors_rose(offspring, incumbent, 0.0157) == "errors rose: 3 of 100 requests, 0 of 300 before"
    assert errors_rose(offspring, incumbent, 0.0156) is None
    # Two or more of three: 3 (1/4)^2 (3/4) + (1/4)^3 = 10/64.
    offspring, incumbent = replace(offspring, errors=2), replace(incumbent, errors=1)
    assert errors_rose(offspring, incumbent, 0.157) is not None
    assert errors_rose(offspring, incumbent, 0.156) is None


def test_errors_as_likely_as_alpha_have_risen() -> None:
    assert errors_rose(replace(USUAL, errors=1), USUAL, 0.5) is not None  # 1 in 2


def test_no_errors_or_nothing_to_compare_with_is_no_rise() -> None:
    assert errors_rose(USUAL, replace(USUAL, errors=9), 1.0) is None
    assert errors_rose(replace(USUAL, errors=9), replace(USUAL, n=0), 1.0) is None


def test_errors_that_chance_explains_are_not_held_against_anybody() -> None:
    assert errors_rose(replace(USUAL, errors=4), replace(USUAL, errors=3), 0.05) is None
    assert errors_rose(replace(USUAL, errors=4), USUAL, 0.05) is None  # 1 in 16
    assert errors_rose(replace(USUAL, errors=5), USUAL, 0.05) is not None  # 1 in 32
    assert errors_rose(replace(USUAL, n=20_000, errors=900), replace(USUAL, n=20_000, errors=600), 0.001) is not None


def test_a_crowd_that_was_there_before_is_nobody_s_fault() -> None:
    assert is_concentrated(replace(USUAL, max_share=1.0), replace(USUAL, max_share=1.0), 0.8) is None
    assert is_concentrated(replace(USUAL, max_share=0.95), replace(USUAL, max_share=0.9), 0.8) is not None
    assert is_concentrated(replace(USUAL, max_share=0.95), replace(USUAL, max_share=None), 0.8) is not None
    assert is_concentrated(replace(USUAL, max_share=None), replace(USUAL, max_share=None), 0.8) is None


def seen(watch: Guardrail, sample: TunerSample, count: int = 64) -> str | None:
    return next((reason for reason in [watch.add(sample) for _ in range(count)] if reason), None)


def test_a_running_window_several_times_slower_is_a_breach_within_64_samples() -> None:
    assert seen(Guardrail(OPTIONS, USUAL), replace(SAMPLE, e2e_s=13.0)) == (
        "running p95 E2E is 13.00 s, 3.2 times the usual 4.00 s"
    )
    assert seen(Guardrail(OPTIONS, USUAL), replace(SAMPLE, e2e_s=11.0)) is None


def test_a_bound_in_seconds_needs_no_reference() -> None:
    watch = Guardrail(CampaignOptions(hard_e2e_s=5.0), None)
    assert seen(watch, replace(SAMPLE, e2e_s=6.0)) == "running p95 E2E is 6.00 s, above the bound of 5 s"


def test_failures_of_one_in_twenty_are_a_breach_unless_that_is_how_it_was() -> None:
    failed = replace(SAMPLE, status=502)
    assert seen(Guardrail(OPTIONS, USUAL), failed) == "64 of the last 64 requests failed"
    assert seen(Guardrail(OPTIONS, replace(USUAL, errors=100)), failed) is None


def test_a_cleared_watch_forgets() -> None:
    watch = Guardrail(OPTIONS, USUAL)
    seen(watch, replace(SAMPLE, e2e_s=99.0), 63)
    watch.clear()
    assert seen(watch, SAMPLE, 63) is None


def with_errors(errors: int, count: int = 64, **changes: Any) -> list[TunerSample]:
    return [replace(SAMPLE, status=500 if i < errors else 200, **changes) for i in range(count)]


def breach(options: CampaignOptions, reference: WindowStats | None, samples: list[TunerSample]) -> str | None:
    watch = Guardrail(options, reference)
    return next((reason for reason in map(watch.add, samples) if reason), None)


@pytest.mark.parametrize(
    ("samples", "reference", "options", "broken"),
    [
        # More than the share of errors; a single one is chance.
        (with_errors(3), USUAL, {}, False),
        (with_errors(4), USUAL, {}, True),
        (with_errors(4), None, {}, True),
        (with_errors(16), None, {"hard_errors": 0.25}, False),
        (with_errors(17), None, {"hard_errors": 0.25}, True),
        (with_errors(1, 8), None, {"window": 16, "hop": 8}, False),
        (with_errors(2, 8), None, {"window": 16, "hop": 8}, True),
        # More than twice as many as were usual: an eighth, then a quarter of the requests.
        (with_errors(16), replace(USUAL, errors=16), {}, False),
        (with_errors(17), replace(USUAL, errors=16), {}, True),
        # E2E above its factor, or above its bound in seconds.
        (with_errors(0, e2e_s=12.0), USUAL, {}, False),
        (with_errors(0, e2e_s=12.1), USUAL, {}, True),
        (with_errors(0, e2e_s=12.1), None, {}, False),
        (with_errors(0, e2e_s=8.0), USUAL, {"hard_e2e_factor": 2.0}, False),
        (with_errors(0, e2e_s=8.1), USUAL, {"hard_e2e_factor": 2.0}, True),
        (with_errors(0, e2e_s=5.0), USUAL, {"hard_e2e_s": 5.0}, False),
        (with_errors(0, e2e_s=5.1), USUAL, {"hard_e2e_s": 5.0}, True),
        (with_errors(0, e2e_s=99.0), replace(USUAL, e2e_s_p95=None), {}, False),
        # Where all have failed there is no E2E, and that they failed is how it was.
        (with_errors(64, e2e_s=99.0), replace(USUAL, errors=128), {"hard_e2e_s": 5.0}, False),
    ],
)
def test_hard_bounds_are_broken_only_beyond_them(
    samples: list[TunerSample], reference: WindowStats | None, options: dict[str, Any], broken: bool
) -> None:
    assert (breach(CampaignOptions(**options), reference, samples) is not None) == broken


@pytest.mark.parametrize(
    ("options", "first", "then"),
    [({}, 64, 32), ({"window": 9, "hop": 9}, 4, 4), ({"window": 1, "hop": 1}, 1, 1), ({"window": 16, "hop": 2}, 8, 2)],
)
def test_the_watch_looks_at_half_a_window_every_hop(options: dict[str, Any], first: int, then: int) -> None:
    watch = Guardrail(CampaignOptions(hard_e2e_s=5.0, **options), None)
    found = [watch.add(replace(SAMPLE, e2e_s=6.0)) is not None for _ in range(first + then)]
    assert found == [False] * (first - 1) + [True] + [False] * (then - 1) + [True]
