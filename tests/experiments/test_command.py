"""The command: the comparison of every system, tables of groups, and what is misspelt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import command
from experiments.command import PUBLISHED, SYSTEMS, main
from experiments.published import WORDS
from experiments.simulated import SimTask, TaskRun
from experiments.windows import PolicyTask
from tests.documents import ROOT, tables
from tests.experiments.rows import row

SMALL = ["--jobs", "1", "--seeds", "2", "--scale", "0.03"]


def test_a_group_prints_ratios_with_their_intervals_and_means_and_keeps_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--system", "lodestar", "--only", "motivation", *SMALL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, ratios), (_, means) = tables(printed)
    assert [found[1] for found in ratios] == [*["prefix-cache-and-load", "gorgo-ms"] * 2] * 2
    assert all("[" in found[6] for found in ratios)
    assert {found[1] for found in means} == {"least-request", "prefix-cache-and-load", "gorgo-ms"}
    assert {found[2] for found in means} == {"2"}
    assert [re.fullmatch(r"[\d.]+ \[[-\d.]+-[\d.]+\]|-", found[14]) is not None for found in means] == [True] * 6
    assert "all simulated; 12 runs" in printed
    assert len(list((tmp_path / "runs").glob("*.json"))) == 12
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed, "from the stored runs"
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8


def test_pictures_are_of_the_format_that_was_named(tmp_path: Path) -> None:
    arguments = ["--only", "motivation", "--jobs", "1", "--seeds", "1", "--scale", "0.01", "--out", str(tmp_path)]
    main([*arguments, "--pictures", "png"])
    assert [path.name for path in tmp_path.glob("*.png")] == ["motivation-7xL20.png"]
    main([*arguments, "--pictures"])
    assert [path.name for path in tmp_path.glob("*.svg")] == ["motivation-7xL20.svg"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[SimTask | PolicyTask]:
    """Every run has the same figures; the tasks that were run."""
    ran: list[SimTask | PolicyTask] = []

    def run(task: SimTask | PolicyTask) -> TaskRun:
        ran.append(task)
        return TaskRun(row=row(seed=task.seed), cpu_s=1.0, values={"ttft_mean": 0.05, "tpot_mean": 0.2})

    monkeypatch.setattr(SimTask, "run", run)
    monkeypatch.setattr(PolicyTask, "run", run)
    return ran


def test_the_comparison_has_a_table_and_a_page_of_all_five_systems(
    made_up: list[SimTask | PolicyTask], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = tables(printed)
    assert len(found) == len(PUBLISHED) == 5
    assert [header for header, _ in found] == [list(command.HEADER)] * 5
    assert {cells[-1] for _, rows in found for cells in rows} <= set(WORDS)
    assert "One seed and short windows: a preview, not a result" in printed
    page = (tmp_path / "compare.html").read_text()
    assert all(system.TITLE in page for system in PUBLISHED.values())
    assert {task.seed for task in made_up} == {0}
    windows = [task.workload.filters.limit for task in made_up if isinstance(task, PolicyTask)]
    assert set(windows) == {command.QUICK_REQUESTS}


@pytest.mark.usefixtures("made_up")
def test_one_system_is_compared_alone_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--system", "ranvier", "--json", "--jobs", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {found["system"] for found in rows} == {"Ranvier"}
    assert all(found["source"].startswith("Ranvier, post") for found in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "motivations"], "--only motivations: no such group; there are gorgo: tables; lodestar: lodestar, "),
        (["--system", "routers", "--only", "router"], "there are routers: routers, delay, replaced, overload, large"),
        (["--system", "policies"], "--system policies has no published figures; choose its tables by --only"),
        (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl: no such file"),
        (["--system", "nobody"], "invalid choice: 'nobody'"),
    ],
)
def test_what_is_misspelt_is_an_error_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_error_of_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.jsonl").write_text("")
    arguments = ["--system", "lodestar", "--only", "tau", "--trace", str(tmp_path / "short.jsonl"), "--jobs", "1"]
    assert main([*arguments, "--scale", "0.01", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("experiments: ")


def test_no_group_is_in_two_published_systems() -> None:
    groups = [name for system in PUBLISHED.values() for name in system.GROUPS]
    assert len(groups) == len(set(groups))
    assert list(SYSTEMS) == [*PUBLISHED, "policies", "herd", "routers", "tuner"]


def test_make_compare_runs_this_command() -> None:
    assert "-m experiments $(ARGS)" in (ROOT / "Makefile").read_text()
