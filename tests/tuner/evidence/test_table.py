"""The evidence's machinery on windows of a few requests: its figures are `make tuning-table`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gorgo.errors import TunerError
from gorgo.policies.gorgo import Gorgo
from gorgo.policies.nearest import Nearest
from tuner.evidence import kept, key
from tuner.evidence.command import as_table, main, measured
from tuner.evidence.kept import found_of
from tuner.evidence.statement import Experiment, Runs, Statement, campaign, fifth, half, twice
from tuner.evidence.targets import EXPERIMENTS
from tuner.evidence.task import Found, Part, Task, run_task
from tuner.evidence.twin_task import TwinTask, run_twin_task
from tuner.evidence.windows import Windows


@pytest.fixture(autouse=True)
def few_requests_tell_how_the_code_behaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(key, "SHORT", Windows(shapes=("art-chat-apr5",), draw=0, limit=60))
    forget = (key._behaviour.cache_clear, key._feed.cache_clear)
    for clear in forget:
        clear()
    yield
    for clear in forget:
        clear()


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


def test_a_task_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(windows=windows(), policy="gorgo", after=10)
    made = found_of([task, task], folder=tmp_path, n_jobs=1, title="once")
    monkeypatch.setattr(kept, "_run", None)  # nothing is left to run
    again = found_of([task], folder=tmp_path, n_jobs=1, title="once")
    assert again == made
    assert (made[task].whole.n, made[task].tail.n) == (40, 30)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    task = Task(windows=windows(), policy="gorgo")
    (tmp_path / f"{task.key}.json").write_text("{}")
    with pytest.raises(TunerError, match=f"{task.key}.json: damaged"):
        found_of([task], folder=tmp_path, n_jobs=1, title="damaged")


def test_what_a_figure_depends_on_is_in_the_key() -> None:
    task = Task(windows=windows(), policy="gorgo")
    others = [
        Task(windows=windows(draw=1), policy="gorgo"),
        Task(windows=windows(), policy="gorgo-ms"),
        Task(windows=windows(), policy="gorgo", campaign=campaign({"mode": "paper"})),
    ]
    assert len({task.key, *(other.key for other in others)}) == 4


def test_the_key_changes_with_what_the_code_does_and_not_with_how_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Task(windows=windows(), policy="gorgo")
    before = task.key
    choose = Gorgo.choose
    monkeypatch.setattr(Gorgo, "choose", lambda self, *given: choose(self, *given))
    key._behaviour.cache_clear()
    assert task.key == before
    monkeypatch.setattr(Gorgo, "choose", Nearest.choose)
    key._behaviour.cache_clear()
    assert task.key != before


def test_a_field_at_its_default_is_not_in_the_key() -> None:
    said = key._said(Task(windows=windows(), policy="gorgo"))
    assert "later" not in said
    assert "later" in key._said(Task(windows=windows(), policy="gorgo", later=(10, (("w_rtt", 1.0),))))


def test_weights_put_later_are_in_force_from_then_on() -> None:
    far = (("w_queue", 1e-6), ("w_rtt", 2.0))
    task = Task(windows=windows(), policy="gorgo", after=20)
    put, always = run_task(replace(task, later=(20, far))), run_task(replace(task, weights=far))
    plain = run_task(task)
    assert put.tail != plain.tail
    assert put.whole != always.whole


def test_a_tuner_and_a_twin_are_tasks_too() -> None:
    options = campaign({"mode": "paper", "warm_up_s": 1.0, "window": 8, "hop": 4, "max_generations": 2})
    tuned = run_task(Task(windows=windows(), policy="gorgo", campaign=options))
    assert tuned.generations >= 2
    assert Found.from_json(tuned.as_json()) == tuned
    searched = run_twin_task(TwinTask(windows=windows(), policy="gorgo", candidates=1, seeds=1, held_out_seeds=2))
    assert searched.generations == 2
    assert searched.reasons


def _statements(seeds: Sequence[int], runs: Runs) -> list[Statement]:
    (found,) = runs.values()
    return [Statement(group="g", text="requests", value=float(found.whole.n), at_least=40.0, at_most=40.0)]


def test_an_experiment_is_its_runs_and_what_they_show(tmp_path: Path) -> None:
    experiment = Experiment("g", lambda seeds: [Task(windows=windows(draw=seeds[0]), policy="gorgo")], _statements)
    (row,) = measured(experiment, seeds=[0], out=tmp_path, n_jobs=1)
    assert row.met
    assert as_table([row], seeds=1).row_count == 1


def test_a_statement_holds_only_within_its_bounds() -> None:
    def met(value: float | None, **bound: float) -> bool | None:
        return Statement(group="g", text="t", value=value, **bound).met  # type: ignore[arg-type]

    assert met(1.0) is None
    assert met(1.0, at_most=1.0) is True
    assert met(1.1, at_most=1.0) is False
    assert met(0.9, at_least=1.0) is False
    assert met(None, at_most=1.0) is False


def test_fewer_seeds_are_fewer_runs() -> None:
    seeds = range(10)
    assert [len(part) for part in (half(seeds), fifth(seeds), twice(seeds))] == [5, 2, 20]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_every_experiment_asks_only_for_what_it_runs(experiment: Experiment) -> None:
    part = Part(n=10, errors=0, ttft_ms_p95=100.0, e2e_s_p95=1.0, max_share=0.5)
    found = Found(whole=part, tail=part, weights={"lambda": 0.2, "w_rtt": 0.5, "w_queue": 0.1}, reasons=("nothing",))
    seeds = range(2)
    runs = dict.fromkeys(experiment.first(seeds), found)
    if experiment.then is not None:
        runs |= dict.fromkeys(experiment.then(seeds, runs), found)
    rows = experiment.judge(seeds, runs)
    assert {row.group for row in rows} == {experiment.name}
    assert all(row.value in (0.5, 1.0) for row in rows)


def test_an_experiment_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
