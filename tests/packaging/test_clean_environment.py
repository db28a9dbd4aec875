"""The wheel in an environment that has what the wheel asks for and nothing else, far from the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gorgo import build_version
from tests.packaging.conftest import ROOT
from tests.system.environments import Environment
from tests.test_docs import commands

pytestmark = pytest.mark.system


class Shell:
    """The installed command, in an empty folder, with nothing of this environment's."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.gorgo = environment.folder / "bin/gorgo"
        self.folder = folder

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        environ = kept | {"PATH": f"{self.gorgo.parent}:/usr/bin:/bin"}
        command = [str(self.gorgo), *words]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def gorgo(clean: Environment, tmp_path: Path) -> Shell:
    shutil.copy(ROOT / "regions.yaml", tmp_path)
    return Shell(clean, tmp_path)


def test_developers_tools_are_not_there(clean: Environment) -> None:
    listed = {line.split("==")[0].lower() for line in clean.run("-m", "pip", "freeze").splitlines()}
    assert {"httpx", "starlette", "sqlalchemy", "numpy"} <= listed
    assert not {"pytest", "mypy", "ruff", "hatchling", "matplotlib", "openai", "xllamacpp"} & listed


def test_version_is_that_of_the_sources(gorgo: Shell) -> None:
    assert gorgo("--version").stdout == f"gorgo {build_version()}\n"


def test_every_command_explains_itself(gorgo: Shell) -> None:
    for name, _ in commands():
        done = gorgo(*name.split(), "--help")
        assert (done.returncode, done.stderr) == (0, ""), name
        assert "Usage: gorgo" in done.stdout, name


def test_every_module_can_be_imported(clean: Environment, tmp_path: Path) -> None:
    """But for those of an extra, which name it."""
    script = """
import importlib, json, pkgutil, gorgo, tuner
missing = {}
for package in (gorgo, tuner):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                missing.setdefault(error.name.split(".")[0], []).append(module.name)
print(json.dumps(missing))
"""
    missing = json.loads(clean.run("-c", script))
    assert set(missing) <= {"matplotlib", "jinja2", "opentelemetry", "psycopg"}, missing


def test_the_example_of_the_clone_is_accepted(gorgo: Shell) -> None:
    done = gorgo("check")
    assert (done.returncode, done.stdout) == (0, "regions.yaml: ok, 3 replicas in 3 regions, policy gorgo-ms\n")


def test_a_demo_runs(gorgo: Shell) -> None:
    done = gorgo("demo", "--limit", "8", "--policy", "gorgo-ms", "--policy", "random", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "8 requests of chat-small.jsonl.gz" in done.stdout
    rows = json.loads((gorgo.folder / "run/results.json").read_text())
    assert [(row["policy"], row["n"], row["errors"]) for row in rows] == [("gorgo-ms", 8, 0), ("random", 8, 0)]


def test_the_tuner_searches_a_window_and_keeps_a_history(gorgo: Shell) -> None:
    (gorgo.folder / "few.yaml").write_text("held_out_seeds: 2\n")
    searched = ["chat-small", "--limit", "60", "--policy", "gorgo", "--max-generations", "2", "--settings", "few.yaml"]
    done = gorgo("tune-offline", *searched, "--seeds", "1", "--jobs", "1", "--out", "found.json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads((gorgo.folder / "found.json").read_text())["weights"]) == {"w_rtt", "w_queue"}
    assert "gorgo" in gorgo("history").stdout


def test_a_report_says_which_extra_is_missing(gorgo: Shell) -> None:
    done = gorgo("report", ".")
    assert done.returncode == 2
    assert "pip install 'gorgo-router[report]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_types_come_along(clean: Environment) -> None:
    found = clean.run(
        "-c", "from importlib.resources import files; print(files('gorgo').joinpath('py.typed').is_file())"
    )
    assert found == "True\n"
