"""`gorgo tune-offline`: from a recorded window to a weights file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.cli.policies import compose_policy
from gorgo.config.load import load_config
from tuner.history import History

REGIONS = Path(__file__).parents[3] / "regions.yaml"
WINDOW = ("chat-small", "--limit", "60", "--max-output", "16", "--policy", "gorgo", "--config", REGIONS)
FEW = ("--max-generations", "2", "--seeds", "1", "--jobs", "1")


def run(tmp_path: Path, *words: str | Path) -> Result:
    database = f"sqlite:///{tmp_path}/history.sqlite3"
    return CliRunner().invoke(app, ["tune-offline", "--database", database, *(str(word) for word in words)])


def test_a_search_leaves_rows_and_a_weights_file_that_serve_takes(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"replicas": [{"name": "ap-seoul-0", "prefill_slowdown": 1.5}]}))
    settings, out = tmp_path / "few.yaml", tmp_path / "found.json"
    settings.write_text("held_out_seeds: 2\n")
    result = run(
        tmp_path,
        *WINDOW,
        *FEW,
        "--settings",
        tmp_path / "few.yaml",
        "--out",
        out,
        "--fleet",
        tmp_path / "fleet.json",
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert [row["mode"] for row in shown["generations"]] == ["twin"] * 3
    policy, weights = compose_policy(load_config(REGIONS), source=REGIONS, weights_file=out)
    assert (policy.name, dict(weights)) == ("gorgo", shown["weights"])
    assert json.loads(out.read_text())["evidence"]["window"]["calibrated"] is True
    history = History(f"sqlite:///{tmp_path}/history.sqlite3")
    (campaign,) = history.campaigns()
    assert (campaign.target, len(history.generations())) == ("twin of chat-small.jsonl.gz", 3)
    assert campaign.outcome is not None
    assert shown["reason"] in campaign.outcome
    history.close()


def test_a_rehearsal_is_the_live_campaign_along_the_window(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text("{window: 16, hop: 8, warm_up_s: 1}\n")
    paper = ("--rehearse", "paper", "--settings", tmp_path / "tune.yaml", "--max-generations", "2")
    result = run(tmp_path, *WINDOW, *paper)
    assert result.exit_code == 0, result.stderr
    assert "the start" in result.stdout
    assert "the run as a whole: p95 TTFT" in result.stdout
    history = History(f"sqlite:///{tmp_path}/history.sqlite3")
    assert [row.mode for row in history.generations()][:2] == ["paper", "paper"]
    history.close()
    shown = json.loads(run(tmp_path, *WINDOW, *paper, "--json").stdout)
    assert (shown["row"]["policy"], shown["rollbacks"]) == ("gorgo", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument"),
        (("chat-small", "--rehearse", "guarded"), "'guarded' is not one of"),
        (("no-such-trace",), "No such file"),
        ((*WINDOW, "--settings", "{initial_weights: {w_queue: 9}}"), "'w_queue' is 9.0; expected a number in"),
        ((*WINDOW, "--settings", "{held_out_seeds: 1}"), "held_out_seeds (line 1): 1; expected a number of at least 2"),
        ((*WINDOW, "--fleet", "missing.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    file = tmp_path / "tune.yaml"
    if words[-2:-1] == ("--settings",):
        file.write_text(words[-1])
        words = (*words[:-1], str(file))
    result = run(tmp_path, "--config", REGIONS, *words)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "history.sqlite3").exists()


def test_a_named_fleet_takes_the_place_of_the_replicas(tmp_path: Path) -> None:
    few = ("--max-generations", "1", "--seeds", "1", "--limit", "30", "--jobs", "1", "--json")
    found = [
        run(tmp_path, "chat-small", "--config", REGIONS, *few, *fleet) for fleet in ((), ("--fleet", "small-model"))
    ]
    assert [result.exit_code for result in found] == [0, 0], found[1].stderr
    slow, fast = (json.loads(result.stdout)["generations"][0]["objective_ms"] for result in found)
    assert fast < slow
