"""Claims about policies and about the tuner, on runs whose figures are made up or follow from a formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import log
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest

from experiments import runner
from experiments.comparison import MEASURES
from experiments.reports import Grid, SystemReport, target_report
from experiments.runner import Experiment, Runner, run_key
from experiments.systems import tuner_claims
from experiments.systems.policies import GROUPS, PUBLISHED_RATIOS, TITLES, all_targets
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
)
from experiments.tables import ClaimVerdict, as_markdown
from experiments.tuning import Search, TuningRun, TuningTask, Windows
from experiments.windows import SHORT_SIGHTED, WEIGHTED, RatioTarget, Workload
from gorgo.core.policy.weights import Weights
from gorgo.lab.sim.fleet import find_fleet
from gorgo.lab.sim.scenarios import find_scenario
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import ALL_READINGS, BASELINES
from tests.figures.tuning import tuning_log
from tests.figures.wording import plain
from tuner.offline.search import RunScore

#: Groups whose rows have tables of their own, or none yet.
ELSEWHERE = ("rivals", "engines", "partial-hits", "tail", "residual", "two-terms", "two-terms-hits", "two-terms-shapes")


def test_every_target_names_what_there_is() -> None:
    for target in all_targets("conversation.jsonl"):
        assert target.figure in MEASURES
        for task in target.tasks([0]):
            named = OURS if task.policy == SHORT_SIGHTED else task.policy
            policy, weights = WEIGHTED.get(named, (named, {}))
            assert policy_of(policy).name == policy
            Weights.of(policy_of(policy).weight_specs, weights)  # within their box
            assert find_scenario(task.workload.scenario).name == task.workload.scenario
            assert task.workload.fleet is None or find_fleet(task.workload.fleet).name == task.workload.fleet


def test_every_group_has_a_title() -> None:
    assert list(dict.fromkeys(target.group for target in all_targets(None))) == list(TITLES) == list(GROUPS)


def test_the_baselines_are_the_paper_s_four() -> None:
    assert BASELINES == ("least-load", "least-request", "prefix-cache", "simple-session-affinity")


def test_no_claim_of_this_project_has_a_weaker_baseline_than_there_is() -> None:
    """Released readings of the paper's baselines stand beside those that are stronger in simulation."""
    ours = [target for target in all_targets(None) if target.group in ("baselines", "engines")]
    assert all({*BASELINES, "least-request-in-flight", "prefix-cache-in-flight"} <= {*one.others} for one in ours)
    theirs = [target for target in all_targets(None) if target.group in ("paper", "learned")]
    assert {tuple(target.others) for target in theirs} == {BASELINES, ("gorgo",)}


BEST = "the best baseline"


def published() -> list[list[tuple[str, ...]]]:
    """The rows of each table in docs/results.md, without what was measured."""
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    table = text.partition("<!-- claims:begin -->")[2].partition("<!-- claims:end -->")[0]
    found: list[list[tuple[str, ...]]] = []
    for line in table.splitlines():
        if line.startswith("### "):
            found.append([])
        elif "| at most " in line:
            on, of, against, *rest = (cell.strip(" `") for cell in line.strip("|").split("|")[:5])
            # Which of the baselines is the best is known once they have run.
            best = BEST if against in ALL_READINGS else against
            found[-1].append((on, of, best, *rest))
    return found


def test_targets_are_those_of_the_published_table() -> None:
    def row(target: RatioTarget) -> tuple[str, ...]:
        labels = target.labels((BEST,) * len(target.workloads))
        shown = ClaimVerdict(group=target.group, labels=labels, at_most=target.at_most).cells()[:5]
        on, of, against, figure, bound = map(plain, shown)
        level = f"at most {target.at_most}" if target.at_most in PUBLISHED_RATIOS.values() else bound
        return on, of, against, figure, level

    targets = [target for target in all_targets("conversation.jsonl") if target.group not in ELSEWHERE]
    grouped = [[row(target) for target in found] for _, found in groupby(targets, lambda target: target.group)]
    assert grouped == published()
    assert sum(map(len, grouped)) == 64


