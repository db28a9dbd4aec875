"""The experiments on other fleets, on runs whose figures follow from the weights by a formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import pytest

from experiments.runner import Experiment, Runner
from experiments.systems import tuner_claims
from experiments.systems.tuner_claims import (
    BUDGET,
    EXPERIMENTS,
    FURTHER,
    OURS,
    PAPER,
    SETTINGS,
    fifth,
    grid,
    half,
    twice,
)
from experiments.tables import ClaimVerdict
from experiments.tuning import TuningRun, TuningTask, Windows
from tuner.offline.search import RunScore

#: What a tuner finds in these tests.
FOUND = {"w_queue": 0.5, "w_rtt": 20.0}


def score(weights: Mapping[str, float]) -> RunScore:
    """First tokens are earliest at w_rtt 20 and w_queue 0.5; beyond w_rtt 20 answers end later."""
    w_rtt, w_queue = weights.get("w_rtt", 0.5), weights.get("w_queue", 0.1)
    away = abs(log(w_rtt / 20.0)) + abs(log(w_queue / 0.5))
    return RunScore(
        n=1000, errors=0, ttft_ms_p95=100.0 * (1 + away), e2e_s_p95=2.0 if w_rtt <= 20.0 else 3.0, max_share=0.5
    )


def run_of(task: TuningTask) -> TuningRun:
    start = dict(task.weights)
    if task.policy == OURS:
        return TuningRun(whole=score({}), tail=score({}), weights={"m_rtt": 2.0})
    if task.campaign is None and task.search is None:
        return TuningRun(whole=score(start), tail=score(start), weights=start)
    return TuningRun(
        whole=score(start), tail=score(FOUND), weights=FOUND, accepted=1, first_accepted_s=7200.0, generations=3
    )


def verdicts_of(experiment: Experiment) -> list[ClaimVerdict]:
    runs: dict[object, TuningRun] = {}
    tasks = next(experiment)
    while True:
        runs |= {task: run_of(task) for task in tasks if isinstance(task, TuningTask)}
        try:
            tasks = experiment.send(runs)
        except StopIteration as end:
            verdicts: list[ClaimVerdict] = end.value
            return verdicts


DEFAULT_TTFT = score({}).ttft_ms_p95 or 0.0


def test_frozen_weights_of_a_live_campaign_are_compared_with_the_defaults_and_so_is_the_traffic_meanwhile() -> None:
    rows = [*verdicts_of(tuner_claims.fleets(range(15))), *verdicts_of(tuner_claims.further(range(15)))]
    settings = (*SETTINGS, *FURTHER)
    assert len(rows) == 4 * len(settings)
    for setting, first in zip(settings, range(0, len(rows), 4), strict=True):
        gain, loss, *meanwhile = rows[first : first + 4]
        assert gain.value == pytest.approx(100.0 / DEFAULT_TTFT if setting.policy == PAPER else 1.0)
        assert loss.value == pytest.approx(1.0)
        for row in meanwhile:
            assert "while it was tuned" in row.labels[0]
            assert row.value == pytest.approx(1.0)
            found = "2.0 h, 2.0 h, 2.0 h" if setting.policy == PAPER else "never"
            assert row.note == f"first accepted after {found}"


def test_a_fleet_with_wrong_weights_has_a_target_and_the_others_a_bound_on_harm() -> None:
    bounds = {row.labels[0]: row.at_most for row in verdicts_of(tuner_claims.fleets(range(2)))}
    assert bounds["small-model, short-chat, time scale 3: gorgo, tuned live / defaults, p95 TTFT"] == 0.9
    assert bounds["small-model, short-chat, time scale 3: gorgo, tuned live / defaults, p95 E2E"] == 1.01
    bounds = {row.labels[0]: row.at_most for row in verdicts_of(tuner_claims.further(range(2)))}
    assert bounds["fast-links, art-chat-apr6, time scale 2: gorgo, tuned live / defaults, p95 TTFT"] == 1.01


def test_a_setting_under_a_scenario_names_it_and_runs_in_it() -> None:
    (label,) = {one.label for one in FURTHER if one.scenario == "priors-slow"}
    assert label == "mixed-gpus under priors-slow, rag, time scale 2: gorgo-ms"
    windows = Windows(shapes=("rag",), draw=0, limit=300, time_scale=2.0)
    task = TuningTask(windows=windows, policy=OURS, fleet="mixed-gpus")
    steady, slow = task.run(), replace(task, scenario="priors-slow").run()
    assert steady.whole != slow.whole


def test_best_of_the_grid_does_not_end_answers_later_than_the_defaults() -> None:
    rows = [
        row
        for row in verdicts_of(tuner_claims.fleets_by_twin(range(2)))
        if ": gorgo, best of the grid" in row.labels[0]
    ]
    assert rows
    assert {row.note for row in rows} == {"w_rtt 20, w_queue 0.5"}  # 80 is as near, and ends later
    assert {row.at_most for row in rows} == {None}


def test_every_optimizer_and_the_grid_have_a_row_on_the_same_budget() -> None:
    rows = verdicts_of(tuner_claims.algorithms(range(3)))
    assert [row.labels[0].split(" searched by ")[1].split(",")[0] for row in rows] == [
        "es-probes",
        "es",
        "cma",
        "random",
        "grid",
    ]
    assert len(list(grid(PAPER))) == BUDGET.candidates
    assert all(row.value == pytest.approx(100.0 / DEFAULT_TTFT) for row in rows)


def test_a_task_runs_on_its_fleet() -> None:
    windows = Windows(shapes=("art-chat-apr5",), draw=0, limit=40)
    paper, small = (TuningTask(windows=windows, policy=PAPER, fleet=fleet).run() for fleet in ("paper", "small-model"))
    assert paper.whole.e2e_s_p95 is not None
    assert small.whole.e2e_s_p95 is not None
    assert small.whole.e2e_s_p95 < paper.whole.e2e_s_p95 / 1.5


def test_fewer_seeds_are_fewer_runs() -> None:
    seeds = range(10)
    assert [len(part) for part in (half(seeds), fifth(seeds), twice(seeds))] == [5, 2, 20]


@pytest.mark.parametrize("group", EXPERIMENTS)
def test_every_experiment_uses_only_runs_that_it_asked_for(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = RunScore(n=10, errors=0, ttft_ms_p95=100.0, e2e_s_p95=1.0, max_share=0.5)
    weights = {"lambda": 0.2, "w_rtt": 0.5, "w_queue": 0.1}
    run = TuningRun(whole=part, tail=part, weights=weights, reasons=("nothing",))
    monkeypatch.setattr(TuningTask, "run", lambda _: run)
    runner = Runner(None, n_jobs=1, show_progress=False)
    verdicts = runner.verdicts(EXPERIMENTS[group](range(2)), title=group)
    assert {verdict.group for verdict in verdicts} == {group}
    assert all(verdict.value in (0.5, 1.0) for verdict in verdicts)
