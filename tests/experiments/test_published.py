"""Published figures: every one has its place in a source, and verdicts and tables on what the simulation gives."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import pytest

from experiments import command
from experiments.command import PUBLISHED
from experiments.fit import BASE
from experiments.fleets import paper_fleet
from experiments.published import DOCUMENTS, WORDS, Claim, Published, compared, page_of, verdict_on
from experiments.reports import HEADER, Grid, mean_cells
from experiments.runner import Runner
from experiments.simulated import TaskRun
from experiments.systems.gorgo_paper import (
    FIGURE_NAMES,
    FILTERS,
    HACKED,
    LOAD_SWEEP,
    RERUN,
    WINDOWS,
    Stats,
    claims,
    named_tasks,
    report,
    stats_of,
    workload_of,
)
from experiments.tables import UNSURE, ClaimVerdict, TableSection, as_markdown, sections, with_interval
from experiments.windows import ONLINE, PolicyTask, Workload
from gorgo.lab.results import Spread
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import QWEN_L40S
from gorgo.lab.sim.scenarios import OTHER_PROFILE
from gorgo.lab.simulate.compare import Ratio
from gorgo.lab.simulate.run import run_once
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import RANDOM
from tests.experiments.rows import row

# --- Published figures: every one has its place in a source, and verdicts on what the simulation gives.


GRID = Grid(seeds=range(1))
#: A place is numbered, or described where the document numbers nothing.
PLACE = re.compile(
    r"(table|figure|appendix) \d+|(table|figures|text) (of|on) [\w, -]+|ablation of [\w -]+|results, [\w, ]+"
    r"|evaluation|overhead|summary|note|text"
)
SOURCE = ("lodestar", "summary", "overall", "mean TTFT")


@pytest.fixture(scope="module")
def claims_published() -> dict[str, list[Claim]]:
    return {name: system.claims(GRID) for name, system in PUBLISHED.items()}


def test_all_five_systems_have_rows(claims_published: dict[str, list[Claim]]) -> None:
    assert list(claims_published) == ["gorgo", "lodestar", "llm-d", "push-map", "ranvier"]
    assert min(map(len, claims_published.values())) >= 5


def test_every_published_figure_has_a_document_a_place_a_row_and_a_column(
    claims_published: dict[str, list[Claim]],
) -> None:
    for one in (claim for some in claims_published.values() for claim in some):
        published = one.published
        assert published.document in DOCUMENTS, one
        assert PLACE.fullmatch(published.place), one
        assert published.row, one
        assert published.column, one


def test_every_figure_is_a_number_or_a_range_as_printed(claims_published: dict[str, list[Claim]]) -> None:
    for one in (claim for some in claims_published.values() for claim in some):
        published = one.published
        assert 0.0 < published.low <= published.high, one
        if isfinite(published.high) and published.text not in ("comparable", "better"):
            assert float(published.text.split("-")[0]) == published.low, one


def test_a_row_of_the_gorgo_paper_is_the_ratio_of_the_two_printed_figures(
    claims_published: dict[str, list[Claim]],
) -> None:
    for one in claims_published["gorgo"]:
        ours, theirs = re.findall(r"[\d.]+", one.published.baseline)
        assert float(ours) / float(theirs) == pytest.approx(one.published.low, abs=6e-4), one


def test_a_row_that_is_not_tried_says_why_and_the_others_have_runs(claims_published: dict[str, list[Claim]]) -> None:
    for one in (claim for some in claims_published.values() for claim in some):
        assert bool(one.tasks) == (one.reproduced is not None), one
        assert one.tasks or one.note, one


def test_a_row_is_there_once(claims_published: dict[str, list[Claim]]) -> None:
    places = [
        (one.on, one.figure, one.published.text, one.published.source)
        for some in claims_published.values()
        for one in some
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("text", "value", "ends", "word"),
    [
        ("1.02-2.15", 1.5, None, "reproduced"),
        ("1.41", 1.30, None, "reproduced"),
        ("1.41", 1.2, None, "smaller"),
        ("1.41", 1.8, None, "larger"),
        ("1.41", 0.9, None, "reversed"),
        ("1.41", 0.9, (0.7, 1.2), "smaller"),
        ("1.41", 0.9, (0.85, 0.95), "reversed"),
        ("1.41", 0.99, None, "smaller"),
        ("0.69", 0.5, None, "larger"),
        ("0.69", 0.9, None, "smaller"),
        ("0.69", 1.2, None, "reversed"),
    ],
)
def test_a_ratio_is_reproduced_larger_smaller_or_reversed(
    text: str, value: float, ends: tuple[float, float] | None, word: str
) -> None:
    low, high = ends or (None, None)
    assert verdict_on(Published.of(*SOURCE, text), Ratio(value, low, high, 3)) == word


def test_a_value_that_is_no_ratio_has_no_direction() -> None:
    published = Published.of(*SOURCE, "58-98")
    words = [verdict_on(published, Ratio(value, None, None, 1), is_ratio=False) for value in (20.0, 90.0, 120.0)]
    assert words == ["smaller", "reproduced", "larger"]
    assert verdict_on(published, None) == "not tried"


def test_better_is_any_gain_and_comparable_is_none() -> None:
    better = replace(Published.of(*SOURCE, "1"), text="better", high=inf)
    assert verdict_on(better, Ratio(1.5, None, None, 1)) == "reproduced"
    assert verdict_on(better, Ratio(0.8, None, None, 1)) == "reversed"
    comparable = replace(Published.of(*SOURCE, "1"), text="comparable")
    assert [verdict_on(comparable, Ratio(value, None, None, 1)) for value in (1.05, 1.3, 0.8)] == [
        "reproduced",
        "larger",
        "smaller",
    ]


def test_the_page_has_every_row_with_its_source_and_verdict() -> None:
    one = Claim(
        system="A <system>",
        on="fleet & traffic",
        figure="mean TTFT, b / a",
        published=Published.of(*SOURCE, "1.41", "9 over 6 ms"),
        reproduced=lambda _: Ratio(1.4, 1.3, 1.5, 3),
        ours=lambda _: Ratio(1.6, None, None, 1),
        ours_name="gorgo-ms",
        target=">= 1.41",
    )
    other = Claim(
        system="B", on="o", figure="f", published=Published.of(*SOURCE, "5"), is_ratio=False, note="no service"
    )
    rows = compared([one, other], {})
    page = page_of(rows, "One seed.")
    assert "A &lt;system&gt;" in page
    assert "fleet &amp; traffic" in page
    assert "Lodestar paper, summary: overall; mean TTFT" in page
    assert "1.40 [1.30-1.50]" in page
    assert "no service" in page
    assert "2 rows: 1 reproduced, 0 larger, 0 smaller, 0 reversed, 1 not tried." in page
    assert list(WORDS) == ["reproduced", "larger", "smaller", "reversed", "not tried"]
    assert rows[0].as_json()["source"] == "Lodestar paper, summary: overall; mean TTFT"
    assert rows[0].cells() == ("fleet & traffic", "mean TTFT, b / a", "1.41", "1.40 [1.30-1.50]", "1.60 (gorgo-ms)",
                               "reproduced")  # fmt: skip


# Verdicts and the Markdown of their tables.
def verdict(value: float | None, **bounds: Any) -> ClaimVerdict:
    return ClaimVerdict(group="g", labels=("t",), value=value, **bounds)


def test_a_verdict_is_met_only_within_its_bounds() -> None:
    assert verdict(1.0).met is None
    assert verdict(1.0, at_most=1.0).met is True
    assert verdict(1.1, at_most=1.0).met is False
    assert verdict(0.9, at_least=1.0).met is False
    assert verdict(None, at_most=1.0).met is False


def test_a_verdict_is_sure_where_the_whole_interval_is_on_its_side() -> None:
    assert verdict(1.0, low=0.9, high=1.1, at_most=2.0).cells() == ("t", "<= 2.00", "1.000 [0.900, 1.100]", "pass")
    assert verdict(1.0, low=0.9, high=1.1, at_least=1.05).cells() == (
        "t",
        ">= 1.05",
        "1.000 [0.900, 1.100]",
        "missed ~",
    )
    assert verdict(1.0, at_most=2.0, note="why").cells() == ("t", "<= 2.00", "1.000", "pass ~", "why")
    assert verdict(None).cells() == ("t", "", "-", "")


def test_markdown_has_a_table_per_group_and_explains_the_mark_below_those_that_have_it() -> None:
    sure = ClaimVerdict(group="a", labels=("w",), value=1.0, low=0.9, high=1.1, at_most=2.0)
    unsure = ClaimVerdict(group="b", labels=("w",), value=1.0, low=0.9, high=1.1, at_most=1.05)
    text = as_markdown(sections([sure, unsure], HEADER, {"a": "First"}), "the end")
    assert text.splitlines()[:3] == [
        "**First**",
        "",
        "| on | of | against | figure | target | of / against [95 %] | met |",
    ]
    assert "**b**" in text
    assert text.count(UNSURE) == 1
    assert text.endswith(f"| w | <= 1.05 | 1.000 [0.900, 1.100] | pass ~ |\n\n{UNSURE}\n\nthe end\n")
    assert as_markdown([TableSection("", ("a",), [("1",)])], "end") == "| a |\n| --- |\n| 1 |\n\nend\n"


def test_a_row_as_json_has_its_words_and_whether_it_is_met() -> None:
    found = ClaimVerdict(group="g", labels=("a", "b"), value=2.0, at_most=1.0).as_json()
    assert (found["group"], found["text"], found["met"]) == ("g", "a, b", False)


def test_an_interval_is_shown_of_several_seeds_alone() -> None:
    assert [with_interval(values, ".1f") for values in ([], [1.0], [1.0, 2.0, 3.0])] == ["-", "1.0", "2.0 [-0.5-4.5]"]


def test_figures_are_means_over_seeds_workload_by_workload() -> None:
    here, there = (Workload(name=name, traces=("t",), time_scale=2.0) for name in ("here", "there"))
    runs = {
        PolicyTask(there, "gorgo-ms", 0): TaskRun(row=row(ttft_ms=200.0, e2e_s=2.0), cpu_s=0.0),
        PolicyTask(there, "gorgo-ms", 1): TaskRun(row=row(seed=1, ttft_ms=600.0, e2e_s=4.0), cpu_s=0.0),
        PolicyTask(here, "random", 0): TaskRun(row=row(ttft_ms=20.8, e2e_s=None), cpu_s=0.0),
    }
    assert Spread() == row(ttft_ms=None).ttft_ms
    assert mean_cells(list(runs), runs) == [
        ("there, load 0.5", "gorgo-ms", "200", "400", "1.50", "3.00", "50.0"),
        ("here, load 0.5", "random", "10", "21", "-", "-", "50.0"),
    ]


# --- The GORGO paper's tables beside runs whose figures are made up.


PROFILE, H100 = find_profile(BASE), find_profile(OTHER_PROFILE)
#: Runs of one seed: table 2; April 7 at time scale 1 and 2, steady, and at all three with a surge; the hacked weights
#: beside `random` and policies of April 6; WildChat.
RUNS = 15 + (3 + 5) + (3 + 5 + 5) + 2 + len(RERUN.stats)


def hacked_ratios(speed: float) -> tuple[float, float]:
    """Return p95 TTFT and p95 E2E without a queue weight over `random`, at 1.7 requests a second in an open loop.

    `speed`: of prefills, over that of the profile.
    """
    base = find_profile(QWEN_L40S)
    faster = replace(
        base,
        prefill_tokens_per_s=base.prefill_tokens_per_s * speed,
        prefill_kappa_s=base.prefill_kappa_s / speed,
    )
    workload = replace(
        workload_of(replace(HACKED, time_scale=2.5), faster, concurrency=100_000), filters=replace(FILTERS, limit=600)
    )
    hacked, random = (stats_of(run_once(PolicyTask(workload, name, 0).job()).row) for name in (HACKED.policy, RANDOM))
    return hacked[1] / random[1], hacked[4] / random[4]


def test_cheap_prefills_alone_make_one_replica_for_all_look_good_in_ttft_and_bad_in_e2e() -> None:
    ttft, e2e = hacked_ratios(1.0)
    assert ttft > 2.0
    assert e2e > 2.0
    ttft, e2e = hacked_ratios(2.5)
    assert ttft < 0.9
    assert e2e > 1.3


def as_measured(task: PolicyTask) -> TaskRun:
    """The measured figures where there are any; ten times as much for seed 2, and twice the E2E of `prefix-cache`."""
    workload, policy = task.workload, task.job().policy
    window = next((one for one in WINDOWS if workload_of(one, PROFILE).traces == workload.traces
                   and one.time_scale == workload.time_scale), None)  # fmt: skip
    values: Stats = (100.0, 200.0, 300.0, 1.0, 2.0, 3.0, 9.0)
    if window is not None and policy in window.stats and task.policy not in ("gorgo (0.23, 0)", "gorgo (2, 0.104)"):
        values = window.stats[policy]
    factor, late = 10.0 if task.seed == 2 else 1.0, 2.0 if policy == "prefix-cache" else 1.0
    ttft, e2e = [factor * value for value in values[:3]], [factor * late * value for value in values[3:6]]
    figures = replace(
        row(policy, seed=task.seed),
        ttft_ms=Spread(1.0, *ttft),
        e2e_s=Spread(1.0, *e2e),
        tpot_ms=Spread(p50=factor * values[6]),
        cache_hit=0.25,
    )
    return TaskRun(row=figures, cpu_s=0.0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyTask, "run", as_measured)


@pytest.fixture
def tables(made_up: None) -> dict[str, Any]:
    rows: dict[str, Any] = report([], Grid(seeds=range(3)), Runner(None, n_jobs=1, show_progress=False)).rows
    return rows


def test_a_figure_is_the_median_over_seeds_and_is_missed_beyond_thirty_percent(tables: dict[str, Any]) -> None:
    assert len(tables["stats"]) == 3 * 5 * 7
    off = {(one["policy"], one["figure"]): one["simulated"] / one["measured"] for one in tables["stats"]}
    late = {name for name, ratio in off.items() if ratio > 1.3}
    assert late == {("prefix-cache", f"E2E {name}") for name in ("p50", "p95", "p99")}
    assert all(ratio == pytest.approx(1.0) for name, ratio in off.items() if name not in late)


def test_a_window_has_its_mean_ratio_and_the_order_of_its_policies(tables: dict[str, Any]) -> None:
    for one in tables["windows"]:
        assert one["ratios"]["E2E p95"] == pytest.approx(2 ** (1 / 5))
        assert one["ratios"]["TTFT p95"] == pytest.approx(1.0)
        assert one["ratio"] == pytest.approx(2 ** (3 / 35))
        assert one["within"] == pytest.approx(32 / 35)
        assert one["rho"] == pytest.approx(1.0)
    assert [one["fitted"] for one in tables["windows"]] == [True, False, True]


def test_every_published_comparison_is_a_row(tables: dict[str, Any]) -> None:
    affinity = [one for one in tables["claims"] if one["on"] in ("April 6", "April 7")]
    assert [round(one["published"], 3) for one in affinity] == [0.845, 0.691, 0.931, 0.857], (
        "-6.9 to -15.5, -14.3 to -30.9"
    )
    assert all(one["simulated"] == pytest.approx(one["published"]) for one in affinity)
    count = Counter(one["on"].partition(" 2")[0] if "table 5" in one["on"] else one["on"] for one in tables["claims"])
    assert count == {
        **{window.on: 2 for window in WINDOWS},
        **{f"April 7, time scale {load}": 2 * 2 for load in (1, 2, 3)},
        "April 7, time scale": 4 * 2,
        "WildChat": len(FIGURE_NAMES),
        "queue weight 0": 5 * 2,
    }
    published = {(one["on"], one["against"], one["figure"]): round(one["published"], 2) for one in tables["claims"]}
    assert published["April 7, time scale 2, table 5", "prefix-cache", "E2E p95"] == 0.32
    assert published["WildChat", "random", "E2E p50"] == 1.12, "a loss, as printed"
    assert published["queue weight 0", "least-request", "TTFT p95"] == 0.83
    assert published["queue weight 0", "least-request", "E2E p95"] == 4.79


def test_half_load_has_every_figure_of_table_5(tables: dict[str, Any]) -> None:
    rows = {(one["policy"], one["figure"]): one for one in tables["half_load"]}
    assert len(rows) == 5 * 7
    assert rows["prefix-cache", "TTFT p95"]["measured"] == 8243
    assert rows["gorgo", "TTFT p95"]["simulated"] == 200.0


def test_april_7_is_there_again_with_its_load_in_one_wave(tables: dict[str, Any]) -> None:
    assert len(tables["surge"]) == 2 * 5 * 7
    assert {one["simulated"] for one in tables["surge"] if one["figure"] == "TTFT p95"} == {200.0}
    assert [one["measured"] for one in tables["surge_sweep"]] == [one["measured"] for one in tables["sweep"]]
    assert {one["window"] for one in tables["surge_sweep"]} == {
        f"April 7, time scale {load}, surge" for load in (1, 2, 3)
    }


def test_the_load_sweep_has_both_figures_of_every_policy_and_load(tables: dict[str, Any]) -> None:
    assert len(tables["sweep"]) == 3 * 3 * 2
    busy = {
        one["policy"]: one for one in tables["sweep"] if one["window"].endswith("1") and one["figure"] == "TTFT p95"
    }
    assert [busy[policy]["measured"] for policy in LOAD_SWEEP] == [8260, 1835, 6138]
    assert {one["simulated"] for one in busy.values()} == {200.0}


def test_the_runs_are_those_of_the_tables_each_once() -> None:
    tasks = {task for seed in range(2) for _, task in named_tasks(PROFILE, H100, seed)}
    assert len({task.key() for task in tasks}) == 2 * RUNS
    assert {task.workload.world for task in tasks if task.trace == "wildchat-like"} == {paper_fleet(H100)}


@pytest.mark.usefixtures("made_up")
def test_the_command_prints_the_same_tables_as_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--system", "gorgo", "--only", "tables", "--out", str(tmp_path), "--jobs", "1", "--seeds", "1"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert "26.28 (13.14) *" in text
    assert "673 (673)" in text
    assert "96 of 105 figures within 30 %" in text
    assert command.main([*arguments, "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert (len(stored["stats"]), len(stored["windows"])) == (105, 3)
    assert len(list((tmp_path / "runs").glob("*.json"))) == RUNS


@pytest.mark.usefixtures("made_up")
def test_the_command_fits_within_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fit", "--out", str(tmp_path), "--jobs", "1", "--seeds", "1", "--evaluations", "3"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["evaluations"], len(printed.err.splitlines())) == (3, 3)
    assert found["held_out"] == pytest.approx(found["fitted"]), "twice the E2E of one policy, in every window"


def test_a_run_is_the_authors_set_up() -> None:
    tasks = dict(named_tasks(PROFILE, H100, 0))
    job = tasks["April 5", "gorgo"].job()
    assert job.weights == {"w_rtt": 0.276, "w_queue": 0.5}
    assert (job.limits, job.time_scale, job.filters.max_input, job.client_concurrency) == (None, 1.0, 24_000, 64)
    assert (job.filters.min_output, job.filters.max_output) == (128, 128)
    assert tasks["April 7", "least-load"].job().weights is None
    assert tasks["April 7", "least-load"].job().time_scale == 3.0


def test_printed_and_rerun_wildchat_stand_side_by_side_with_their_sources() -> None:
    found = [one for one in claims(Grid(seeds=range(1))) if "random" in one.figure and "WildChat" in one.on]
    rerun = [one.published for one in found if one.published.column.endswith("time_scale 2, TTFT p95")]
    assert [one.document for one in rerun] == ["gorgo rerun"]
    assert rerun[0].low == pytest.approx(506 / 611, abs=1e-3)
    printed = {one.published.text for one in found if one.published.place == "table 6"}
    assert printed == {"1.794", "1.230"}, "a loss, as printed"


def test_april_5_and_a_row_of_wildchat_are_run_online_as_in_the_paper() -> None:
    online = [one for one in claims(Grid(seeds=range(1))) if "gorgo, online" in one.figure]
    assert {one.on for one in online} == {"April 5", "WildChat, 32 open"}
    assert {one.figure for one in online if one.on.startswith("WildChat")} == {"p95 TTFT, gorgo, online / random"}
    assert sum(one.on == "April 5" for one in online) == 2 * 4, "two figures against four baselines"
    tasks = [task for one in online for task in one.tasks]
    assert ONLINE in {task.policy for task in tasks if isinstance(task, PolicyTask)}


def test_an_online_run_tries_weights_and_has_a_key_of_its_own() -> None:
    workload = Workload(
        name="short",
        traces=("art-chat-apr5",),
        filters=TraceFilters(limit=600),
        world=paper_fleet(PROFILE),
        client_concurrency=64,
    )
    online, fixed = PolicyTask(workload, ONLINE, 0), PolicyTask(workload, "gorgo", 0)
    assert online.job() == fixed.job()
    assert online.key() != fixed.key()
    assert online.run().row.ttft_ms != fixed.run().row.ttft_ms
