"""A shadow policy in a simulation: its ranks are in the requests, and `gorgo rank` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.lab.rank import rank_table, read_rows

REGIONS = Path(__file__).parents[3] / "regions.yaml"


def simulate(out: Path, *words: str) -> int:
    shared = ["simulate", "chat-small", "--limit", "80", "--config", str(REGIONS), "--jobs", "1", "--out", str(out)]
    return CliRunner().invoke(app, [*shared, *words]).exit_code


def test_first_tokens_come_later_where_the_shadow_would_not_have_gone(tmp_path: Path) -> None:
    assert simulate(tmp_path, "--policy", "random", "--shadow", "gorgo-ms") == 0
    table = rank_table(read_rows(tmp_path / "random" / "load-1-seed-0" / "requests.jsonl"))
    assert table.shadow == "gorgo-ms"
    assert [row.rank for row in table.rows] == [1, 2, 3]
    assert table.rho is not None
    assert table.rho > 0.2


def test_a_shadow_changes_nothing_of_a_run(tmp_path: Path) -> None:
    simulate(tmp_path / "with", "--policy", "random", "--shadow", "gorgo-ms")
    simulate(tmp_path / "without", "--policy", "random")
    place = Path("random") / "load-1-seed-0" / "results.json"
    assert (tmp_path / "with" / place).read_text() == (tmp_path / "without" / place).read_text()


@pytest.mark.parametrize(("policy", "shadow"), [("gorgo", "gorgo-ms"), ("random", "round-robin"), ("random", "none")])
def test_a_shadow_that_cannot_go_with_the_policy_is_bad_usage(tmp_path: Path, policy: str, shadow: str) -> None:
    assert simulate(tmp_path, "--policy", policy, "--shadow", shadow) == 2
