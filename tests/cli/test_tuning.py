"""`gorgo history`: what the tuner did, as a table and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app

ASSET = Path(__file__).parents[1] / "tuner" / "history" / "assets" / "schema-0002.sqlite3"


@pytest.fixture
def database(tmp_path: Path) -> str:
    shutil.copyfile(ASSET, tmp_path / "history.sqlite3")
    return f"sqlite:///{tmp_path}/history.sqlite3"


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_history_shows_each_generation_with_what_became_of_it(database: str) -> None:
    result = run("history", "--database", database)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("campaign 1: gorgo on http://127.0.0.1:9090")
    taken = [line for line in lines if "w_rtt=" in line]
    assert ["yes" in line for line in taken] == [True, True, False]
    assert "freeze: by hand" in lines[-1]


def test_history_as_json_has_the_rows_and_out_gives_the_report_its_file(database: str, tmp_path: Path) -> None:
    result = run("history", "--database", database, "--json", "--out", tmp_path)
    shown = json.loads(result.stdout)
    assert [row["accepted"] for row in shown["generations"]] == [True, True, False]
    written = json.loads((tmp_path / "history.json").read_text())
    assert [row["weights"] for row in written] == [row["weights"] for row in shown["generations"]]


def test_an_empty_history_says_how_to_begin(tmp_path: Path) -> None:
    result = run("history", "--database", f"sqlite:///{tmp_path}/new.sqlite3")
    assert result.exit_code == 0
    assert "gorgo tune" in result.stdout


def test_a_database_that_is_none_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = run("history", "--database", "nonsense")
    assert result.exit_code == 1
    assert "expected sqlite:///FILE" in result.stderr
    assert result.stdout == ""
