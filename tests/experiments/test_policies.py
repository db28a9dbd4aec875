from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from experiments.comparison import MEASURES
from experiments.runner import Runner
from experiments.systems.policies import GROUPS, PUBLISHED_RATIOS, TITLES, all_targets, report_on
from experiments.tables import ClaimVerdict, as_markdown
from experiments.windows import WEIGHTED, RatioTarget, Workload
from gorgo.core.policy.weights import Weights
from gorgo.lab.demo.options import ALL_READINGS, BASELINES
from gorgo.lab.sim.faults.scenarios import find_scenario
from gorgo.lab.sim.named_fleets import find_fleet
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from tests.figures.wording import plain

#: Groups whose rows have tables of their own, or none yet.
ELSEWHERE = ("engines", "partial-hits", "tail", "residual")


def test_every_target_names_what_there_is() -> None:
    for target in all_targets("conversation.jsonl"):
        assert target.figure in MEASURES
        for task in target.tasks([0]):
            policy, weights = WEIGHTED.get(task.policy, (task.policy, {}))
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
    assert len(with_it) == len(without) + 3 * 3 + 2 * 3 + 2 * 3
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
    ours = {one.label for target in targets if target.policy == "gorgo-ms" for one in target.workloads}
    found = [target for target in targets if target.group == "residual"]
    assert {(one.policy, tuple(one.others), one.at_most) for one in found} == {("gorgo-residual", ("gorgo-ms",), 1.02)}
    missing = ours - {target.workloads[0].label for target in found}
    assert all("partial-hits" in label or "checkpoints" in label or "WildChat" in label for label in missing), missing
    assert found[0].labels(["gorgo-ms"])[2] == "gorgo-ms"


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


def test_runs_that_targets_share_are_made_once_and_found_again(tmp_path: Path) -> None:
    first = report_on(TWO, range(1), Runner(tmp_path, n_jobs=1, show_progress=False))
    both = report_on(TWO, range(2), Runner(tmp_path, n_jobs=1, show_progress=False))
    assert "1 of 2 targets met, all simulated; 2 runs" in first.end
    assert "; 4 runs, " in both.end
    assert "; 2 of them were made now" in both.end
    assert [row["met"] for row in both.rows] == [True, False]
    text = as_markdown(both.sections, both.end)
    assert "Against the same rule with full knowledge (`oracle`)" in text
    assert text.count("| small, load 0.5 | gorgo-ms |") == 3


def test_settings_of_two_names_can_be_one_run() -> None:
    twin = replace(TWO[0], workloads=(replace(HERE, name="the same"),))
    report = report_on((TWO[0], twin), range(1), Runner(None, n_jobs=1, show_progress=False))
    assert "; 2 runs, " in report.end
    assert len({row["value"] for row in report.rows}) == 1
    labels = [row[:2] for row in report.sections[-1].rows]
    assert labels == [("small, load 0.5", "gorgo-ms"), ("small, load 0.5", "random"),
                      ("the same, load 0.5", "gorgo-ms"), ("the same, load 0.5", "random")]  # fmt: skip
