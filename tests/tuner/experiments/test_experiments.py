"""The experiments' machinery on windows of a few requests; `make tuning-table` has the figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gorgo.apps.claims import run_cache
from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.errors import ReportError
from tuner.experiments.command import EXPERIMENTS, main, task_runner
from tuner.experiments.comparison import Runs, TuningExperiment, fifth, half, twice
from tuner.experiments.task import Search, Task, TaskRun, run_task
from tuner.experiments.windows import Windows
from tuner.offline.score import RunScore


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


def test_a_task_is_run_once_and_found_again(tmp_path: Path) -> None:
    task = Task(windows=windows(), policy="gorgo", after=10)
    made = task_runner(tmp_path, n_jobs=1).runs([task, task], title="once")
    again = task_runner(tmp_path, n_jobs=1)
    assert again.missing([task]) == {}
    assert again.runs([task], title="once") == made
    assert (made[task].whole.n, made[task].tail.n) == (40, 30)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    task = Task(windows=windows(), policy="gorgo")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{task.key()}.json").write_text("{}")
    with pytest.raises(ReportError, match=f"{task.key()}.json: damaged"):
        task_runner(tmp_path, n_jobs=1).runs([task], title="damaged")


def test_what_a_figure_depends_on_is_in_the_key() -> None:
    task = Task(windows=windows(), policy="gorgo")
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
        run_cache._code_digest.cache_clear()
        keys.add(run_cache.run_key("gorgo", ["art-chat-apr5"], [], code=[file]))
    assert len(keys) == 2


def test_weights_put_later_are_in_force_from_then_on() -> None:
    far = (("w_queue", 1e-6), ("w_rtt", 2.0))
    task = Task(windows=windows(), policy="gorgo", after=20)
    put, always = run_task(replace(task, later=(20, far))), run_task(replace(task, weights=far))
    plain = run_task(task)
    assert put.tail != plain.tail
    assert put.whole != always.whole


def test_a_campaign_and_a_search_are_tasks_too() -> None:
    short = (("hop", 4), ("max_generations", 2), ("mode", "paper"), ("warm_up_s", 1.0), ("window", 8))
    assert run_task(Task(windows=windows(), policy="gorgo", campaign=short)).generations >= 2
    sizes = Search(candidates=1, seeds=1, held_out_seeds=2)
    searched = run_task(Task(windows=windows(), policy="gorgo", search=sizes))
    assert searched.generations == 2
    assert searched.reasons


def _experiment(seeds: Sequence[int]) -> TuningExperiment:
    first = Task(windows=windows(draw=seeds[0]), policy="gorgo")
    runs: Runs = yield [first]
    second = replace(first, after=int(runs[first].whole.n) // 2)
    runs = yield [second]
    counts = [float(part.n) for part in (runs[first].whole, runs[second].tail)]
    return [ClaimVerdict(group="g", labels=("requests",), value=value, at_least=40.0) for value in counts]


def test_an_experiment_asks_for_runs_that_depend_on_earlier_ones(tmp_path: Path) -> None:
    whole, half_of_it = task_runner(tmp_path, n_jobs=1).verdicts(_experiment([0]), title="g")
    assert (whole.met, half_of_it.met) == (True, False)
    assert (whole.value, half_of_it.value) == (40.0, 20.0)


def test_a_verdict_is_met_only_within_its_bounds() -> None:
    def met(value: float | None, **bound: float) -> bool | None:
        return ClaimVerdict(group="g", labels=("t",), value=value, **bound).met  # type: ignore[arg-type]

    assert met(1.0) is None
    assert met(1.0, at_most=1.0) is True
    assert met(1.1, at_most=1.0) is False
    assert met(0.9, at_least=1.0) is False
    assert met(None, at_most=1.0) is False


def test_fewer_seeds_are_fewer_runs() -> None:
    seeds = range(10)
    assert [len(part) for part in (half(seeds), fifth(seeds), twice(seeds))] == [5, 2, 20]


@pytest.mark.parametrize("group", EXPERIMENTS)
def test_every_experiment_uses_only_runs_that_it_asked_for(group: str) -> None:
    part = RunScore(n=10, errors=0, ttft_ms_p95=100.0, e2e_s_p95=1.0, max_share=0.5)
    run = TaskRun(whole=part, tail=part, weights={"lambda": 0.2, "w_rtt": 0.5, "w_queue": 0.1}, reasons=("nothing",))
    runner: Runner[Task, TaskRun] = Runner(lambda _: run, Task.key, RunCache(None, TaskRun), n_jobs=1)
    verdicts = runner.verdicts(EXPERIMENTS[group](range(2)), title=group)
    assert {verdict.group for verdict in verdicts} == {group}
    assert all(verdict.value in (0.5, 1.0) for verdict in verdicts)


def test_the_command_prints_a_row_per_verdict_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuner.experiments.command.EXPERIMENTS", {"g": _experiment})
    assert main(["--out", str(tmp_path), "--seeds", "1", "--jobs", "1"]) == 1
    assert ["requests", ">=", "40.00", "20.000", "missed", "~"] in map(str.split, capsys.readouterr().out.splitlines())
    rows = json.loads((tmp_path / "tuning-table.json").read_text())
    assert [(row["text"], row["value"], row["met"]) for row in rows] == [
        ("requests", 40.0, True),
        ("requests", 20.0, False),
    ]


def test_an_experiment_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
