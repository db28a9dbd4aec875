from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.fleet_fit import command
from gorgo.apps.fleet_fit.comparison import FleetComparison, compare, tasks_of
from gorgo.apps.fleet_fit.fit import BASE
from gorgo.apps.fleet_fit.measure import FitRun, FitTask
from gorgo.apps.fleet_fit.published import FIGURE_NAMES, LOAD_SWEEP, WILDCHAT, WINDOWS, RunStats
from gorgo.sim.engine.profiles import find_profile
from gorgo.sim.faults.scenarios import OTHER_PROFILE

PROFILE, H100 = find_profile(BASE), find_profile(OTHER_PROFILE)
#: Runs of one seed: table 2; April 7 at time scale 1 and 2, steady, and at all three with a surge; the hacked weights
#: beside `random` and policies of April 6; WildChat.
RUNS = 15 + (3 + 5) + (3 + 5 + 5) + 2 + len(WILDCHAT)


def as_measured(task: FitTask) -> FitRun:
    """The measured figures where there are any; ten times as much for seed 2, and twice the E2E of `prefix-cache`."""
    window = next((one for one in WINDOWS if (one.trace, one.time_scale) == (task.trace, task.time_scale)), None)
    found = None if window is None else window.stats.get(task.policy)
    values = (100.0, 200.0, 300.0, 1.0, 2.0, 3.0, 9.0) if found is None else found.values()
    factor = 10.0 if task.seed == 2 else 1.0
    late = 2.0 if task.policy == "prefix-cache" else 1.0
    stats = RunStats(*(factor * (late if 3 <= place <= 5 else 1.0) * v for place, v in enumerate(values)))
    return FitRun(stats=stats, errors=0, cache_hit=0.25, share={"us-ashburn-0": 1.0}, cpu_s=0.0)


@pytest.fixture(scope="module")
def compared() -> FleetComparison:
    runner: Runner[FitTask, FitRun] = Runner(as_measured, repr, RunCache(None, FitRun), n_jobs=1, show_progress=False)
    return compare(PROFILE, H100, range(3), runner)


def test_a_figure_is_the_median_over_seeds_and_is_missed_beyond_thirty_percent(compared: FleetComparison) -> None:
    assert len(compared.stats) == 3 * 5 * 7
    late = {(row.policy, row.figure) for row in compared.stats if not row.met}
    assert late == {("prefix-cache", f"E2E {name}") for name in ("p50", "p95", "p99")}
    assert all(row.ratio == pytest.approx(1.0) for row in compared.stats if row.met)


def test_a_window_has_its_mean_ratio_and_the_order_of_its_policies(compared: FleetComparison) -> None:
    for row in compared.windows:
        assert row.ratios["E2E p95"] == pytest.approx(2 ** (1 / 5))
        assert row.ratios["TTFT p95"] == pytest.approx(1.0)
        assert row.ratio == pytest.approx(2 ** (3 / 35))
        assert row.within == pytest.approx(32 / 35)
        assert row.rho == pytest.approx(1.0)
    assert [row.fitted for row in compared.windows] == [True, False, True]


def test_every_published_comparison_is_a_row(compared: FleetComparison) -> None:
    affinity = [row for row in compared.claims if row.on in ("April 6", "April 7")]
    assert [round(row.published, 3) for row in affinity] == [0.845, 0.691, 0.931, 0.857], (
        "-6.9 to -15.5, -14.3 to -30.9"
    )
    assert all(row.simulated == pytest.approx(row.published) for row in affinity)
    count = Counter(row.on.partition(" 2")[0] if "table 5" in row.on else row.on for row in compared.claims)
    assert count == {
        **{window.name: 2 for window in WINDOWS},
        **{f"April 7, time scale {load}": 2 * 2 for load in (1, 2, 3)},
        "April 7, time scale": 4 * 2,
        "WildChat": len(FIGURE_NAMES),
        "queue weight 0": 5 * 2,
    }
    published = {(row.on, row.against, row.figure): round(row.published, 2) for row in compared.claims}
    assert published["April 7, time scale 2, table 5", "prefix-cache", "E2E p95"] == 0.32
    assert published["WildChat", "random", "E2E p50"] == 1.12, "a loss, as printed"
    assert published["queue weight 0", "least-request", "TTFT p95"] == 0.83
    assert published["queue weight 0", "least-request", "E2E p95"] == 4.79


def test_half_load_has_every_figure_of_table_5(compared: FleetComparison) -> None:
    rows = {(row.policy, row.figure): row for row in compared.half_load}
    assert len(rows) == 5 * 7
    assert rows["prefix-cache", "TTFT p95"].measured == 8243
    assert rows["gorgo", "TTFT p95"].simulated == 200.0


def test_april_7_is_there_again_with_its_load_in_one_wave(compared: FleetComparison) -> None:
    assert len(compared.surge) == 2 * 5 * 7
    assert {row.simulated for row in compared.surge if row.figure == "TTFT p95"} == {200.0}
    assert [row.measured for row in compared.surge_sweep] == [row.measured for row in compared.sweep]
    assert {row.window for row in compared.surge_sweep} == {f"April 7, time scale {load}, surge" for load in (1, 2, 3)}


def test_the_load_sweep_has_both_figures_of_every_policy_and_load(compared: FleetComparison) -> None:
    assert len(compared.sweep) == 3 * 3 * 2
    busy = {row.policy: row for row in compared.sweep if row.window.endswith("1") and row.figure == "TTFT p95"}
    assert [busy[policy].measured for policy in LOAD_SWEEP] == [8260, 1835, 6138]
    assert {row.simulated for row in busy.values()} == {200.0}


def test_the_runs_are_those_of_the_tables_each_once() -> None:
    tasks = tasks_of(PROFILE, H100, range(2))
    assert len(tasks) == len(set(tasks)) == 2 * RUNS
    assert {task.profile for task in tasks if task.trace == "wildchat-like"} == {H100}


def test_the_command_prints_the_same_tables_as_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", as_measured)
    arguments = ["--out", str(tmp_path), "--jobs", "1", "tables", "--seeds", "1"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert "26.28 (13.14) *" in text
    assert "673 (673)" in text
    assert "96 of 105 figures within 30 %" in text
    assert command.main([*arguments, "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert (len(stored["stats"]), len(stored["windows"])) == (105, 3)
    assert len(list((tmp_path / "runs").glob("*.json"))) == RUNS


def test_the_command_fits_within_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda task: as_measured(replace(task, seed=0)))
    assert command.main(["--out", str(tmp_path), "--jobs", "1", "fit", "--evaluations", "3"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["evaluations"], len(printed.err.splitlines())) == (3, 3)
    assert found["held_out"] == pytest.approx(found["fitted"]), "twice the E2E of one policy, in every window"
