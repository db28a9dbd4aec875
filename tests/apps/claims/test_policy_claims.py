from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gorgo.apps.claims import ClaimCheck, ClaimOptions, Conditions, RatioTarget, Workload
from gorgo.apps.claims.table import as_markdown, show_sections
from gorgo.apps.report.rows import read_results
from gorgo.cli import app
from gorgo.errors import ReportError
from tests.sim.fleets import three_regions

HERE = Workload(name="small", traces=("chat-small", "art-chat-sample"), time_scale=2.0)
TARGETS = (
    RatioTarget(
        group="baselines", policy="gorgo-ms", workloads=(HERE,), others=("random",), figure="p95 TTFT", at_most=9.0
    ),
    RatioTarget(
        group="oracle", policy="gorgo-ms", workloads=(HERE,), others=("random",), figure="p95 E2E", at_most=0.01
    ),
)
CONDITIONS = Conditions(fleet=three_regions(), first_requests=25)


def options(**changes: Any) -> ClaimOptions:
    return replace(
        ClaimOptions(targets=TARGETS, conditions=CONDITIONS, seeds=range(2), n_jobs=1, show_progress=False), **changes
    )


def test_runs_that_targets_share_are_made_once() -> None:
    check = ClaimCheck(options())
    assert len(check.tasks) == len(check.missing) == 4
    findings = check.run()
    assert (findings.runs, findings.made) == (4, 4)
    assert findings.cpu_s > 0.0
    assert [verdict.met for verdict in findings.verdicts] == [True, False]
    assert {row.n for by_seed in findings.rows.values() for row in by_seed.values()} == {25}


def test_a_seed_has_its_trace() -> None:
    tasks = ClaimCheck(options(seeds=range(3))).tasks
    assert {(task.seed, task.trace) for task in tasks} == {(0, "chat-small"), (1, "art-chat-sample"), (2, "chat-small")}


def test_settings_of_two_names_can_be_one_run() -> None:
    other = replace(TARGETS[0], workloads=(replace(HERE, name="the same"),))
    check = ClaimCheck(options(targets=(TARGETS[0], other), seeds=range(1)))
    assert len(check.tasks) == 2
    assert len({verdict.value for verdict in check.run().verdicts}) == 1


def test_what_was_made_is_kept_and_what_is_missing_is_made(tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet"
    first = ClaimCheck(options(out=out, seeds=range(1))).run()
    again = ClaimCheck(options(out=out, seeds=range(2)))
    assert [task.seed for task in again.missing] == [1, 1]
    both = again.run()
    assert (both.runs, both.made) == (4, 2)
    assert both.rows[HERE, "random"][0].ttft_ms == first.rows[HERE, "random"][0].ttft_ms
    kept = ClaimCheck(options(out=out))
    assert kept.missing == []
    # What a run took when it was made is kept with it.
    assert kept.run().cpu_s == pytest.approx(both.cpu_s)
    assert len(read_results(out / "results.json")) == 4


@pytest.mark.parametrize("content", ["[{", "[]", "[7]"])
def test_a_run_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    ClaimCheck(options(out=tmp_path, seeds=range(1))).run()
    next((tmp_path / "runs").glob("*.json")).write_text(content)
    with pytest.raises(ReportError, match=r"runs/[0-9a-f]{32}\.json"):
        ClaimCheck(options(out=tmp_path))


def test_tables_have_each_target_and_each_mean() -> None:
    findings = ClaimCheck(options()).run()
    out = StringIO()
    show_sections(findings.sections(), Console(file=out, width=140), findings.summary())
    markdown = as_markdown(findings.sections(), findings.summary())
    for text in (out.getvalue(), markdown):
        assert "Against the same rule with full knowledge (`oracle`)" in text
        assert text.count("small, load 0.5") == 2 + 2
        assert "missed" in text
        assert "1 of 2 targets met, all simulated; 4 runs" in text
    assert markdown.count("| small, load 0.5 | gorgo-ms |") == 3


def test_an_estimate_counts_requests_and_knows_that_the_oracle_is_slower() -> None:
    def seconds(policy: str, first_requests: int | None) -> float:
        target = replace(TARGETS[0], policy=policy, others=(policy,))
        given = replace(CONDITIONS, first_requests=first_requests)
        return ClaimCheck(options(targets=(target,), conditions=given, seeds=range(1))).estimated_cpu_s()

    # Of 7,000 requests, of a tenth of them, and of more than there are.
    assert [seconds("random", count) for count in (None, 700, 9000)] == pytest.approx([3.3, 0.33, 3.3])
    assert [seconds("oracle", count) for count in (None, 700)] == pytest.approx([6.0, 0.6])
    both = replace(TARGETS[0], policy="oracle")
    assert ClaimCheck(options(targets=(both,), seeds=range(1))).estimated_cpu_s() == pytest.approx(9.3 * 25 / 7000)
    assert ClaimCheck(options(targets=())).estimated_cpu_s() == 0.0


# -- the command

RUN = ["claims", "--only", "wildchat", "--quick", "--seeds", "1", "--jobs", "1"]


def test_the_command_prints_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.cli.measure.claims.QUICK_REQUESTS", 30)
    result = CliRunner().invoke(app, [*RUN, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    assert "2 runs, 0 made before" in result.stderr
    assert "CONVERSATION TRACE ARE LEFT OUT" in result.stderr
    assert "a preview, not a result" in result.stderr
    assert "WildChat-like" in result.stdout
    assert "…" not in result.stdout  # a pipe has no width to obey
    assert "WildChat-like" in (tmp_path / "claims.md").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {(row["policy"], row["n"]) for row in rows} == {("gorgo-ms", 30), ("random", 30)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "wildcat"], "no such group of targets; there are: baselines, published"),
        (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl: no such file"),
    ],
)
def test_what_is_misspelt_is_told_before_anything_runs(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["claims", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
