"""The GORGO paper's tables beside runs whose figures are made up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import command
from experiments.fit import BASE
from experiments.grid import Grid
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
from experiments.windows import PolicyTask
from gorgo.lab.demo.options import RANDOM
from gorgo.lab.results import Spread
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults.scenarios import OTHER_PROFILE
from gorgo.lab.sim.named_fleets import QWEN_L40S
from gorgo.lab.simulate.run import run_once
from tests.experiments.rows import row

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
    assert {task.workload.profile for task in tasks if task.trace == "wildchat-like"} == {H100}


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
    rerun = [one.published for one in found if one.published.source.column.endswith("time_scale 2, TTFT p95")]
    assert [one.source.document for one in rerun] == ["gorgo rerun"]
    assert rerun[0].low == pytest.approx(506 / 611, abs=1e-3)
    printed = {one.published.text for one in found if one.published.source.place == "table 6"}
    assert printed == {"1.794", "1.230"}, "a loss, as printed"
