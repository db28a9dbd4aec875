"""What is refused whatever it gains, and what is rolled back at once."""

from __future__ import annotations

from dataclasses import replace

from tuner.campaign.guard import Watch, crowded, errors_rose
from tuner.campaign.options import CampaignOptions
from tuner.objective import Figures, Sample

USUAL = Figures(128, 400.0, 4.0, 12.0, 0, 0.4)
SAMPLE = Sample(1, 0.0, "a", 1, 300.0, 2.0, 12.0, 200)
OPTIONS = CampaignOptions()


def test_more_errors_than_chance_explains_and_a_crowd_are_refused_with_their_figures() -> None:
    said = errors_rose(replace(USUAL, errors=6), USUAL, 0.05)
    assert said == "errors rose: 6 of 128 requests, 0 of 128 before"
    said = crowded(replace(USUAL, max_share=0.95), USUAL, 0.8)
    assert said == "one replica takes 95% of the requests; 40% before"
    assert crowded(replace(USUAL, max_share=0.7), USUAL, 0.8) is None
    assert crowded(replace(USUAL, max_share=None), USUAL, 0.8) is None


def test_errors_that_chance_explains_are_not_held_against_anybody() -> None:
    assert errors_rose(replace(USUAL, errors=4), replace(USUAL, errors=3), 0.05) is None
    assert errors_rose(replace(USUAL, errors=4), USUAL, 0.05) is None  # 1 in 16
    assert errors_rose(replace(USUAL, errors=5), USUAL, 0.05) is not None  # 1 in 32
    assert errors_rose(replace(USUAL, n=20_000, errors=900), replace(USUAL, n=20_000, errors=600), 0.001) is not None


def test_a_crowd_that_was_there_before_is_nobody_s_fault() -> None:
    assert crowded(replace(USUAL, max_share=1.0), replace(USUAL, max_share=1.0), 0.8) is None


def seen(watch: Watch, sample: Sample, count: int = 64) -> str | None:
    return next((reason for reason in [watch.add(sample) for _ in range(count)] if reason), None)


def test_a_running_window_several_times_slower_is_a_breach_within_64_samples() -> None:
    assert seen(Watch(OPTIONS, USUAL), replace(SAMPLE, e2e_s=13.0)) == (
        "running p95 E2E is 13.00 s, 3.2 times the usual 4.00 s"
    )
    assert seen(Watch(OPTIONS, USUAL), replace(SAMPLE, e2e_s=11.0)) is None


def test_a_bound_in_seconds_needs_no_reference() -> None:
    watch = Watch(CampaignOptions(hard_e2e_s=5.0), None)
    assert seen(watch, replace(SAMPLE, e2e_s=6.0)) == "running p95 E2E is 6.00 s, above the bound of 5 s"


def test_failures_of_one_in_twenty_are_a_breach_unless_that_is_how_it_was() -> None:
    failed = replace(SAMPLE, status=502)
    assert seen(Watch(OPTIONS, USUAL), failed) == "64 of the last 64 requests failed"
    assert seen(Watch(OPTIONS, replace(USUAL, errors=100)), failed) is None


def test_a_cleared_watch_forgets() -> None:
    watch = Watch(OPTIONS, USUAL)
    seen(watch, replace(SAMPLE, e2e_s=99.0), 63)
    watch.clear()
    assert seen(watch, SAMPLE, 63) is None
