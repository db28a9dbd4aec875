"""The wheel: what is in it, the name, an environment with nothing else, and shell completion."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from gorgo import COMMIT_FILE, __version__, build_version, commit_of_clone
from tests.packaging.conftest import ROOT, Built, build
from tests.system.environments import Environment
from tests.test_docs import commands

# --- What is in the wheel and in the sdist, against the tree that they were made from.


def tree(*folders: str) -> set[str]:
    """Files of these folders, less what Python and tools leave there."""
    left = ("__pycache__", ".mypy_cache", ".ruff_cache", ".terraform")
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not set(left) & set(path.parts)
    }


@pytest.fixture(scope="module")
def in_wheel(built: Built) -> set[str]:
    return set(zipfile.ZipFile(built.wheel).namelist())


@pytest.fixture(scope="module")
def in_sdist(built: Built) -> set[str]:
    with tarfile.open(built.sdist) as file:
        return {name.partition("/")[2] for name in file.getnames()}


def metadata(built: Built) -> str:
    archive = zipfile.ZipFile(built.wheel)
    return archive.read(f"gorgo_router-{__version__}.dist-info/METADATA").decode()


def test_wheel_has_the_code_the_data_and_its_own_papers_and_nothing_else(in_wheel: set[str]) -> None:
    info = f"gorgo_router-{__version__}.dist-info/"
    papers = {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    data = {name.replace("datasets/", "gorgo/data/", 1) for name in tree("datasets")}
    commit = {f"gorgo/{COMMIT_FILE}"} if commit_of_clone(ROOT) is not None else set()
    assert in_wheel == tree("gorgo", "tuner") | data | papers | commit


def test_wheel_says_from_which_commit_it_was_built(built: Built) -> None:
    commit = commit_of_clone(ROOT)
    if commit is None:
        pytest.skip("this tree is no clone")
    assert zipfile.ZipFile(built.wheel).read(f"gorgo/{COMMIT_FILE}").decode().strip() == commit


def test_wheel_has_what_is_read_as_a_file_at_run_time(in_wheel: set[str]) -> None:
    kinds = {"gorgo/py.typed", "tuner/py.typed", "gorgo/lab/report/page.html", "gorgo/data/chat-small.jsonl.gz"}
    migrations = {name for name in in_wheel if name.startswith("tuner/history/migrations/versions/v")}
    assert kinds <= in_wheel
    assert len(migrations) >= 2


def test_wheel_has_no_test_and_nothing_that_git_ignores(in_wheel: set[str]) -> None:
    assert {name.split("/")[0] for name in in_wheel} == {"gorgo", "tuner", f"gorgo_router-{__version__}.dist-info"}
    assert not {name for name in in_wheel if "test" in name.split("/")[-1] or name.endswith(".pyc")}


def test_wheel_asks_for_what_it_runs_with_and_not_for_developers_tools(built: Built) -> None:
    said = HeaderParser().parsestr(metadata(built))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [need for need in said.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert len(needs) == len(project["dependencies"])
    assert not [need for need in needs if need.startswith(("pytest", "mypy", "ruff", "hatchling"))]
    assert said["Version"] == __version__
    assert set(said.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])


def test_wheel_brings_one_command(built: Built) -> None:
    points = configparser.ConfigParser()
    points.read_string(
        zipfile.ZipFile(built.wheel).read(f"gorgo_router-{__version__}.dist-info/entry_points.txt").decode()
    )
    assert dict(points["console_scripts"]) == {"gorgo": "gorgo.cli:main"}


def test_sdist_has_all_that_its_own_makefile_and_tests_read(in_sdist: set[str]) -> None:
    folders = tree("gorgo", "tuner", "experiments", "datasets", "tests", "docs", "packaging")
    files = {"Makefile", "README.md", "DESIGN.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    assert folders | files | {"regions.yaml", "requirements.lock"} <= in_sdist


def test_sdist_makes_the_same_wheel_to_the_byte(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as file:
        # Python before 3.11.4 has no filters; the archive is this build's own.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "dist", "wheel")
    assert (tmp_path / "dist" / built.wheel.name).read_bytes() == built.wheel.read_bytes()


# --- The wheel in an environment that has what the wheel asks for and nothing else, far from the sources.


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


@pytest.mark.system
def test_developers_tools_are_not_there(clean: Environment) -> None:
    listed = {line.split("==")[0].lower() for line in clean.run("-m", "pip", "freeze").splitlines()}
    assert {"httpx", "starlette", "sqlalchemy", "numpy"} <= listed
    assert not {"pytest", "mypy", "ruff", "hatchling", "matplotlib", "openai", "xllamacpp"} & listed


@pytest.mark.system
def test_version_is_that_of_the_sources(gorgo: Shell) -> None:
    assert gorgo("--version").stdout == f"gorgo {build_version()}\n"


@pytest.mark.system
def test_every_command_explains_itself(gorgo: Shell) -> None:
    for name, _ in commands():
        done = gorgo(*name.split(), "--help")
        assert (done.returncode, done.stderr) == (0, ""), name
        assert "Usage: gorgo" in done.stdout, name


@pytest.mark.system
def test_every_module_can_be_imported(clean: Environment, tmp_path: Path) -> None:
    """But for those of an extra: they name one that the wheel has, or are imported by what has asked for theirs."""
    script = """
