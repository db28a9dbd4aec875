"""One window against another: what is in a window, when two are compared, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tuner.campaign.options import CampaignOptions
from tuner.campaign.trial import Outcome, Verdict
from tuner.campaign.windows import Paper, compared
from tuner.objective import RollingWindow, TunerSample, WindowStats

USUAL = WindowStats(4, 400.0, 4.0, 12.0, 0, 0.5)
SAMPLE = TunerSample(1, 0.0, "a", 1, 400.0, 4.0, 12.0, 200)


def window(version: int, *, began_s: float = 0.0, count: int = 4, **changes: Any) -> list[TunerSample]:
    """A request a second, on two replicas in turn."""
    alike = [replace(SAMPLE, weights_version=version, arrived_s=began_s + i, replica="ab"[i % 2]) for i in range(count)]
    return [replace(sample, **changes) for sample in alike]


def verdict_of(outcome: Outcome) -> Verdict:
    assert isinstance(outcome, Verdict)
    return outcome


def test_nothing_of_a_window_outlives_the_process() -> None:
    assert paper([])[0].state() == {}


# -- paper


def paper(
    before: Sequence[TunerSample], *, reference: WindowStats = USUAL, **options: Any
) -> tuple[Paper, RollingWindow]:
    """A window of four that was filled with `before`, scored every two samples."""
    published: dict[str, Any] = {"mode": "paper", "window": 4, "hop": 2}
    given = CampaignOptions(**published | options)
    shared = RollingWindow(given.window, given.hop)
    for sample in before:
        shared.add(sample)
    return Paper(given, shared, reference), shared


def routed(trial: Paper, shared: RollingWindow, samples: Sequence[TunerSample]) -> Outcome:
    """As the campaign does: into the window first."""
    for sample in samples:
        shared.add(sample)
    return trial.on_samples(samples, now=0.0)


def test_a_full_window_is_compared_after_a_hop_whatever_it_was_routed_under() -> None:
    trial, shared = paper(window(5), reference=replace(USUAL, ttft_ms_p95=500.0))
    assert (trial.arm, trial.turn, trial.next_time()) == ("offspring", 1, None)
    assert routed(trial, shared, window(6, count=2)) is None, "nothing is in force yet"
    trial.on_applied(6, now=0.0)
    assert trial.offspring_version == 6
    assert routed(trial, shared, window(6, count=1, ttft_ms=200.0)) is None
    verdict = verdict_of(routed(trial, shared, window(5, count=1, ttft_ms=380.0)))
    assert verdict.accepted
    assert verdict.objective_ms == pytest.approx(400.0), "two of the window are of before"
    assert trial.on_time(now=9999.0) is None


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_window_that_is_not_full_is_not_judged(before: int) -> None:
    # After a restart the proxy's samples of before are not there.
    trial, shared = paper(window(5, count=before))
    trial.on_applied(6, now=0.0)
    verdicts = [routed(trial, shared, window(6, count=1)) for _ in range(4)]
    needed = max(2, 4 - before)
    assert [verdict is not None for verdict in verdicts[:needed]] == [False] * (needed - 1) + [True]


def test_a_hop_begins_with_the_weights() -> None:
    trial, shared = paper(window(5))
    trial.on_applied(6, now=0.0)
    routed(trial, shared, window(6, count=1))
    trial.void()
    assert (trial.turn, trial.offspring_version) == (2, None)
    assert routed(trial, shared, window(6, count=9)) is None
    trial.on_applied(7, now=0.0)
    assert routed(trial, shared, window(7, count=1)) is None
    assert isinstance(routed(trial, shared, window(7, count=1)), Verdict)


@pytest.mark.parametrize(("ttft_ms", "accepted"), [(399.0, True), (400.0, False), (300.0, True)])
def test_the_published_protocol_evaluates_ttft_alone(ttft_ms: float, accepted: bool) -> None:
    trial, shared = paper([])
    trial.on_applied(6, now=0.0)
    verdict = verdict_of(routed(trial, shared, window(6, ttft_ms=ttft_ms, e2e_s=9.0)))
    assert (verdict.accepted, verdict.refused) == (accepted, False)
    assert (verdict.objective_ms, verdict.incumbent_objective_ms) == (ttft_ms, 400.0)
    assert (verdict.stats, verdict.incumbent_stats) == (shared.stats(), USUAL)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (300.0, 400.0, (True, "p95 TTFT 25.0% lower in one window")),
        (400.0, 400.0, (False, "p95 TTFT 0.0% higher in one window")),
        (500.0, 400.0, (False, "p95 TTFT 25.0% higher in one window")),
        (None, 400.0, (False, "no first tokens in a window")),
        (400.0, None, (False, "no first tokens in a window")),
    ],
)
def test_a_lower_p95_wins(ours: float | None, theirs: float | None, expected: tuple[bool, str]) -> None:
    assert compared(replace(USUAL, ttft_ms_p95=ours), replace(USUAL, ttft_ms_p95=theirs)) == expected


@pytest.mark.parametrize(("ours", "accepted"), [(400.0, True), (401.9, True), (402.0, False)])
def test_a_tolerance_accepts_equal_and_slightly_worse_candidates_as_released(ours: float, accepted: bool) -> None:
    """The reference is 400 ms."""
    assert compared(replace(USUAL, ttft_ms_p95=ours), USUAL, tolerance=0.005)[0] == accepted
    assert not compared(replace(USUAL, ttft_ms_p95=ours), USUAL)[0]


def test_a_trial_has_the_tolerance_that_it_is_given() -> None:
    shared = RollingWindow(4, 2)
    trial = Paper(CampaignOptions(mode="paper", window=4, hop=2), shared, USUAL, tolerance=0.005)
    trial.on_applied(6, now=0.0)
    assert verdict_of(routed(trial, shared, window(6, ttft_ms=401.0))).accepted
