from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gorgo.apps.learned_routers.command import main
from tests.documents import tables


def test_prints_ratios_with_their_intervals_and_means_and_keeps_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "motivation", "--seeds", "2", "--scale", "0.03", "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, ratios), (_, means) = tables(printed)
    assert [row[1] for row in ratios] == [*["prefix-cache-and-load", "gorgo-ms"] * 2] * 2
    assert all("[" in row[6] for row in ratios)
    assert {row[1] for row in means} == {"least-request", "prefix-cache-and-load", "gorgo-ms"}
    assert {row[2] for row in means} == {"2"}
    assert [re.fullmatch(r"[\d.]+ \[[-\d.]+-[\d.]+\]|-", row[14]) is not None for row in means] == [True] * 6
    assert "all simulated; 12 runs" in printed
    assert len(list((tmp_path / "runs").glob("*.json"))) == 12
    assert len(json.loads((tmp_path / "slices.json").read_bytes())) == 12


def test_pictures_are_of_the_format_that_was_named(tmp_path: Path) -> None:
    arguments = ["--only", "motivation", "--seeds", "1", "--scale", "0.01", "--out", str(tmp_path)]
    main([*arguments, "--pictures", "png"])
    assert [path.name for path in tmp_path.glob("*.png")] == ["motivation-7xL20.png"]
    main([*arguments, "--pictures"])
    assert [path.name for path in tmp_path.glob("*.svg")] == ["motivation-7xL20.svg"]


def test_an_unknown_group_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "motivations"])
    assert "no such group; there are: lodestar, " in capsys.readouterr().err
