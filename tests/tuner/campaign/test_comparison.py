"""Pairs of blocks to verdicts: every clause of the judge, and both sides of every boundary.

Pairs that are all alike are the simplest evidence. `EARLY` shows a gain of six such pairs, `LATE` of seven; an audit,
at half of alpha, takes one pair more with either. `test_sequential` says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import log
from typing import Any

import numpy as np
import pytest

from gorgo.core.numeric import Floats
from gorgo.errors import TunerError
from tuner.campaign.comparison import (
    BlockPair,
    Guardrail,
    PairComparison,
    SignFlipTest,
    Verdict,
    change,
    errors_rose,
    is_concentrated,
    mean,
    noise,
    pooled,
    ratios,
)
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample, WindowStats
from tuner.saved_fields import SavedFields

EARLY, LATE = 14, 1
INCUMBENT = WindowStats(200, 400.0, 4.0, 12.0, 0, 0.4)
#: A test that shows nothing before the eighth pair, so that what is decided earlier is decided by another clause.
BLIND: dict[str, Any] = {"alpha": 1e-6}


def pair(ttft: float = 1.0, e2e: float = 1.0, itl: float = 1.0, *, share: float = 0.4, errors: int = 0) -> BlockPair:
    """Offspring over incumbent, in factors."""
    return BlockPair(INCUMBENT, WindowStats(200, 400.0 * ttft, 4.0 * e2e, 12.0 * itl, errors, share))


def judged(found: Sequence[BlockPair], *, seed: int = EARLY, audit: bool = False, **options: Any) -> Verdict | None:
    return PairComparison(CampaignOptions(**options), seed, audit=audit).verdict(found)


def outcome(verdict: Verdict | None) -> str | None:
    if verdict is None:
        return None
    assert (type(verdict.accepted), type(verdict.refused)) == (bool, bool)
    assert not (verdict.accepted and verdict.refused)
    return "accepted" if verdict.accepted else "refused" if verdict.refused else "rejected"


GAIN = pair(ttft=0.8)
#: Ahead by half a percent on average, and nothing that a test could show.
SEESAW = [pair(ttft=0.9), pair(ttft=1.1)]
#: The margin of what is accepted is as wide as that of what is refused.
WIDE: dict[str, Any] = {"e2e_margin": 9.0}
#: E2E a fifth above on average, by three blocks of eight: over the margin, and not shown to be.
UNEVEN = [pair(ttft=0.8, e2e=1.6 if i in (1, 4, 6) else 1.0) for i in range(8)]


@pytest.mark.parametrize(
    ("pairs", "options", "expected"),
    [
        ([], {}, None),
        # Shown to be better, at the first look that alpha allows.
        ([GAIN] * 5, {}, None),
        ([GAIN] * 6, {}, "accepted"),
        ([GAIN] * 6, {"seed": LATE}, None),
        ([GAIN] * 7, {"seed": LATE}, "accepted"),
        ([GAIN] * 8, {"alpha": 0.001}, None),
        # Not ahead from `futility_pairs` on; a draw is not ahead.
        ([pair()] * 7, {}, None),
        ([pair()] * 8, {}, "rejected"),
        ([pair()] * 9, {}, "rejected"),
        ([pair(ttft=1.05)] * 7, {}, None),
        ([pair(ttft=1.05)] * 8, {}, "rejected"),
        ([pair()] * 4, {"futility_pairs": 5}, None),
        ([pair()] * 5, {"futility_pairs": 5}, "rejected"),
        # Ahead and not shown: on to the last pair, and then it does not move.
        (SEESAW * 4, {}, None),
        ([*SEESAW * 9, GAIN], {}, None),
        (SEESAW * 10, {}, "rejected"),
        ([*SEESAW, GAIN], {"pairs": 4}, None),
        (SEESAW * 2, {"pairs": 4}, "rejected"),
        # TTFT that looks worse by more than the margin: 1.1, 1.1^2.25 = 1.239 after two pairs, 1.1^9 = 2.358 after one.
        ([pair(ttft=2.34)], BLIND, None),
        ([pair(ttft=2.37)], BLIND, "rejected"),
        ([pair(ttft=1.23)] * 2, BLIND, None),
        ([pair(ttft=1.25)] * 2, BLIND, "rejected"),
        ([pair(ttft=1.09)] * 3, BLIND, None),
        ([pair(ttft=1.11)] * 3, BLIND, "rejected"),
        ([pair(ttft=1.09)] * 7, BLIND, None),
        ([pair(ttft=1.11)] * 7, BLIND, "rejected"),
        ([pair(ttft=1.11)] * 3, BLIND | {"margin": 0.12}, None),
        ([pair(ttft=1.11)] * 3, BLIND | {"harm_pairs": 4}, None),
        ([pair(ttft=1.11)] * 4, BLIND | {"harm_pairs": 4}, "rejected"),
        ([pair(ttft=2.0)] * 3, BLIND | {"margin": 1.0}, None),  # the margin itself is not above it
        ([pair(ttft=1.11)] * 3, BLIND | {"guard": False}, "rejected"),
        # Pairs that differ by much show less: 1.5 and 1.1 are 1.28 on average, and may be below the margin.
        ([pair(ttft=1.5), pair(ttft=1.1)], BLIND, None),
        ([pair(0.8, e2e=1.5), pair(0.8, e2e=1.1)], BLIND, None),
        ([pair(ttft=1.31), pair(ttft=1.25)], BLIND, "rejected"),
        ([pair(0.8, e2e=1.31), pair(0.8, e2e=1.25)], BLIND, "refused"),
        ([pair(ttft=1.5), pair(ttft=1.1)] * 3, BLIND, "rejected"),
        # The same for what the guard minds, whatever it gains: refused then.
        ([pair(0.8, e2e=2.34)], BLIND, None),
        ([pair(0.8, e2e=2.37)], BLIND, "refused"),
        ([pair(0.8, itl=2.34)], BLIND, None),
        ([pair(0.8, itl=2.37)], BLIND, "refused"),
        ([pair(0.8, e2e=1.23)] * 2, BLIND, None),
        ([pair(0.8, e2e=1.25)] * 2, BLIND, "refused"),
        ([pair(0.8, e2e=1.09)] * 3, BLIND, None),
        ([pair(0.8, e2e=1.11)] * 3, BLIND, "refused"),
        ([pair(0.8, itl=1.11)] * 3, BLIND, "refused"),
        ([pair(0.8, e2e=1.11)] * 3, BLIND | {"harm_pairs": 4}, None),
        ([pair(0.8, e2e=2.0)] * 3, BLIND | {"margin": 1.0}, None),
        # Shown to be worse by more than the margin, long before the eye would give up.
        ([pair(0.8, e2e=1.2)] * 5, {"harm_pairs": 20}, None),
        ([pair(0.8, e2e=1.2)] * 6, {"harm_pairs": 20}, "refused"),
        ([pair(0.8, itl=1.2)] * 6, {"harm_pairs": 20}, "refused"),
        ([pair(0.8, e2e=1.09)] * 6, {"harm_pairs": 20} | WIDE, "accepted"),
        ([pair(0.8, e2e=1.2)] * 6, {"harm_pairs": 20, "margin": 0.21} | WIDE, "accepted"),
        # Over the margin so far and not shown: no reason to refuse, and none to accept.
        (UNEVEN, {"harm_pairs": 20} | WIDE, None),
        (UNEVEN, {"harm_pairs": 20, "margin": 0.20} | WIDE, "accepted"),
        (UNEVEN, {"harm_pairs": 20, "pairs": 8} | WIDE, "refused"),
        ([pair(0.8, e2e=2.0)] * 6, {"harm_pairs": 20, "margin": 1.0} | WIDE, "accepted"),
        (UNEVEN, {"harm_pairs": 20, "guard": False}, "accepted"),
        ([pair(0.8, e2e=2.0), pair(0.8, e2e=2.0)] + [GAIN] * 4, {"harm_pairs": 20}, None),
        # Answers end later by more than a hundredth: none to accept, and refused from `futility_pairs` on.
        ([pair(0.8, e2e=1.0099)] * 6, {}, "accepted"),
        ([pair(0.8, e2e=1.011)] * 6, {}, None),
        ([pair(0.8, e2e=1.011)] * 7, {}, None),
        ([pair(0.8, e2e=1.011)] * 8, {}, "refused"),
        ([pair(0.8, e2e=1.04)] * 6, {"e2e_margin": 0.05}, "accepted"),
        ([pair(0.8, e2e=1.011)] * 6, {"guard": False}, "accepted"),
        ([*[pair(0.8, e2e=1.05)] * 2, *[pair(0.8, e2e=0.98)] * 6], {}, "accepted"),
        # One replica takes too much: none to accept before `futility_pairs`, refused from there on.
        ([pair(0.8, share=0.80)] * 6, {}, "accepted"),
        ([pair(0.8, share=0.81)] * 6, {}, None),
        ([pair(0.8, share=0.95)] * 6, {}, None),
        ([pair(0.8, share=0.95)] * 7, {}, None),
        ([pair(0.8, share=0.95)] * 8, {}, "refused"),
        ([pair(0.8, share=0.95)] * 9, {}, "refused"),
        ([pair(0.8, share=0.95)] * 6, {"max_share": 0.95}, "accepted"),
        ([pair(0.8, share=0.95)] * 6, {"pairs": 6}, "refused"),
        ([pair(0.8, share=0.95)] * 6, {"guard": False}, "accepted"),
        ([pair(0.8, share=0.95)] * 4, {"futility_pairs": 4}, "refused"),
        # Errors: from `futility_pairs` on, at alpha over all looks. 2^-8 is above 0.05 / 20, 2^-9 below.
        ([pair(1.0001, errors=1)] * 7 + [pair(0.9, errors=1)], {}, None),
        ([pair(1.0001, errors=1)] * 7 + [pair(0.9, errors=2)], {}, "refused"),
        ([pair(1.0001, errors=2)] * 6 + [pair(0.9, errors=2)], {}, None),
        ([pair(1.0001, errors=1)] * 7 + [pair(0.9, errors=2)], {"pairs": 40}, None),
        ([pair(1.0001, errors=1)] * 7 + [pair(0.9, errors=9)], {"guard": False}, None),
    ],
)
def test_pairs_of_blocks_are_judged(pairs: list[BlockPair], options: dict[str, Any], expected: str | None) -> None:
    assert outcome(judged(pairs, **options)) == expected


WORSE_TTFT, WORSE_E2E = pair(ttft=1.02), pair(e2e=1.02)


@pytest.mark.parametrize(
    ("pairs", "options", "expected"),
    [
        # Shown to be worse in either, at half of alpha each; by how much does not matter.
        ([WORSE_TTFT] * 6, {}, None),
        ([WORSE_TTFT] * 7, {}, "refused"),
        ([WORSE_TTFT] * 7, {"seed": LATE}, None),
        ([WORSE_TTFT] * 8, {"seed": LATE}, "refused"),
        ([WORSE_E2E] * 6, {}, None),
        ([WORSE_E2E] * 7, {}, "refused"),
        ([WORSE_E2E] * 7, {"seed": LATE}, None),
        # What looks worse is no reason: an audit waits for the evidence.
        ([pair(ttft=3.0, e2e=3.0, itl=3.0)] * 5, {}, None),
        ([pair(itl=3.0)] * 8, {}, "accepted"),
        # Not behind in either from `futility_pairs` on; a draw is not behind.
        ([pair()] * 7, {}, None),
        ([pair()] * 8, {}, "accepted"),
        ([pair(0.9, e2e=0.9)] * 8, {}, "accepted"),
        ([pair()] * 5, {"futility_pairs": 5}, "accepted"),
        # Behind in one of them, not shown: it stays at the last pair.
        ([pair(1.3)] + [pair()] * 7, {}, None),
        ([pair(0.8, e2e=1.3)] + [pair()] * 7, {}, None),
        ([pair(1.3)] + [pair()] * 18, {}, None),
        ([pair(1.3)] + [pair()] * 19, {}, "accepted"),
        ([pair(1.3)] + [pair()] * 3, {"pairs": 4}, "accepted"),
        # Crowding and errors, from `futility_pairs` on; errors at alpha: 2^-5 is below 0.05, 2^-4 above.
        ([pair(share=0.81)] * 7, {}, None),
        ([pair(share=0.80)] * 8, {}, "accepted"),
        ([pair(share=0.81)] * 8, {}, "refused"),
        ([pair(share=0.81)] * 8, {"max_share": 0.81}, "accepted"),
        ([pair()] * 7 + [pair(errors=4)], {}, "accepted"),
        ([pair()] * 7 + [pair(errors=5)], {}, "refused"),
        ([pair()] * 6 + [pair(errors=5)], {}, None),
    ],
)
def test_a_start_stays_unless_it_is_shown_to_be_worse_than_the_defaults(
    pairs: list[BlockPair], options: dict[str, Any], expected: str | None
) -> None:
    assert outcome(judged(pairs, audit=True, **options)) == expected


@pytest.mark.parametrize(
    ("pairs", "options", "reason"),
    [
        ([GAIN] * 6, {}, "p95 TTFT 20.0% lower in 6 pairs of blocks, by chance 1.3%"),  # 26 of 2,000 patterns
        ([pair(ttft=1.05)] * 8, {}, "p95 TTFT 5.0% higher in 8 pairs of blocks: not ahead"),
        ([pair(ttft=1.2)] * 3, {}, "p95 TTFT 20.0% higher in 3 pairs of blocks: given up before it does harm"),
        ([pair(0.8, e2e=1.2)] * 3, {}, "p95 E2E 20.0% higher in 3 pairs of blocks: given up before it does harm"),
        ([pair(0.8, itl=1.2)] * 3, {}, "p95 ITL 20.0% higher in 3 pairs of blocks: given up before it does harm"),
        ([pair(0.8, e2e=1.2)] * 6, {}, "p95 E2E is worse: 20.0% higher in 6 pairs of blocks"),
        ([pair(0.8, share=0.95)] * 8, {}, "one replica takes 95% of the requests; 40% before"),
        (
            [pair(0.8, share=0.95)] * 6,
            {"pairs": 6},
            "p95 TTFT 20.0% lower in 6 pairs of blocks: one replica takes 95% of the requests; 40% before",
        ),
        (
            UNEVEN,
            {"harm_pairs": 20, "pairs": 8} | WIDE,
            "p95 TTFT 20.0% lower in 8 pairs of blocks: p95 E2E 19.3% higher",
        ),
        ([pair(0.8, e2e=1.02)] * 8, {}, "p95 TTFT 20.0% lower in 8 pairs of blocks, paid for with p95 E2E 2.0% higher"),
        (SEESAW * 2, {"pairs": 4}, "p95 TTFT 0.5% lower in 4 pairs of blocks: not shown to be better"),
        ([pair(0.9, errors=2)] * 8, {}, "errors rose: 16 of 1600 requests, 0 of 1600 before"),
        ([WORSE_TTFT] * 7, {"audit": True}, "the start is worse than the defaults: p95 TTFT 2.0% higher"),
        ([WORSE_E2E] * 7, {"audit": True}, "the start is worse than the defaults: p95 E2E 2.0% higher"),
        (
            [pair(share=0.9)] * 8,
            {"audit": True},
            "the start is worse than the defaults: one replica takes 90% of the requests; 40% before",
        ),
        ([pair()] * 8, {"audit": True}, "the start is not behind the defaults in 8 pairs of blocks"),
        (
            [pair(1.3)] + [pair()] * 3,
            {"audit": True, "pairs": 4},
            "the start is not shown to be worse than the defaults in 4 pairs of blocks",
        ),
    ],
)
def test_a_verdict_says_why(pairs: list[BlockPair], options: dict[str, Any], reason: str) -> None:
    verdict = judged(pairs, **options)
    assert verdict is not None
    assert verdict.reason == reason


def as_row(stats: WindowStats | None) -> dict[str, Any]:
    assert stats is not None
    return asdict(stats)


def test_a_verdict_has_the_figures_of_all_blocks_of_each_arm() -> None:
    pairs = [
        BlockPair(WindowStats(100, 100.0, 1.0, 4.0, 1, 0.5), WindowStats(300, 200.0, 2.0, 9.0, 3, 0.4)),
        BlockPair(WindowStats(300, 400.0, 9.0, 16.0, 2, 0.7), WindowStats(100, 800.0, 8.0, 4.0, 4, 0.8)),
    ]
    verdict = judged(pairs, pairs=2, guard=False)
    assert verdict is not None
    assert verdict.objective_ms == pytest.approx(400.0)
    assert verdict.incumbent_objective_ms == pytest.approx(200.0)
    assert as_row(verdict.stats) == pytest.approx(as_row(WindowStats(400, 400.0, 4.0, 6.0, 7, 0.5)))
    assert as_row(verdict.incumbent_stats) == pytest.approx(as_row(WindowStats(400, 200.0, 3.0, 8.0, 3, 0.65)))
    assert not verdict.breach


def without(side: str, *stats: str) -> BlockPair:
    """A pair whose one side lacks figures: a block of answers without a second token has no ITL."""
    usual = pair(0.8, e2e=1.5, itl=1.5)
    return replace(usual, **{side: replace(getattr(usual, side), **dict.fromkeys(stats))})


@pytest.mark.parametrize("side", ["incumbent", "offspring"])
def test_a_pair_without_a_figure_says_nothing_about_it(side: str) -> None:
    lacking = without(side, "e2e_s_p95", "itl_ms_p95")
    assert outcome(judged([lacking] * 6)) == "accepted"
    assert outcome(judged([lacking] * 5 + [pair(0.8, e2e=1.2)])) == "refused"
    unmeasured = replace(lacking, **{side: replace(getattr(lacking, side), ttft_ms_p95=None)})
    assert outcome(judged([unmeasured] * 8, audit=True)) == "accepted"


def test_a_share_that_is_not_known_is_no_crowd() -> None:
    unknown = replace(INCUMBENT, max_share=None)
    assert pooled([unknown, unknown]).max_share == 0.0
    assert pooled([]) == WindowStats(0, None, None, None, 0, None)
    assert pooled([replace(INCUMBENT, ttft_ms_p95=None), INCUMBENT]).ttft_ms_p95 == pytest.approx(400.0)


def test_logarithms_of_ratios_are_named_by_their_direction() -> None:
    (ratio,) = ratios([pair(ttft=1.1)], lambda stats: stats.ttft_ms_p95)
    assert change(ratio) == "10.0% higher"
    assert change(-ratio) == "9.1% lower"
    assert (mean([1.0, 2.0, 6.0]), mean([])) == (3.0, 0.0)


def test_a_pair_comes_back_from_json_with_each_arm_in_its_place() -> None:
    kept = pair(0.8, e2e=1.2, itl=0.9, share=0.5, errors=2)
    assert BlockPair.of(SavedFields(json.loads(json.dumps(kept.as_json())), "saved pair")) == kept


def test_candidates_accepted_before_have_used_up_what_e2e_may_lose() -> None:
    def verdict(e2e: float, pairs: int) -> Verdict | None:
        before = PairComparison(CampaignOptions(), EARLY, audit=False, e2e_lost=log(1.006))
        return before.verdict([pair(0.8, e2e=e2e)] * pairs)

    assert outcome(verdict(1.003, 6)) == "accepted"
    assert verdict(1.006, 7) is None
    refused = verdict(1.006, 8)
    assert outcome(refused) == "refused"
    assert refused is not None
    assert refused.reason.endswith("paid for with p95 E2E 0.6% higher after 0.6% higher before")


def test_noise_of_a_mean_falls_with_the_pairs_and_one_pair_shows_none() -> None:
    assert (noise([]), noise([0.3])) == (0.0, 0.0)
    assert noise([0.2, 0.4]) == pytest.approx(1.376 * 0.1)
    assert noise([0.2, 0.3, 0.4]) == pytest.approx(1.061 * 0.1 / 3**0.5)
    many = [0.2, 0.4] * 50
    assert noise(many) == pytest.approx(0.879 * 0.1 / 99**0.5)


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


PAIRS, ALPHA = 20, 0.05


def gains(rng: np.random.Generator, *, effect: float, rho: float, kind: str) -> Floats:
    """Differences of a whole switchback whose block noise has sd 0.12 and autocorrelation `rho` from block to block."""
    noise = rng.standard_normal(2 * PAIRS) * 0.12 * (1 - rho**2) ** 0.5
    for i in range(1, 2 * PAIRS):
        noise[i] += rho * noise[i - 1]
    if kind == "bursts":
        noise += rng.random(2 * PAIRS) < 0.05
    if kind == "trend":
        noise += np.linspace(0, 1, 2 * PAIRS)
    blocks, first = noise.reshape(-1, 2), rng.random(PAIRS) < 0.5
    return np.asarray(np.where(first, 1, -1) * (blocks[:, 0] - blocks[:, 1]) + effect)


def is_significant(count: int, *, effect: float, rho: float, kind: str = "") -> float:
    """Share of switchbacks that show a gain at any of their twenty looks."""
    found = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 77])
        test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=int(rng.integers(2**31)))
        found += test.is_significant(gains(rng, effect=effect, rho=rho, kind=kind).tolist())
    return found / count


@pytest.mark.parametrize(("rho", "kind"), [(0.0, ""), (0.9, ""), (0.5, "bursts"), (0.5, "trend")])
def test_where_there_is_no_gain_one_is_shown_as_rarely_as_stated(rho: float, kind: str) -> None:
    # Three standard errors of 600 draws. Of 10,000 it was 4.65 % (rho 0) and 5.17 % (bursts), give or take 0.2 %.
    assert is_significant(600, effect=0.0, rho=rho, kind=kind) < ALPHA + 0.027


def test_a_tenth_is_found_more_often_than_not() -> None:
    assert is_significant(100, effect=-log(0.9), rho=0.0) > 0.65
    assert is_significant(100, effect=-log(0.9), rho=0.5) > 0.85


def test_a_loss_is_hardly_ever_taken_for_a_gain() -> None:
    assert is_significant(300, effect=-0.05, rho=0.0) < 0.01


def test_what_is_clear_is_shown_after_seven_pairs_and_never_before_chance_allows() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=1)
    first = next(n for n in range(1, PAIRS + 1) if test.is_significant([1.0 + 0.01 * i for i in range(n)]))
    assert first in (6, 7, 8)  # 2^-7 is below 7/20 of alpha


@pytest.mark.parametrize(("pairs", "alpha"), [(20, 0.05), (12, 0.1), (1, 0.6)])
def test_gains_that_are_alike_are_shown_when_few_enough_patterns_reach_them(pairs: int, alpha: float) -> None:
    # Of 2,000 patterns alpha * 2,000 * k / pairs may be crossed out by look k, and all that tie with the real one go
    # together. `chance` says how many tie: those whose first k signs are all plus.
    for seed in range(40):
        test = SignFlipTest(pairs=pairs, alpha=alpha, seed=seed)
        for looks in range(1, pairs + 1):
            few = [round(test.chance([1.0] * k) * 2000) <= int(alpha * 2000 * k / pairs) for k in range(1, looks + 1)]
            assert test.is_significant([1.0] * looks) == any(few), (seed, looks)
            if any(few):
                break


def test_gains_after_the_last_pair_are_not_looked_at() -> None:
    test = SignFlipTest(pairs=8, alpha=ALPHA, seed=2)
    losses, gained = [-0.1] * 8, [0.1] * 8
    assert not test.is_significant([*losses, *[9.0] * 30])
    assert test.is_significant([*gained, *[-9.0] * 30])
    assert test.chance([*gained, -9.0]) == test.chance(gained)


def test_a_look_sees_what_every_look_before_it_has_seen() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        values = rng.normal(0.1, 0.1, PAIRS).tolist()
        test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=seed)
        found = [test.is_significant(values[:looks]) for looks in range(PAIRS + 1)]
        assert found == sorted(found), "once shown, always shown"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        # Of two signs four ways: the real sum is reached by those that equal it too.
        ([1.0, -1.0], 3 / 4),
        ([1.0, 1.0], 1 / 4),
        ([-1.0, -1.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([2.0, -1.0], 1 / 2),
        ([1.0, 1.0, -1.0], 1 / 2),
    ],
)
def test_chance_counts_the_patterns_that_tie_with_what_happened(gains: list[float], expected: float) -> None:
    assert SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=0).chance(gains) == pytest.approx(expected, abs=0.035)


def test_what_was_shown_stays_shown() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=1)
    assert test.is_significant([1.0] * 8 + [-5.0] * 8)


def test_the_same_seed_gives_the_same_answer() -> None:
    values = np.random.default_rng(0).normal(0.05, 0.1, PAIRS).tolist()
    answers = {SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=4).chance(values) for _ in range(3)}
    assert len(answers) == 1


def test_chance_of_all_of_ten_pairs_on_one_side_is_one_in_a_thousand() -> None:
    assert SignFlipTest(pairs=10, alpha=ALPHA, seed=0).chance([0.1] * 10) == pytest.approx(2**-10, abs=0.002)


def test_nothing_shows_nothing() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=0)
    assert not test.is_significant([])
    assert not test.is_significant([0.0] * PAIRS)  # ties are never crossed out in part


@pytest.mark.parametrize(("alpha", "pairs"), [(0.0, 20), (1.0, 20), (0.05, 0)])
def test_an_error_rate_that_is_none_is_refused(alpha: float, pairs: int) -> None:
    with pytest.raises(TunerError, match="expected 0 < alpha < 1"):
        SignFlipTest(pairs=pairs, alpha=alpha, seed=0)


def test_a_verdict_without_measurements_has_none_and_is_no_refusal() -> None:
    assert Verdict(False, "no proxy") == Verdict(False, "no proxy", None, None, None, None, False, False)
