"""One window against another: what is in a window, when two are compared, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tuner.campaign.options import CampaignOptions
from tuner.campaign.trial import Abandon, Outcome, Verdict
from tuner.campaign.windows import Guarded, Paper, compared
from tuner.objective import Figures, RollingWindow, Sample

USUAL = Figures(4, 400.0, 4.0, 12.0, 0, 0.5)
SAMPLE = Sample(1, 0.0, "a", 1, 400.0, 4.0, 12.0, 200)


def window(version: int, *, began_s: float = 0.0, count: int = 4, **changes: Any) -> list[Sample]:
    """A request a second, on two replicas in turn."""
    alike = [replace(SAMPLE, weights_version=version, arrived_s=began_s + i, replica="ab"[i % 2]) for i in range(count)]
    return [replace(sample, **changes) for sample in alike]


# -- guarded


def guarded(*, reference: Figures | None = USUAL, audit: bool = False, **options: Any) -> Guarded:
    """Windows of four samples, from the put on; the incumbent's weights are in force under version 5."""
    given: dict[str, Any] = {
        "mode": "guarded",
        "window": 4,
        "hop": 2,
        "discard_s": 0.0,
        "window_timeout_s": 60.0,
    } | options
    trial = Guarded(CampaignOptions(**given), reference, **({"audit": True} if audit else {}))
    trial.began(5, now=100.0)
    return trial


def at_offspring(**options: Any) -> Guarded:
    """The incumbent is measured, and the offspring's weights are in force under version 6."""
    trial = guarded(**options)
    assert trial.on_samples(window(5), now=110.0) is None
    assert trial.arm == "offspring"
    trial.began(6, now=120.0)
    return trial


def watched() -> Guarded:
    """Windows of eight, watched in fours."""
    trial = guarded(window=8, hop=4, reference=replace(USUAL, e2e_s_p95=1.0))
    trial.on_samples(window(5, count=8), now=110.0)
    trial.began(6, now=120.0)
    return trial


def verdict_of(outcome: Outcome) -> Verdict:
    assert isinstance(outcome, Verdict)
    return outcome


def test_the_incumbent_is_measured_again_and_then_the_offspring() -> None:
    trial = guarded()
    assert (trial.arm, trial.turn, trial.offspring_version) == ("incumbent", 1, None)
    assert trial.on_samples(window(5, count=3), now=110.0) is None
    assert trial.arm == "incumbent"
    assert trial.on_samples(window(5, count=1), now=110.0) is None
    assert (trial.arm, trial.turn, trial.offspring_version) == ("offspring", 2, None)
    trial.began(6, now=120.0)
    assert trial.offspring_version == 6
    assert trial.on_samples(window(6, count=3, ttft_ms=300.0), now=130.0) is None
    verdict = verdict_of(trial.on_samples(window(6, count=1, ttft_ms=300.0), now=130.0))
    assert verdict.accepted
    assert (verdict.objective_ms, verdict.incumbent_objective_ms) == (300.0, 400.0)
    assert verdict.reason == "p95 TTFT 25.0% lower in one window"
    assert verdict.figures == replace(USUAL, ttft_ms_p95=300.0, max_share=0.75)
    assert verdict.incumbent_figures == replace(USUAL, max_share=0.75)
    assert (verdict.refused, verdict.breach) == (False, False)


def test_a_window_holds_only_what_was_routed_under_its_own_version() -> None:
    trial = guarded()
    assert trial.on_samples(window(4) + window(5, count=3) + window(6), now=110.0) is None
    assert trial.turn == 1
    trial.on_samples(window(5, count=1), now=110.0)
    assert (trial.turn, trial.arm) == (2, "offspring")
    assert trial.on_samples(window(5, count=9), now=110.0) is None, "the offspring's weights are not in force yet"
    trial.began(6, now=120.0)
    assert trial.on_samples(window(5, count=9), now=130.0) is None


