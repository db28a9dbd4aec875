"""Searching a recorded window, engines as the proxy has learned them, and the live campaign on a simulated fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from experiments.fleets import unknown_paper_fleet
from gorgo.config.weights_file import WeightsFile, read_weights_file, write_weights_file
from gorgo.core.policy.weights import Weights
from gorgo.errors import TunerError, WeightsError
from gorgo.lab.datasets import load_requests
from gorgo.lab.request_log import load_request_log
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import QWEN_L40S, SimFleet
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.compare import Ratio
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from gorgo.live.logs import Finished, RequestLogFile
from gorgo.policies.registry import make_policy
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.offline import simulated_campaign
from tuner.offline.composition import MAX_BYTES, calibrated, read_fleet
from tuner.offline.search import (
    ANOTHER_DAY,
    HELD_OUT,
    HELD_OUT_SEED,
    MODE,
    CandidateBatch,
    RunScore,
    ScoredWeights,
    SearchOptions,
    SearchResult,
    SearchVerdict,
    decide,
    not_shown,
    refused,
    scores_of,
    search_weights,
    start_is_worse,
    weights_file,
)
from tuner.offline.simulated_campaign import CampaignRun, simulate_campaign

# --- A fleet and a window small enough that a whole campaign on it takes a second.


def fitted_fleet() -> SimFleet:
    """The paper's fleet, of whose speed the Router is told nothing."""
    return unknown_paper_fleet(find_profile(QWEN_L40S))


def small_fleet() -> SimFleet:
    """The paper's regions with faster engines: the fitted ones are beyond capacity at the trace's rate."""
    faster = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    return SimFleet(tuple(replace(one, profile=faster) for one in fitted_fleet().replicas))


@cache
def small_feed(limit: int) -> tuple[SimRequest, ...]:
    return tuple(feed_of(load_requests("chat-small", TraceFilters(limit=limit, max_output=32))))


def small_job(limit: int = 150, **more: Any) -> SimJob:
    """The first requests of the shipped trace."""
    given: dict[str, Any] = {"trace": "small", "policy": "gorgo", "fleet": small_fleet(), "feed": small_feed(limit)}
    return SimJob(**given | more)


# --- Searching a recorded window, and what becomes of what was found.


FEW = SearchOptions(candidates=3, seeds=2, held_out_seeds=2)


def search(seed: int = 0, job: SimJob | None = None) -> SearchResult:
    return search_weights(job or small_job(90), SearchOptions(candidates=3, seeds=2, held_out_seeds=2, seed=seed))


def test_one_seed_gives_one_search() -> None:
    one = search()
    assert one == search()
    assert one.rows != search(seed=1).rows


def test_a_start_at_the_defaults_is_measured_once() -> None:
    found = search()
    assert found.defaults is found.start
    assert len(found.rows) == 1 + FEW.candidates


def test_a_start_elsewhere_is_measured_beside_the_defaults() -> None:
    found = search(job=small_job(60, weights={"w_queue": 0.4}))
    assert found.start.weights["w_queue"] == 0.4
    assert [row.reason for row in found.rows[:2]] == ["the start", "the policy's defaults, to compare with"]


def test_candidates_meet_the_same_chance() -> None:
    question = CandidateBatch(job=small_job(60), seeds=(3, 4))
    weights = {"w_rtt": 0.5, "w_queue": 0.1}
    one, other = scores_of(question, [weights, dict(weights)])
    assert one == other
    assert one[0] != one[1]


def test_the_search_does_not_see_the_last_third() -> None:
    job = small_job(90)
    found = search(job=job)
    assert job.feed is not None
    seen = sum(request.arrival_s < found.split_s for request in job.feed)
    assert [score.n for score in found.start.scores] == [seen, seen]
    result = decide(job, found, FEW)
    assert {score.n for score in result.before.scores} == {90 - seen}


