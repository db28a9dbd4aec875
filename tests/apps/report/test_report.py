"""`gorgo report` on the command line."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.apps.report.find import find_results
from gorgo.cli import app
from tests.apps.report.builders import write_run

REGIONS = Path(__file__).parents[3] / "regions.yaml"


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    write_run(tmp_path, [10.0, 20.0])
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_files_of_a_simulation_are_read_with_their_references(tmp_path: Path) -> None:
    words = ["simulate", "chat-small", "--limit", "20", "--policy", "gorgo-ms", "--policy", "random", "--jobs", "1"]
    result = CliRunner().invoke(app, [*words, "--config", str(REGIONS), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    found = find_results(tmp_path)
    (comparison,) = found.comparisons
    assert comparison.labels == ["gorgo-ms", "random", "floor", "oracle"]
    assert [[requests.count for requests in cell.requests] for cell in comparison.cells] == [[20]] * 4
    assert all(len(cell.ttft_ms) for cell in comparison.cells)
    assert found.left_out == ()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_run(tmp_path, [10.0, 20.0])
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"gorgo: a report needs {package}, which is not installed: pip install 'gorgo-router[report]'\n"
    )
    assert not (tmp_path / "report.html").exists()


def test_a_damaged_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected a list of objects" in result.stderr


def test_a_page_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text("[]")
    (tmp_path / "report.html").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "Is a directory" in result.stderr


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path, [10.0, 20.0])
    (tmp_path / "report.html").write_text("an earlier one")
    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, "gorgo: [Errno 28] No space left on device\n")
    assert (tmp_path / "report.html").read_text() == "an earlier one"


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / "history.json").write_text("[]")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    assert r"caf\udce9" in (tmp_path / "report.html").read_text()