@pytest.mark.parametrize(
    ("name", "traces", "filters"),
    [
        (
            "ART-Chat-like",
            ("art-chat-apr5", "art-chat-apr6", "art-chat-apr7"),
            TraceFilters(max_input=24_000, max_output=128, min_output=128),
        ),
        (
            "conversation trace",
            ("conversation.jsonl",),
            TraceFilters(max_input=24_000, max_output=128, limit=7_000, spread_s=3.0),
        ),
        ("WildChat-like", ("wildchat-like",), TraceFilters(max_input=24_000, max_output=128, limit=7_000)),
        ("April 6 like", ("art-chat-apr6",), TraceFilters(max_input=24_000, max_output=128, min_output=128)),
        ("April 7 like", ("art-chat-apr7",), TraceFilters(max_input=24_000, max_output=128, min_output=128)),
    ],
)
def test_requests_of_a_setting_are_filtered_as_the_paper_s(
    name: str, traces: tuple[str, ...], filters: TraceFilters
) -> None:
    found = [one for target in all_targets("conversation.jsonl") for one in target.workloads if one.name == name]
    assert found
    assert all((tuple(one.traces), one.filters) == (traces, filters) for one in found)


def test_wrong_priors_are_compared_with_right_ones_elsewhere() -> None:
    found = [target.pairs for target in all_targets(None) if target.group == "priors"]
    assert [[(ours.label, beside.label) for ours, beside in pairs] for pairs in found] == [
        [(f"ART-Chat-like, load 0.5, {scenario}", "ART-Chat-like, load 0.5")]
        for scenario in ("priors-fast", "priors-slow")
    ]


def test_the_conversation_trace_adds_its_rows_and_widens_the_means() -> None:
    without, with_it = all_targets(None), all_targets("conversation.jsonl")
    assert len(with_it) == len(without) + 3 * 3 + 2 * 3 + 2 * 3 + 2 * 3 + 4 * 3
    for targets, count in ((without, 4), (with_it, 7)):
        means = [target for target in targets if len(target.workloads) > 1]
        assert [len(target.workloads) for target in means] == [count] * 3
        assert [target.at_most for target in means] == [0.90, 0.85, 1.03]


def test_engines_are_compared_on_every_shape_scheduler_and_share_of_hits() -> None:
    found = [target for target in all_targets(None) if target.group == "engines"]
    workloads = [target.workloads[0] for target in found]
    assert {workload.name for workload in workloads} >= {
        *(
            "art-chat-apr6",
            "wildchat-like",
            "toolagent-like",
            "synthetic-like",
            "rag",
            "short-chat",
            "groups",
            "sharing",
        )
    }
    places = {(workload.name, workload.fleet, workload.scenario) for workload in workloads}
    assert len(places) * 2 == len(found) == 64
    schedulers = {replica.profile.scheduler for one in workloads for replica in find_fleet(one.fleet or "").replicas}
    assert schedulers == {"sglang", "vllm"}
    assert all((target.others, target.at_most) == (("gorgo", *ALL_READINGS), 1.03) for target in found)
    assert len(list(found[0].tasks(range(20)))) == 10 * 8, "as many seeds as intervals need, of many workloads"


def test_partial_hits_are_compared_with_the_published_policy_at_three_loads() -> None:
    found = [target for target in all_targets(None) if target.group == "partial-hits"]
    places = {(target.workloads[0].scenario, target.workloads[0].time_scale) for target in found}
    assert places == {
        (name, load) for name in ("partial-hits-30", "partial-hits-60", "checkpoints-1024") for load in (3.0, 2.0, 1.0)
    }
    bounds = {(target.figure, target.at_most) for target in found}
    assert bounds == {("p95 TTFT", 0.97), ("p95 E2E", 1.0)}
    assert len(found) == 2 * len(places)
    assert all(target.others == ("gorgo",) and len(list(target.tasks(range(10)))) == 2 * 3 for target in found)


