from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.apps.cache_sources.command import main
from gorgo.apps.cache_sources.groups import comparisons
from gorgo.apps.cache_sources.measure import measure
from gorgo.apps.cache_sources.pictures import pictures
from tests.documents import tables


def test_prints_targets_means_and_delays_and_keeps_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "override", "--seeds", "2", "--scale", "0.05", "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, targets), (_, means) = tables(printed)[:2]
    assert [row[1:4] for row in targets] == [
        ["override on", "override off", "p99 TTFT"],
        ["override on", "override off", "hit"],
    ]
    assert all("[" in row[5] for row in targets)
    assert [row[1] for row in means] == ["round-robin", "override off", "override on", "gorgo-ms, events"]
    assert [row[10] == "-" for row in means] == [True, True, True, False], "bytes of reports"
    assert {row[2] for row in means} == {"2"}
    assert "All simulated; 8 runs" in printed
    assert len(list((tmp_path / "runs").glob("*.json"))) == 8
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed, "from the stored runs"


def test_figures_over_time_have_a_column_for_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "faults", "--seeds", "1", "--scale", "0.1", "--out", str(tmp_path), "--pictures"]) == 0
    assert [path.name for path in tmp_path.glob("*.svg")] == ["faults.svg"]
    (_, means), (header, times) = tables(capsys.readouterr().out)
    assert header == ["from, s", "begins", "history and cached_tokens", "push", "events"]
    assert len(means) == 3
    assert all(len(cell.split(" / ")) == 3 for row in times for cell in row[2:])
    assert [row[0] for row in times[:3]] == ["0", "5", "10"]


def test_an_unknown_group_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "source"])
    assert "no such group; there are: sources, " in capsys.readouterr().err


def test_pictures_have_hits_over_the_size_of_the_fleet_faults_marked_and_delays() -> None:
    chosen = [replace(one, traffic=replace(one.traffic, requests=40)) for one in comparisons()]
    chosen = [one for one in chosen if (one.group == "replicas" and one.fleet.replicas <= 4) or one.by_time]
    runs = {task: measure(task) for one in chosen for task in one.tasks(range(2))}
    sizes, faults = pictures(chosen, runs, range(2))
    assert [panel.title for panel in sizes.panels] == ["hit, %", "p95 TTFT, ms", "bytes of reports a request"]
    assert [point.x for point in sizes.panels[0].curves["round-robin"]] == [2.0, 4.0]
    assert set(sizes.panels[2].curves) == {"push", "events"}
    assert faults.panels[0].marks[110.0] == "reports cut"
    assert all(point.low <= point.value <= point.high for curve in sizes.panels[0].curves.values() for point in curve)


def test_a_picture_has_hits_and_ttft_by_depth_mode() -> None:
    chosen = [replace(one, traffic=replace(one.traffic, requests=40)) for one in comparisons() if one.group == "depths"]
    runs = {task: measure(task) for one in chosen for task in one.tasks(range(1))}
    (depths,) = pictures(chosen, runs, range(1))
    assert [panel.title for panel in depths.panels] == ["mean TTFT, ms", "hit, %"]
    for panel in depths.panels:
        assert {"multi-depth", "multi-depth, single", "longest prefix, exact caches"} < set(panel.curves)
        for bars in panel.curves.values():
            assert [bar.x for bar in bars] == ["branching", "continued", "resumed"]
