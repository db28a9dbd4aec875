"""The file of a decision, from figures written down by hand."""

from __future__ import annotations

from gorgo.config.weights_file import WeightsFile
from gorgo.lab.simulate.compare import Ratio
from tests.tuner.offline.small import small_job
from tuner.offline import weights_file
from tuner.offline.search import HELD_OUT, HELD_OUT_SEED, MODE, RunScore, ScoredWeights
from tuner.offline.verdict import ANOTHER_DAY, SearchVerdict

BEFORE = ScoredWeights({"w_rtt": 0.5}, [RunScore(40, 0, 400.0, 4.0, 0.5)] * 3)
AFTER = ScoredWeights({"w_rtt": 0.7}, [RunScore(40, 0, 300.0, 5.0, 0.5)] * 3)


def written(weights: dict[str, float], ttft: Ratio | None, e2e: Ratio | None) -> WeightsFile:
    verdict = SearchVerdict(
        weights=weights, moved=True, reason="faster", ttft=ttft, e2e=e2e, before=BEFORE, after=AFTER
    )
    return weights_file(small_job(30), verdict, source="a test", created="2026-01-01", window={"trace": "small"})


def test_the_file_of_a_decision_has_its_origin_time_reason_and_figures() -> None:
    ttft, e2e = Ratio(0.75, 0.7, 0.8, 3), Ratio(1.25, 1.2, 1.3, 3)
    file = written({"w_rtt": 0.7, "w_queue": 0.1}, ttft, e2e)
    figures = file.evidence
    assert figures is not None
    medians = {name: {when: round(value, 9) for when, value in figures[name].items()} for name in list(figures)[1:3]}
    assert medians == {
        "ttft_ms_p95": {"before": 400.0, "after": 300.0},
        "e2e_s_p95": {"before": 4.0, "after": 5.0},
    }
    assert file == WeightsFile(
        policy="gorgo",
        weights={"w_rtt": 0.7, "w_queue": 0.1},
        widened=False,
        source="a test",
        created="2026-01-01",
        note="faster",
        evidence={
            "moved": True,
            "ttft_ms_p95": figures["ttft_ms_p95"],
            "e2e_s_p95": figures["e2e_s_p95"],
            "ttft_ratio": {"value": 0.75, "low": 0.7, "high": 0.8, "n": 3},
            "e2e_ratio": {"value": 1.25, "low": 1.2, "high": 1.3, "n": 3},
            "held_out": {"seeds": 3, "requests": 40},
            "window": {"trace": "small"},
        },
    )


def test_weights_out_of_the_box_are_said_to_be_intended_and_a_ratio_that_is_not_known_is_none() -> None:
    file = written({"w_rtt": 1e6}, None, None)
    assert file.widened
    assert file.evidence is not None
    assert (file.evidence["ttft_ratio"], file.evidence["e2e_ratio"]) == (None, None)


def test_a_third_is_held_out_under_seeds_of_its_own_and_a_gain_is_two_per_cent_at_least() -> None:
    assert (HELD_OUT, HELD_OUT_SEED, MODE, ANOTHER_DAY) == (1 / 3, 10_000, "twin", 0.02)