def test_the_tail_of_short_prompts_is_a_row() -> None:
    found = [target for target in all_targets(None) if target.group == "tail"]
    assert [(target.workloads[0].label, target.others, target.figure, target.at_most) for target in found] == [
        ("WildChat-like, load 1", ("gorgo",), "p99 TTFT", 1.0),
        ("WildChat-like, load 1", ("gorgo",), "p95 E2E", 1.0),
    ]


def test_the_learned_residual_is_compared_with_its_prior_wherever_something_is_claimed_of_that() -> None:
    targets = all_targets(None)
    claimed = [one for one in targets if one.policy == "gorgo-ms" and not one.group.startswith("two-terms")]
    ours = {one.label for target in claimed for one in target.workloads}
    found = [target for target in targets if target.group == "residual"]
    assert {(one.policy, tuple(one.others), one.at_most) for one in found} == {("gorgo-residual", ("gorgo-ms",), 1.02)}
    missing = ours - {target.workloads[0].label for target in found}
    assert all("partial-hits" in label or "checkpoints" in label or "WildChat" in label for label in missing), missing
    assert found[0].labels(["gorgo-ms"])[2] == "gorgo-ms"


def test_the_two_terms_that_look_ahead_are_compared_with_none_wherever_something_is_claimed_and_beyond_capacity() -> (
    None
):
    targets = all_targets("conversation.jsonl")
    found = [target for target in targets if target.group.startswith("two-terms")]
    assert {(one.policy, tuple(one.others), one.figure, one.at_most) for one in found} == {
        ("gorgo-ms", (SHORT_SIGHTED,), figure, 1.02) for figure in ("mean TTFT", "p95 TTFT", "p99 TTFT", "p95 E2E")
    }
    labels = {target.workloads[0].label for target in found}
    assert {"ART-Chat-like, load 1.1", "ART-Chat-like, load 1.3"} < labels
    claimed = [one for one in targets if one.policy == "gorgo-ms" and one.group != "tail"]
    assert {one.label for target in claimed for one in target.workloads if "priors" not in one.label} == labels
    assert all(len(list(target.tasks(range(9)))) <= 10 for target in found), "five seeds"


# -- a check from targets to its tables
HERE = Workload(name="small", traces=("chat-small", "art-chat-sample"), time_scale=2.0).first(25)
TWO = (
    RatioTarget(
        group="baselines", policy="gorgo-ms", workloads=(HERE,), others=("random",), figure="p95 TTFT", at_most=9.0
    ),
    RatioTarget(
        group="oracle", policy="gorgo-ms", workloads=(HERE,), others=("random",), figure="p95 E2E", at_most=0.01
    ),
)


def reported(targets: Sequence[RatioTarget], seeds: Sequence[int], folder: Path | None) -> SystemReport:
    runner = Runner(folder, n_jobs=1, show_progress=False)
    return target_report(targets, ("baselines", "oracle"), Grid(seeds=seeds), runner, TITLES)


def test_runs_that_targets_share_are_made_once_and_found_again(tmp_path: Path) -> None:
    first = reported(TWO, range(1), tmp_path)
    both = reported(TWO, range(2), tmp_path)
    assert "1 of 2 targets met, all simulated; 2 runs" in first.end
    assert "; 4 runs, " in both.end
    assert "; 2 of them were made now" in both.end
    assert [row["met"] for row in both.rows] == [True, False]
    text = as_markdown(both.sections, both.end)
    assert "Against the same rule with full knowledge (`oracle`)" in text
    assert text.count("| small, load 0.5 | gorgo-ms |") == 3


def test_settings_of_two_names_can_be_one_run() -> None:
    twin = replace(TWO[0], workloads=(replace(HERE, name="the same"),))
    report = reported((TWO[0], twin), range(1), None)
    assert "; 2 runs, " in report.end
    assert len({row["value"] for row in report.rows}) == 1
    labels = [row[:2] for row in report.sections[-1].rows]
    assert labels == [("small, load 0.5", "gorgo-ms"), ("small, load 0.5", "random"),
                      ("the same, load 0.5", "gorgo-ms"), ("the same, load 0.5", "random")]  # fmt: skip


