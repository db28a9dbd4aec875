"""The laboratory from a program: the rows of the command, by its defaults, and flat rows for data frames."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.errors import ConfigError, MissingExtra, UnknownPolicy
from gorgo.lab import simulate
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.routers import RouterGroup
from gorgo.lab.traces import TraceFilters
from tests.lab.sim.fleets import three_regions
from tests.lab.test_results import row

REGIONS = Path(__file__).parents[3] / "regions.yaml"


def command(*words: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["simulate", *words, "--config", str(REGIONS), "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def as_read(rows: list[ResultRow]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(json.dumps([one.as_json() for one in rows]))
    return found


def test_a_program_gets_the_rows_of_the_command_with_its_defaults() -> None:
    made = simulate.run_policies("chat-small", config=REGIONS, n_jobs=1, filters=TraceFilters(limit=30))
    printed = command("chat-small", "--limit", "30")
    # The command names a shipped trace by its file, which the digests of both have.
    assert as_read(made) == [{**one, "trace": "chat-small"} for one in printed]
    assert {one.queue for one in made} == {False, None}


def test_options_of_a_program_are_those_of_the_command() -> None:
    made = simulate.run_policies(
        "chat-small", ["random"], load=[0.5, 1.0], seeds=2, config=REGIONS, fleet="paper", warm_s=1.0, windows=2,
        queue=True, n_jobs=1, filters=TraceFilters(limit=60),
    )  # fmt: skip
    words = "--policy random --load 0.5 --load 1 --seeds 2 --fleet paper --warm 1 --windows 2 --queue on --limit 60"
    assert as_read(made) == [{**one, "trace": "chat-small (paper)"} for one in command("chat-small", *words.split())]


def test_a_fleet_of_one_s_own_and_chosen_seeds_run_without_a_command() -> None:
    rows = simulate.run_policies(
        "chat-small", ["random"], seeds=[7, 9], config=REGIONS, fleet=three_regions(), n_jobs=1,
        filters=TraceFilters(limit=10),
    )  # fmt: skip
    assert [(one.policy, one.seed) for one in rows][:2] == [("random", 7), ("random", 9)]
    with pytest.raises(UnknownPolicy, match="no policy named 'rando'"):
        simulate.run_policies("chat-small", ["rando"], config=REGIONS, n_jobs=1)


def test_flat_rows_have_a_column_per_figure_and_the_load() -> None:
    (flat,) = simulate.flat_rows([row(time_scale=4.0, failures={"timeout": 2})])
    assert flat["load"] == 0.25
    assert flat["ttft_ms_p95"] == 12_345.0
    assert flat["weights_w_rtt"] == 0.5
    assert flat["failures_timeout"] == 2
    assert flat["share_seoul-0"] == 0.2
    assert not any(isinstance(value, dict) for value in flat.values())


def test_a_data_frame_has_a_row_per_run_and_a_column_per_figure() -> None:
    pytest.importorskip("pandas", reason="DATA FRAME TEST SKIPPED: pandas is not installed")
    frame = simulate.data_frame([row(policy="gorgo-ms"), row(policy="random", time_scale=4.0)])
    assert frame["policy"].tolist() == ["gorgo-ms", "random"]
    assert frame["load"].tolist() == [1.0, 0.25]
    assert frame["ttft_ms_p95"].mean() == 12_345.0


def test_without_pandas_a_data_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gorgo-router\[notebook\]'"):
        simulate.data_frame([row()])


def test_a_scenario_file_of_one_s_own_is_in_the_name_and_in_the_setting_of_its_rows(tmp_path: Path) -> None:
    path, some = tmp_path / "far.yaml", TraceFilters(limit=20)
    text = (
        "routers: [us-ashburn, eu-frankfurt]\nclients: {ap-seoul: 1}\nnetwork: {tcp_windows: false, rtt_ms: "
        "{us-ashburn: {eu-frankfurt: 95, ap-seoul: 180}, eu-frankfurt: {ap-seoul: 240}}}\n"
        "faults: [{kind: kill, replica: ap-seoul-0, start: 1/2}]\n"
    )
    path.write_text(text)
    arguments: dict[str, Any] = {"config": REGIONS, "n_jobs": 1, "filters": some}
    made = simulate.run_policies("chat-small", ["random"], scenario=path, **arguments)
    words = f"--policy random --limit 20 --scenario {path}"
    printed = command("chat-small", *words.split())
    assert as_read(made) == [{**one, "trace": "chat-small (far, no TCP windows)"} for one in printed]
    path.write_text(text.replace("1/2", "1/4"))
    (other, *_) = simulate.run_policies("chat-small", ["random"], scenario=path, baselines=[], **arguments)
    assert other.setting != made[0].setting
    with pytest.raises(ConfigError, match="3 routers, and a scenario that has 2"):
        simulate.run_policies("chat-small", ["random"], scenario=path, routers=RouterGroup(count=3), **arguments)
