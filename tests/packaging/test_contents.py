"""What is in the wheel and in the sdist, against the tree that they were made from."""

from __future__ import annotations

import configparser
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from gorgo import COMMIT_FILE, __version__, commit_of_clone
from tests.packaging.conftest import ROOT, Built, build


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