def tried(ttft: float, e2e: float, *, share: float = 0.4, errors: int = 0, noise: float = 0.0) -> ScoredWeights:
    """Four runs whose p95 differ by `noise` either way."""
    factors = (1 - noise, 1 + noise, 1 - noise / 2, 1 + noise / 2)
    return ScoredWeights({"w_rtt": ttft}, [RunScore(100, errors, ttft * f, e2e * f, share) for f in factors])


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (tried(50, 1.2), "p95 E2E is 20.0% higher"),
        (tried(50, 1.0, share=0.95), "one replica takes 95%"),
        (tried(50, 1.0, errors=1), "errors rose: 4, 0 before"),
    ],
)
def test_a_gain_in_ttft_is_refused_for_what_it_does_to_the_rest(ours: ScoredWeights, words: str) -> None:
    assert words in (refused(ours, tried(100, 1.0), margin=0.1, max_share=0.8) or "")


def test_nothing_moves_unless_the_whole_interval_is_below_one() -> None:
    base = tried(100, 1.0)
    assert not_shown(tried(95, 1.0, noise=0.001), base, FEW) is None
    assert "p95 TTFT is" in (not_shown(tried(95, 1.0, noise=0.2), base, FEW) or "")
    assert "p95 TTFT is -1" in (not_shown(tried(99, 1.0, noise=0.001), base, FEW) or ""), "another day takes that much"
    assert not_shown(tried(95, 1.009, noise=0.001), base, FEW) is None
    assert not_shown(tried(50, 1.02, noise=0.001), base, FEW) == "p95 E2E is 2.0% higher"


def test_a_start_that_is_worse_than_the_defaults_is_left_even_without_a_find() -> None:
    assert (
        start_is_worse(tried(100, 1.3, noise=0.01), tried(100, 1.0))
        == "p95 E2E of the start is +30.0% [+28.1%, +31.9%]"
    )
    assert start_is_worse(tried(100, 1.0, noise=0.1), tried(100, 1.0)) is None


def test_what_is_found_is_a_file_that_the_proxy_takes(tmp_path: Path) -> None:
    job = small_job(90)
    result = decide(job, search(job=job), FEW)
    file = weights_file(job, result, source="twin", created="2026-01-01T00:00:00+00:00", window={"trace": "small"})
    write_weights_file(tmp_path / "found.json", file)
    again = read_weights_file(tmp_path / "found.json")
    assert again == file
    Weights.of(make_policy(again.policy).weight_specs, again.weights, allow_out_of_range=again.widened)
    assert again.evidence is not None
    assert again.evidence["held_out"] == {"seeds": 2, "requests": result.before.scores[0].n}
    assert result.moved or dict(result.weights) == dict(result.before.weights)


def test_a_log_of_the_proxy_can_be_tuned_on(tmp_path: Path) -> None:
    job = small_job(90)
    assert job.feed is not None
    log = RequestLogFile(tmp_path / "requests.jsonl", boot_id="boot-1", clock=lambda: 1e9, block_bytes=2048)
    log.write(
        [
            Finished(
                1e9 + request.arrival_s,
                "m",
                request.prompt_tokens,
                request.output_tokens,
                request.prompt_tokens * 4,
                200,
                request.blocks,
            )
            for request in job.feed
        ]
    )
    log.close()
    feed = feed_of(load_request_log(tmp_path / "requests.jsonl"))
    assert [request.prompt_tokens for request in feed] == [request.prompt_tokens for request in job.feed]
    assert np.allclose([r.arrival_s for r in feed], [r.arrival_s - job.feed[0].arrival_s for r in job.feed], atol=1e-3)
    found = search(job=small_job(feed=feed))
    plain = search(job=job)
    assert found.start.ttft_ms == pytest.approx(plain.start.ttft_ms, rel=0.05)  # the same hits, other hashes


def test_a_window_without_requests_is_an_error() -> None:
    with pytest.raises(TunerError, match="a recorded window with requests in it"):
        search(job=small_job(feed=()))