@pytest.mark.parametrize(("last_s", "full"), [(2.99, False), (3.0, True), (3.5, True)])
def test_the_first_seconds_of_a_window_are_left_out(last_s: float, full: bool) -> None:
    trial = guarded(discard_s=3.0)
    trial.on_samples(window(5, began_s=7.0, count=6), now=110.0)  # at 7, 8, ... 12 s: three that count
    trial.on_samples([replace(SAMPLE, weights_version=5, arrived_s=7.0 + last_s)], now=110.0)
    assert (trial.arm == "offspring") == full


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"ttft_ms": 399.0}, {}, None),
        ({"ttft_ms": 400.0}, {}, "p95 TTFT 0.0% higher in one window"),
        ({"ttft_ms": 404.0}, {}, "p95 TTFT 1.0% higher in one window"),
        ({"ttft_ms": None}, {}, "no first tokens in a window"),
        ({"ttft_ms": 300.0, "e2e_s": 4.3, "itl_ms_p95": 13.1}, {}, None),
        ({"ttft_ms": 300.0, "e2e_s": 4.5}, {}, "p95 TTFT 25.0% lower in one window; p95 E2E is 12% higher"),
        ({"ttft_ms": 300.0, "itl_ms_p95": 14.0}, {}, "p95 TTFT 25.0% lower in one window; p95 ITL is 17% higher"),
        ({"ttft_ms": 300.0, "e2e_s": 4.5}, {"guard": False}, None),
        ({"ttft_ms": 300.0, "e2e_s": 4.5}, {"margin": 0.2}, None),
        (
            {"ttft_ms": 300.0, "replica": "a"},
            {},
            "p95 TTFT 25.0% lower in one window; one replica takes 100% of the requests; 50% before",
        ),
        # An audit keeps a start within the margin of the defaults'.
        ({"ttft_ms": 439.0}, {"audit": True}, None),
        ({"ttft_ms": 440.5}, {"audit": True}, "p95 TTFT 10.1% higher in one window"),
        (
            {"ttft_ms": 439.0, "e2e_s": 4.5},
            {"audit": True},
            "p95 TTFT 9.7% higher in one window; p95 E2E is 12% higher",
        ),
    ],
)
def test_two_windows_are_compared(changes: dict[str, Any], options: dict[str, Any], words: str | None) -> None:
    verdict = verdict_of(at_offspring(**options).on_samples(window(6, **changes), now=130.0))
    assert verdict.accepted == (words is None)
    assert verdict.refused == ("; " in (words or ""))
    assert not verdict.breach
    assert words is None or verdict.reason == words


def test_a_window_that_does_not_fill_is_given_up() -> None:
    trial = guarded()
    assert trial.next_time() == 160.0
    trial.on_samples(window(5, count=3), now=159.9)
    assert trial.on_time(now=159.9) is None
    assert trial.on_time(now=160.0) == Abandon("3 samples in 60 s")
    assert trial.on_samples([], now=160.0) == Abandon("3 samples in 60 s")
    trial = guarded()
    trial.on_samples(window(5), now=110.0)
    assert trial.next_time() is None, "an answer is awaited"
    assert trial.on_time(now=9999.0) is None


def test_lost_samples_begin_the_same_arm_s_window_again() -> None:
    trial = at_offspring()
    trial.on_samples(window(6, count=3), now=130.0)
    trial.void()
    assert (trial.arm, trial.turn, trial.next_time()) == ("offspring", 3, None)
    trial.began(7, now=140.0)
    assert trial.on_samples(window(6) + window(7, count=3), now=150.0) is None
    verdict = verdict_of(trial.on_samples(window(7, count=1), now=150.0))
    assert verdict.incumbent_objective_ms == 400.0
    assert trial.offspring_version == 7


def test_the_offspring_s_first_seconds_run_from_its_own_first_arrival() -> None:
    trial = guarded(discard_s=3.0)
    trial.on_samples(window(5, count=7), now=110.0)
    trial.began(6, now=120.0)
    assert trial.on_samples(window(6, began_s=50.0, count=6), now=130.0) is None
    assert isinstance(trial.on_samples(window(6, began_s=56.0, count=1), now=130.0), Verdict)


def test_harm_in_an_offspring_s_window_is_a_breach_before_it_is_full() -> None:
    trial = watched()
    assert trial.on_samples(window(6, count=3, e2e_s=12.5), now=130.0) is None
    verdict = verdict_of(trial.on_samples(window(6, count=1, e2e_s=12.5), now=130.0))
    assert (verdict.accepted, verdict.refused, verdict.breach) == (False, True, True)
    assert verdict.reason == "running p95 E2E is 12.50 s, 3.1 times the usual 4.00 s"
    assert verdict.figures is not None
    assert verdict.figures.n == 3, "of which the last has just come"


def test_the_usual_is_the_incumbent_s_window_and_not_what_was_before() -> None:
    trial = watched()  # 4 s where 1 s was known
    assert trial.on_samples(window(6, count=7, e2e_s=3.5), now=130.0) is None


def test_the_incumbent_is_not_watched_and_what_was_seen_before_a_void_is_forgotten() -> None:
    trial = guarded(window=8, hop=4)
    assert trial.on_samples(window(5, count=8, e2e_s=90.0), now=110.0) is None
    trial = watched()
    trial.on_samples(window(6, count=3, e2e_s=90.0), now=130.0)
    trial.void()
    trial.began(7, now=140.0)
    assert trial.on_samples(window(7, count=3, e2e_s=90.0), now=150.0) is None