import importlib, importlib.metadata, json, pkgutil, gorgo, tuner
from gorgo.errors import MissingExtra

missing, refusals = {}, {}
for package in (gorgo, tuner):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                missing.setdefault(error.name.split(".")[0], []).append(module.name)
            except MissingExtra as error:
                refusals[module.name] = str(error)
print(json.dumps([missing, refusals, importlib.metadata.metadata("gorgo-router").get_all("Provides-Extra")]))
"""
    missing, refusals, extras = json.loads(clean.run("-c", script))
    assert set(missing) <= {"matplotlib", "jinja2", "opentelemetry", "psycopg"}, missing
    named = {re.sub(r".*pip install 'gorgo-router\[(\w+)\]'", r"\1", said) for said in refusals.values()}
    assert named == {"dns", "picker"}, refusals
    assert named <= set(extras)


@pytest.mark.system
def test_the_example_of_the_clone_is_accepted(gorgo: Shell) -> None:
    done = gorgo("check")
    assert (done.returncode, done.stdout) == (0, "regions.yaml: ok, 3 replicas in 3 regions, policy gorgo-ms\n")


@pytest.mark.system
def test_a_demo_runs(gorgo: Shell) -> None:
    done = gorgo("demo", "--limit", "8", "--policy", "gorgo-ms", "--policy", "random", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "8 requests of chat-small.jsonl.gz" in done.stdout
    rows = json.loads((gorgo.folder / "run/results.json").read_text())
    assert [(row["policy"], row["n"], row["errors"]) for row in rows] == [("gorgo-ms", 8, 0), ("random", 8, 0)]


@pytest.mark.system
def test_the_tuner_searches_a_window_and_keeps_a_history(gorgo: Shell) -> None:
    (gorgo.folder / "few.yaml").write_text("held_out_seeds: 2\n")
    searched = ["chat-small", "--limit", "60", "--policy", "gorgo", "--max-generations", "2", "--settings", "few.yaml"]
    done = gorgo("tune-offline", *searched, "--seeds", "1", "--jobs", "1", "--out", "found.json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads((gorgo.folder / "found.json").read_text())["weights"]) == {"w_rtt", "w_queue"}
    assert "gorgo" in gorgo("history").stdout


@pytest.mark.system
def test_a_report_says_which_extra_is_missing(gorgo: Shell) -> None:
    done = gorgo("report", ".")
    assert done.returncode == 2
    assert "pip install 'gorgo-router[report]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.system
def test_types_come_along(clean: Environment) -> None:
    found = clean.run(
        "-c", "from importlib.resources import files; print(files('gorgo').joinpath('py.typed').is_file())"
    )
    assert found == "True\n"


# --- The distribution's name: `gorgo` and `gorgo-lb` of the package index are of other authors.


#: Folders and files whose texts a user reads or runs.
SHIPPED = ("gorgo", "tuner", "experiments", "docs", "datasets", "packaging", "terraform", "tests")
FILES = ("Makefile", "README.md", "DESIGN.md", "CHANGELOG.md", "regions.yaml", "requirements.lock", "pyproject.toml")
SUFFIXES = {".md", ".py", ".toml", ".yaml", ".yml", ".html", ".tf", ".hcl", ".tftpl", ".service", ".lock", ""}
#: The name alone, with an extra or a version, after an installer; a path, `.` and `gorgo-router` are none of these.
FOREIGN = re.compile(
    r"\b(?:pip|pipx|uv|uvx)\b[^\n`]*?\b(?:install|add|run|download|wheel)\b[^\n`]*?"
    r"""(?<![\w./*@-])gorgo(?:[-_]lb)?(?=\[|[=<>~!]=|[\s'"`,;)]|$)""",
    re.MULTILINE,
)


def texts() -> list[Path]:
    found = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [path for path in [*found, *(ROOT / name for name in FILES)] if path.is_file() and path != Path(__file__)]


@pytest.mark.parametrize(
    "line",
    [
        "pip install gorgo",
        "needs the extra: pip install 'gorgo[report]'",
        "python -m pip install --quiet gorgo==0.2.0",
        "`pipx install gorgo`",
        "pip install gorgo-lb",
        "uv tool install gorgo_lb",
        "uv pip install -U 'gorgo>=1'",
    ],
)
def test_a_line_that_installs_another_authors_distribution_is_found(line: str) -> None:
    assert FOREIGN.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install .",
        "pip install 'gorgo-router[report]'",
        "pip install dist/gorgo_router-*.whl",
        "/opt/gorgo/bin/python -m pip install --no-deps ./dist/*.whl",
        "After `pip install`, `gorgo policies` lists the policy",
    ],
)
def test_a_line_that_installs_this_project_is_not(line: str) -> None:
    assert not FOREIGN.search(line)


def test_no_page_and_no_message_installs_another_authors_distribution() -> None:
    read = {path: path.read_text(errors="replace") for path in texts()}
    assert [
        f"{path.relative_to(ROOT)}: {found[0]}" for path, text in read.items() for found in FOREIGN.finditer(text)
    ] == []
    assert len(read) > 500


def test_no_file_names_a_wheel_by_the_former_name() -> None:
    former = re.compile(r"gorgo-(?:[0-9]|VERSION|\*)[^\s`'\"]*\.(?:whl|tar\.gz)")
    assert [str(path.relative_to(ROOT)) for path in texts() if former.search(path.read_text(errors="replace"))] == []


def test_every_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        found for path in texts() for found in re.findall(r"gorgo-router\[(\w+)\]", path.read_text(errors="replace"))
    ]
    assert set(named) <= set(extras)
    assert len(named) >= 6


def test_distribution_is_gorgo_router_and_package_and_command_are_gorgo(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        said = HeaderParser().parsestr(wheel.read(f"gorgo_router-{__version__}.dist-info/METADATA").decode())
        points = wheel.read(f"gorgo_router-{__version__}.dist-info/entry_points.txt").decode()
        assert "gorgo/__init__.py" in wheel.namelist()
    assert said["Name"] == "gorgo-router"
    assert points == "[console_scripts]\ngorgo = gorgo.cli:main\n"
    assert built.sdist.name == f"gorgo_router-{__version__}.tar.gz"


# --- Shell completion, in a bash that has sourced what `gorgo --show-completion` says there.


#: What bash does at a TAB: the words so far, which of them the cursor is at, and the function that was named for it.
ASK = """
set -eu
source <(gorgo --show-completion)
[[ $(complete -p gorgo) == *"-F $FUNCTION gorgo" ]]
for line in "$@"; do
  COMP_WORDS=($line)
  if [[ $line == *' ' ]]; then COMP_WORDS+=(''); fi
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  $FUNCTION gorgo
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def bash() -> str:
    found = shutil.which("bash")
    if found is None:
        pytest.skip("COMPLETION TEST SKIPPED: there is no bash on the PATH")
    return found


def test_bash_completes_commands_options_and_commands_of_two_words(bash: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "FUNCTION": "_gorgo_completion"}
    lines = ["gorgo fre", "gorgo what", "gorgo whatif --pol", "gorgo serve --admin", "gorgo datasets "]
    done = subprocess.run([bash, "-c", ASK, "bash", *lines], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    words = ["freeze", "whatif", "--policy", "--admin-bind", "list describe generate convert fetch"]
    assert done.stdout.splitlines() == words