Figures = Callable[[float], RunScore]


def searched(
    monkeypatch: pytest.MonkeyPatch, figures: Figures, *, w_queue: float | None = 0.4, **options: Any
) -> SearchResult:
    """A search whose runs have the figures of their `w_queue`; it starts at 0.4 unless said, its default is 0.1."""

    def scores(
        question: CandidateBatch, candidates: Sequence[Mapping[str, float]], **_options: Any
    ) -> list[list[RunScore]]:
        return [[figures(weights["w_queue"]) for _ in question.seeds] for weights in candidates]

    monkeypatch.setattr("tuner.offline.search.scores_of", scores)
    job = small_job(60, weights=None if w_queue is None else {"w_queue": w_queue})
    chosen: dict[str, Any] = {"candidates": 1, "seeds": 2, "optimizer": "fixed"} | options
    return search_weights(job, SearchOptions(**chosen))


def at_start(start: tuple[float, float], defaults: tuple[float, float]) -> Figures:
    """p95 TTFT, ms, and E2E, s, of the start and of everything else."""
    return lambda w_queue: RunScore(100, 0, *(start if w_queue == 0.4 else defaults), 0.4)


@pytest.mark.parametrize(
    ("start", "defaults", "best"),
    [
        ((100.0, 1.0), (90.0, 1.0), 0.1),
        ((100.0, 1.0), (100.0, 1.0), 0.4),
        ((100.0, 1.0), (110.0, 1.0), 0.4),
        # The defaults are the reference, and the guard refuses the start: whatever its TTFT.
        ((50.0, 1.2), (90.0, 1.0), 0.1),
        ((50.0, 1.009), (90.0, 1.0), 0.4),
        # The start is the reference, and the guard refuses the defaults.
        ((100.0, 1.0), (90.0, 1.2), 0.4),
    ],
)
def test_the_search_goes_on_from_the_better_of_start_and_defaults(
    start: tuple[float, float], defaults: tuple[float, float], best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = searched(monkeypatch, at_start(start, defaults))
    assert (found.start.weights["w_queue"], found.defaults.weights["w_queue"]) == (0.4, 0.1)
    assert found.best.weights["w_queue"] == best
    measured = {0.4: start[0], 0.1: defaults[0]}
    assert [row.objective_ms for row in found.rows] == pytest.approx([start[0], defaults[0], measured[best]])
    assert found.rows[2].weights["w_queue"] == pytest.approx(best), "what does not move stays there"
    assert found.rows[2].incumbent_objective_ms == pytest.approx(measured[best])
    assert [row.accepted for row in found.rows] == [True, False, False]


def test_a_candidate_that_the_guard_refuses_does_not_become_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(
        monkeypatch,
        lambda w_queue: RunScore(100, 0, 100.0 if w_queue == 0.1 else 10.0, 1.0 if w_queue == 0.1 else 1.2, 0.4),
        w_queue=None,
        optimizer="random",
        candidates=4,
    )
    assert found.best is found.start is found.defaults
    assert [row.accepted for row in found.rows] == [True, False, False, False, False]


def test_a_candidate_with_a_lower_time_becomes_the_best_and_its_row_tells_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = searched(
        monkeypatch,
        lambda w_queue: RunScore(100, 0, 1000.0 * w_queue, 1.0, 0.4),
        w_queue=None,
        optimizer="random",
        candidates=12,
    )
    best = 100.0
    for row in found.rows[1:]:
        assert row.objective_ms is not None
        assert row.objective_ms == pytest.approx(1000.0 * row.weights["w_queue"])
        assert row.incumbent_objective_ms == pytest.approx(best)
        assert row.accepted == (row.objective_ms < best)
        best = min(best, row.objective_ms)
    assert best < 100.0
    assert found.best.ttft_ms == pytest.approx(best)


def test_a_window_without_a_first_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TunerError, match="no request of the window has a first token"):
        searched(monkeypatch, lambda _: RunScore(100, 100, None, None, None))


