"""Several routers over one fleet: their runs and tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.command import main
from experiments.grid import Grid
from experiments.systems import several
from experiments.systems.several import runs_of
from tests.documents import tables


def test_prints_every_table_and_takes_stored_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [word for name in ("routers", "delay", "replaced", "overload") for word in ("--only", name)]
    arguments = [
        "--system",
        "routers",
        *groups,
        "--jobs",
        "1",
        "--seeds",
        "1",
        "--scale",
        "0.03",
        "--count",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, routers), (_, targets), (_, delay), (_, replaced), (_, overload) = tables(printed)
    assert [row[0] for row in routers] == ["ART-Chat-like@0.5/2", "ART-Chat-like@1/2"]
    assert all(re.fullmatch(r"\d+\.\d / \d+ / \d+\.\d\d", cell) for row in routers for cell in row[1:])
    assert [row[0] for row in targets] == [row[0] for row in routers]
    small = ["alone, 1,000 routes", "0.005 s, 1,000 routes"]
    assert [row[0] for row in delay] == ["one", "alone", *small, "0.005 s", "0.1 s", "1 s", "10 s"]
    assert [row[-1] == "-" for row in delay] == [True] * 3 + [False] * 5, "bytes of reports"
    assert [row[0] for row in replaced] == ["not replaced", "no store", "store"]
    assert all(0.0 <= float(cell) <= 100.0 for cell in overload[0][1:])
    assert len(list((tmp_path / "runs").glob("*.json"))) == 20
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed, "from the stored runs"


def test_a_large_group_has_so_many_replicas_and_a_row_for_each_sharing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "LARGE", (24, 3))
    assert main(["--only", "large", "--jobs", "1", "--seeds", "1", "--scale", "0.02", "--out", str(tmp_path)]) == 0
    ((_, rows),) = tables(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["none", "30"], ["store", "30"]]
    (one, _) = runs_of(["large"], Grid(seeds=(0,)))
    assert len(one.task.fleet.sim_fleet().replicas) == 24


def test_a_seed_and_a_trace_are_those_of_every_run() -> None:
    found = runs_of(["routers"], Grid(seeds=(5, 6), trace="conversation.jsonl", counts=(4,)))
    assert {one.task.seed for one in found} == {5, 6}
    assert {trace for one in found for trace in one.task.traffic.traces} == {"art-chat-apr5", "conversation.jsonl"}
    assert {one.task.routers.count for one in found if one.column != "one"} == {4}
    assert len(found) == 2 * 4 * 3


def test_a_load_is_in_the_name_of_its_traffic() -> None:
    (one, *_) = runs_of(["overload"], Grid(seeds=(0,)))
    assert one.task.traffic.label == "ART-Chat-like@1.352"
    assert one.task.limits().overload.queue_enabled
