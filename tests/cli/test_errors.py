"""Every option of every command can come from the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from gorgo.cli.app import app
from tests.documents import commands

#: Shared by several commands under one name.
SHARED = {"GORGO_CONFIG", "GORGO_ADMIN_URL", "GORGO_DATABASE_URL"}


def test_every_option_of_every_command_is_read_from_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for name, command in commands():
        for option in command.params:
            if option.param_type_name != "option" or not name:  # those of `gorgo` itself end the program
                continue
            flag = option.opts[0]
            expected = f"GORGO {name} {flag.removeprefix('--')}".upper().replace("-", "_").replace(" ", "_")
            assert option.envvar in {expected, *SHARED}, (name, flag)
            if option.envvar == expected:
                assert expected not in seen, (name, flag, seen.get(expected))
                seen[expected] = name, flag
            monkeypatch.setenv(option.envvar, "1")
            context = typer.Context(command, info_name=name)
            value, source = option.consume_value(context, {})
            monkeypatch.delenv(option.envvar)
            assert source.name == "ENVIRONMENT", (name, flag)
            assert value in ("1", ["1"]), (name, flag)
    assert len(seen) > 90


def test_a_flag_and_a_repeated_option_come_from_the_environment_and_the_command_line_goes_first() -> None:
    trace = str(Path(__file__).parents[2] / "datasets" / "chat-small.jsonl.gz")
    words = ["simulate", trace, "--limit", "5"]
    env = {"GORGO_SIMULATE_JSON": "1", "GORGO_SIMULATE_POLICY": "nearest random", "GORGO_SIMULATE_SEEDS": "1"}
    done = CliRunner().invoke(app, words, env=env)
    assert done.exit_code == 0, done.output
    assert {row["policy"] for row in json.loads(done.stdout)} >= {"nearest", "random"}
    chosen = CliRunner().invoke(app, [*words, "--policy", "nearest"], env=env)
    assert "random" not in {row["policy"] for row in json.loads(chosen.stdout)}


def test_a_wrong_value_names_the_variable_and_help_shows_it() -> None:
    done = CliRunner().invoke(app, ["tune"], env={"GORGO_TUNE_BUDGET_S": "soon"})
    assert done.exit_code == 2
    assert "GORGO_TUNE_BUDGET_S" in done.output
    assert "GORGO_TUNE_BUDGET_S" in CliRunner().invoke(app, ["tune", "--help"]).output


def test_a_service_of_kubernetes_with_the_name_of_a_command_is_no_option() -> None:
    env = {"GORGO_ENGINE_PORT": "tcp://10.0.0.1:80", "GORGO_ENGINE_PORT_80_TCP": "tcp://10.0.0.1:80"}
    config = str(Path(__file__).parents[2] / "regions.yaml")
    words = ["engine", "--replica", "missing", "--config", config]
    done = CliRunner().invoke(app, words, env=env)
    assert done.exit_code == 2
    assert "no replica named 'missing'" in done.output
    done = CliRunner().invoke(app, words, env={"GORGO_ENGINE_PORT": "eighty"})
    assert "GORGO_ENGINE_PORT" in done.output