@pytest.mark.parametrize(("seed", "seeds", "fits"), [(9_997, 3, True), (9_998, 3, False)])
def test_seeds_of_the_search_end_before_those_that_decide(seed: int, seeds: int, fits: bool) -> None:
    if fits:
        SearchOptions(seed=seed, seeds=seeds)
        return
    with pytest.raises(TunerError, match="expected seeds below 10,000"):
        SearchOptions(seed=seed, seeds=seeds)


def test_a_search_tries_forty_candidates_on_three_seeds_and_decides_on_ten_unless_said() -> None:
    options = SearchOptions()
    assert (options.optimizer, options.candidates, options.seeds, options.held_out_seeds) == ("es-probes", 40, 3, 10)
    assert (options.margin, options.max_share, options.seed, options.n_jobs) == (0.01, 0.8, 0, 1)
    one = SearchOptions(candidates=1, seeds=1, held_out_seeds=1)
    assert (one.candidates, one.seeds, one.held_out_seeds) == (1, 1, 1)


def test_a_search_without_options_is_the_documented_one() -> None:
    options = asdict(SearchOptions())
    assert options == {
        "optimizer": "es-probes",
        "candidates": 40,
        "seeds": 3,
        "held_out_seeds": 10,
        "tune_lambda": False,
        "box": None,
        "margin": CampaignOptions().e2e_margin,
        "max_share": CampaignOptions().max_share,
        "seed": 0,
        "n_jobs": 1,
    }
    assert options["tune_lambda"] is False, "not None: it is stored with the campaign"


# The file of a decision, from figures written down by hand.
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


# --- Engines as the proxy has learned them.


#: What the Router assumes of an engine of which it is told nothing.
PRIOR = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")


def test_what_was_learned_replaces_the_profile_and_what_was_not_stays() -> None:
    before = fitted_fleet()
    told = {
        "replicas": [
            {"name": "us-ashburn-0", "prefill_slowdown": 2.0, "rtt_ms": 5.0, "kv_capacity_tokens": 1000.0},
            {"name": "ap-seoul-0", "prefill_slowdown": 1.0, "rtt_ms": None},
        ]
    }
    near, middle, far = calibrated(before, told, source="fleet.json").replicas
    assert near.profile.prefill_s(1000, 0.0) == pytest.approx(2 * PRIOR.prefill_s(1000, 0.0))
    assert (near.link.rtt_s, near.profile.kv_tokens) == (0.005, 1000)
    assert middle == before.replicas[1]
    assert far.link == before.replicas[2].link
    assert near.spec == before.replicas[0].spec


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "replicas: expected a list"),
        (
            {"replicas": [{"name": "elsewhere"}]},
            "^fleet.json: names none of the replicas of the configuration: us-ashburn-0, .*, ap-seoul-0$",
        ),
        ({"replicas": [{"name": "us-ashburn-0", "rtt_ms": -1}]}, "rtt_ms is -1; expected a number above 0"),
    ],
)
def test_an_answer_of_something_else_is_named(told: dict[str, object], words: str) -> None:
    with pytest.raises(TunerError, match=words):
        calibrated(fitted_fleet(), told, source="fleet.json")


def test_a_saved_answer_is_read_and_anything_else_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"replicas": []}))
    assert read_fleet(tmp_path / "fleet.json") == {"replicas": []}
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(TunerError, match="expected what GET /admin/fleet answers"):
        read_fleet(tmp_path / "other.json")
    with pytest.raises(TunerError, match="cannot be read"):
        read_fleet(tmp_path / "missing.json")


def test_a_saved_answer_has_at_most_sixteen_mebibytes(tmp_path: Path) -> None:
    assert MAX_BYTES == 16 * 1024 * 1024
    path = tmp_path / "fleet.json"
    path.write_bytes(b"{}".ljust(MAX_BYTES))
    assert read_fleet(path) == {}
    path.write_bytes(b"{}".ljust(MAX_BYTES + 1))
    with pytest.raises(TunerError, match=f"{path}: expected .*at most {MAX_BYTES} bytes"):
        read_fleet(path)