# --- The experiments on other fleets, on runs whose figures follow from the weights by a formula.


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
        whole=score(start),
        tail=score(FOUND),
        weights=FOUND,
        accepted=1,
        first_accepted_s=7200.0,
        generations=3,
        candidate_blocks=7 if task.filtered else 28,
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


def test_random_steps_alone_have_a_row_per_fleet_and_the_steps_of_each_seed() -> None:
    rows = [row for name in ("es", "cma") for row in verdicts_of(EXPERIMENTS[f"steps of {name}"](range(2)))]
    assert [row.labels[0].rpartition(": ")[2] for row in rows] == [
        f"gorgo, tuned live by {optimizer} / defaults, {figure}"
        for optimizer in ("es", "cma")
        for _ in range(3)
        for figure in ("p95 TTFT", "p95 E2E")
    ]
    assert {row.note for row in rows} == {"; ".join(["1 of 2: w_queue 0.5, w_rtt 20"] * 2)}
    assert {row.at_most for row in rows} == {0.9, 1.01}


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
    assert [len(part) for part in (half(seeds), fifth(seeds))] == [5, 2]


@pytest.mark.parametrize("group", EXPERIMENTS)
def test_every_experiment_uses_only_runs_that_it_asked_for(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = RunScore(n=10, errors=0, ttft_ms_p95=100.0, e2e_s_p95=1.0, max_share=0.5)
    weights = {"lambda": 0.2, "w_rtt": 0.5, "w_queue": 0.1}
    run = TuningRun(whole=part, tail=part, weights=weights, reasons=("nothing",), candidate_blocks=1)
    monkeypatch.setattr(TuningTask, "run", lambda _: run)
    runner = Runner(None, n_jobs=1, show_progress=False)
    verdicts = runner.verdicts(EXPERIMENTS[group](range(2)), title=group)
    assert {verdict.group for verdict in verdicts} == {group}
    assert all(verdict.value in (0.5, 1.0) for verdict in verdicts)


def test_a_log_as_the_filter_is_held_against_a_third_of_the_blocks_and_no_later_first_tokens() -> None:
    rows = verdicts_of(tuner_claims.log_filter(range(5)))
    assert len(rows) == 3 * len(tuner_claims.FILTERED) + len(tuner_claims.EXPLORED)
    blocks, ttft, e2e = rows[:3]
    assert (blocks.value, blocks.note, blocks.met) == (0.25, "14 of 56; 14 of 56; 14 of 56", True)
    assert (ttft.value, ttft.at_most, e2e.value) == (1.0, 1.0, 1.0)
    shown = tuning_log([[row.as_json() for row in rows]])
    fleet = shown.tables[0].rows["small-model, short-chat", "`gorgo`"]
    assert (fleet["live blocks"], fleet["blocks by seed"]) == ([0.25, 0.25, 0.25], "14 of 56, 14 of 56, 14 of 56")
    assert list(shown.tables[1].rows) == [("0.5 %",), ("2 %",), ("5 %",)]


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
        replace(task, optimizer="cma"),
        replace(task, filtered=True),
        replace(task, explore=0.02),
    ]
    assert len({task.key(), *(other.key() for other in others)}) == 8


def test_the_key_changes_with_the_code_of_the_tuner(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    keys = set()
    for text in ("one = 1\n", "one = 2\n"):
        file.write_text(text)
        runner._code_digest.cache_clear()
        keys.add(run_key("gorgo", ["art-chat-apr5"], [], code=[file]))
    assert len(keys) == 2


def test_a_campaign_and_a_search_are_tasks_too() -> None:
    short = (("hop", 4), ("max_generations", 2), ("mode", "paper"), ("warm_up_s", 1.0), ("window", 8))
    task = TuningTask(windows=windows(), policy="gorgo", campaign=short)
    assert task.run().generations >= 2
    assert replace(task, filtered=True).run() == replace(task.run(), cpu_s=ANY), "40 decisions refute nothing"
    sizes = Search(candidates=1, seeds=1, held_out_seeds=2)
    searched = TuningTask(windows=windows(), policy="gorgo", search=sizes).run()
    assert searched.generations == 2
    assert searched.reasons
