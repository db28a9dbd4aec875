"""The experiments on other fleets, on runs whose figures follow from the weights by a formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from experiments import runner
from experiments.runner import Experiment, Runner, run_key
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
from experiments.tuning import Search, TuningRun, TuningTask, Windows
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


# Measurements of the tuner on windows of a few requests.


def windows(count: int = 1, draw: int = 0) -> Windows:
    return Windows(shapes=("art-chat-apr5",) * count, draw=draw, limit=40)


def test_windows_follow_one_another_and_share_no_prompt() -> None:
    feed = windows(2).feed()
    first, second = feed[:40], feed[40:]
    assert [request.index for request in feed] == list(range(80))
    arrivals = [request.arrival_s for request in feed]
    assert arrivals == sorted(arrivals)
    blocks = [{bytes(block) for r in part for block in np.frombuffer(r.blocks, "V8")} for part in (first, second)]
    assert blocks[0]
    assert not blocks[0] & blocks[1]
    assert first == windows(1).feed()


def test_what_a_figure_depends_on_is_in_the_key() -> None:
    task = TuningTask(windows=windows(), policy="gorgo")
    others = [
        replace(task, windows=windows(draw=1)),
        replace(task, policy="gorgo-ms"),
        replace(task, campaign=(("mode", "paper"),)),
        replace(task, search=Search(candidates=1, seeds=1, held_out_seeds=1)),
        replace(task, later=(10, (("w_rtt", 1.0),))),
    ]
    assert len({task.key(), *(other.key() for other in others)}) == 6


def test_the_key_changes_with_the_code_of_the_tuner(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    keys = set()
    for text in ("one = 1\n", "one = 2\n"):
        file.write_text(text)
        runner._code_digest.cache_clear()
        keys.add(run_key("gorgo", ["art-chat-apr5"], [], code=[file]))
    assert len(keys) == 2


def test_weights_put_later_are_in_force_from_then_on() -> None:
    far = (("w_queue", 1e-6), ("w_rtt", 2.0))
    task = TuningTask(windows=windows(), policy="gorgo", after=20)
    put, always = replace(task, later=(20, far)).run(), replace(task, weights=far).run()
    plain = task.run()
    assert put.tail != plain.tail
    assert put.whole != always.whole


def test_a_campaign_and_a_search_are_tasks_too() -> None:
    short = (("hop", 4), ("max_generations", 2), ("mode", "paper"), ("warm_up_s", 1.0), ("window", 8))
    assert TuningTask(windows=windows(), policy="gorgo", campaign=short).run().generations >= 2
    sizes = Search(candidates=1, seeds=1, held_out_seeds=2)
    searched = TuningTask(windows=windows(), policy="gorgo", search=sizes).run()
    assert searched.generations == 2
    assert searched.reasons