def test_without_the_guard_nothing_iswatched() -> None:
    trial = at_offspring(guard=False)
    verdict = verdict_of(trial.on_samples(window(6, ttft_ms=300.0, e2e_s=90.0), now=130.0))
    assert verdict.accepted
    trial.void()


def test_nothing_of_two_windows_outlives_the_process() -> None:
    assert guarded().state() == {}
    assert paper([])[0].state() == {}


# -- paper


def paper(before: Sequence[Sample], *, reference: Figures = USUAL, **options: Any) -> tuple[Paper, RollingWindow]:
    """A window of four that was filled with `before`, scored every two samples."""
    published: dict[str, Any] = {"mode": "paper", "window": 4, "hop": 2}
    given = CampaignOptions(**published | options)
    shared = RollingWindow(given.window, given.hop)
    for sample in before:
        shared.add(sample)
    return Paper(given, shared, reference), shared


def routed(trial: Paper, shared: RollingWindow, samples: Sequence[Sample]) -> Outcome:
    """As the campaign does: into the window first."""
    for sample in samples:
        shared.add(sample)
    return trial.on_samples(samples, now=0.0)


def test_a_full_window_is_compared_after_a_hop_whatever_it_was_routed_under() -> None:
    trial, shared = paper(window(5), reference=replace(USUAL, ttft_ms_p95=500.0))
    assert (trial.arm, trial.turn, trial.next_time()) == ("offspring", 1, None)
    assert routed(trial, shared, window(6, count=2)) is None, "nothing is in force yet"
    trial.began(6, now=0.0)
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
    trial.began(6, now=0.0)
    verdicts = [routed(trial, shared, window(6, count=1)) for _ in range(4)]
    needed = max(2, 4 - before)
    assert [verdict is not None for verdict in verdicts[:needed]] == [False] * (needed - 1) + [True]


def test_a_hop_begins_with_the_weights() -> None:
    trial, shared = paper(window(5))
    trial.began(6, now=0.0)
    routed(trial, shared, window(6, count=1))
    trial.void()
    assert (trial.turn, trial.offspring_version) == (2, None)
    assert routed(trial, shared, window(6, count=9)) is None
    trial.began(7, now=0.0)
    assert routed(trial, shared, window(7, count=1)) is None
    assert isinstance(routed(trial, shared, window(7, count=1)), Verdict)


@pytest.mark.parametrize(
    ("ttft_ms", "options", "words"),
    [
        (399.0, {}, None),
        (400.0, {}, "p95 TTFT 0.0% higher in one window"),
        (300.0, {}, None),
        (300.0, {"guard": True}, "p95 TTFT 25.0% lower in one window; p95 E2E is 125% higher"),
    ],
)
def test_the_published_protocol_looks_at_ttft_alone_unless_guarded(
    ttft_ms: float, options: dict[str, Any], words: str | None
) -> None:
    trial, shared = paper([], **options)
    trial.began(6, now=0.0)
    verdict = verdict_of(routed(trial, shared, window(6, ttft_ms=ttft_ms, e2e_s=9.0)))
    assert verdict.accepted == (words is None)
    assert verdict.refused == ("; " in (words or ""))
    assert words is None or verdict.reason == words
    assert (verdict.objective_ms, verdict.incumbent_objective_ms) == (ttft_ms, 400.0)
    assert (verdict.figures, verdict.incumbent_figures) == (shared.figures(), USUAL)


# -- both


@pytest.mark.parametrize(
    ("ours", "theirs", "margin", "expected"),
    [
        (300.0, 400.0, 0.0, (True, "p95 TTFT 25.0% lower in one window")),
        (400.0, 400.0, 0.0, (False, "p95 TTFT 0.0% higher in one window")),
        (500.0, 400.0, 0.0, (False, "p95 TTFT 25.0% higher in one window")),
        (500.0, 400.0, 0.25, (False, "p95 TTFT 25.0% higher in one window")),
        (499.0, 400.0, 0.25, (True, "p95 TTFT 24.8% higher in one window")),
        (None, 400.0, 0.0, (False, "no first tokens in a window")),
        (400.0, None, 0.0, (False, "no first tokens in a window")),
    ],
)
def test_a_lower_p95_wins(ours: float | None, theirs: float | None, margin: float, expected: tuple[bool, str]) -> None:
    assert compared(replace(USUAL, ttft_ms_p95=ours), replace(USUAL, ttft_ms_p95=theirs), margin) == expected
