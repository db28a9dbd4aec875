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

import pytest

from tuner.campaign.comparison import BlockPair, PairComparison, change, mean, noise, pooled, ratios
from tuner.campaign.options import CampaignOptions
from tuner.campaign.trial import Verdict
from tuner.objective import WindowStats
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