# --- The live campaign on a simulated fleet.


QUICK = {"warm_up_s": 5.0, "window": 24, "hop": 8}


@cache
def paper(seed: int = 0) -> CampaignRun:
    options = CampaignOptions(mode="paper", max_generations=6, **QUICK)  # type: ignore[arg-type]
    return simulate_campaign(small_job(), options, seed=seed)


def test_one_seed_gives_one_run() -> None:
    one, other = paper(), paper(seed=1)
    assert one == paper.__wrapped__()
    assert [row.weights for row in one.generations] != [row.weights for row in other.generations]


def test_every_request_is_served_and_routed_by_the_weights_of_its_generation() -> None:
    run = paper()
    assert run.row.n == len(run.records) == 150
    assert run.row.errors == 0
    versions = {record.weights_version for record in run.records}
    assert {row.weights_version for row in run.generations} <= versions
    assert [row.number for row in run.generations] == list(range(len(run.generations)))


def test_what_is_left_at_the_end_is_the_last_accepted_weight_set() -> None:
    run = paper()
    assert run.stopped == "6 generations"
    accepted = [row.weights for row in run.generations if row.accepted]
    assert run.weights == accepted[-1]


def test_switchback_takes_turns_and_stays_without_evidence() -> None:
    options = CampaignOptions(block_s=4.0, rest_blocks=0.0, discard_s=1.0, min_block_samples=3, pairs=6, **QUICK)  # type: ignore[arg-type]
    run = simulate_campaign(small_job(), options)
    assert len({record.weights_version for record in run.records}) >= 4
    assert run.weights == {"w_rtt": 0.5, "w_queue": 0.1}


def test_a_campaign_without_a_proposal_changes_nothing_for_the_clients() -> None:
    options = CampaignOptions(warm_up_s=10_000.0)
    left_alone = simulate_campaign(small_job(), options)
    watched = [asdict(record) | {"weights_version": None} for record in left_alone.records]
    plain = run_once(small_job(keep_requests=True)).requests or ()
    assert watched == [asdict(record) | {"weights_version": None} for record in plain]


def test_a_start_outside_the_box_is_refused_unless_the_box_is_wider() -> None:
    options = CampaignOptions(mode="paper", max_generations=1, **QUICK)  # type: ignore[arg-type]
    job = small_job(weights={"w_queue": 0.001})
    with pytest.raises(WeightsError, match=r"'w_queue' is 0.001; expected a number in \[0.05, 0.5\]"):
        simulate_campaign(job, options)
    run = simulate_campaign(job, options, box={"w_queue": (0.0005, 0.5)})
    assert run.generations[0].weights["w_queue"] == 0.001


def test_a_simulated_sidecar_polls_each_second_for_a_thousand_samples() -> None:
    assert (simulated_campaign.POLL_S, simulated_campaign.BATCH) == (1.0, 1000)


def test_the_first_poll_is_at_the_start() -> None:
    assert simulated_campaign.CampaignDriver(cast(Campaign, None)).next_s == 0.0


def test_a_campaign_may_begin_later_and_counts_the_blocks_of_candidates() -> None:
    short = {"block_s": 4.0, "rest_blocks": 0.0, "discard_s": 1.0, "min_block_samples": 3, "max_generations": 3}
    options = CampaignOptions(**short, **QUICK)  # type: ignore[arg-type]
    run = simulate_campaign(small_job(), options, begin_s=12.0)
    assert run.generations[0].started_s == 12.0
    assert run.candidate_blocks >= 1
    refuted = simulate_campaign(small_job(), options, refutes=lambda *_: "no")
    assert (refuted.candidate_blocks, refuted.stopped) == (0, "3 generations")
