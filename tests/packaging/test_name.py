"""The distribution's name: `gorgo` and `gorgo-lb` of the package index are of other authors."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from gorgo import __version__
from tests.packaging.conftest import ROOT, Built

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
