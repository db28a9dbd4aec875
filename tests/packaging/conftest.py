"""What tests of packaging share: a build, and a clean environment with it; and why they are skipped where they are.

`make test` has those that need pip's packages alone and little time; those marked `system` install from the package
index, or need programs that not every machine has, and run by `make test-system`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.environments import Environment, InstallError

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("first-hour-*.md"))
_HERE = Path(__file__).parent
#: An install of what the wheel needs, and servers that start on two busy cores.
_SYSTEM_TIMEOUT_S = 1800


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("system"):
            item.add_marker(pytest.mark.timeout(_SYSTEM_TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class Built:
    """What `make wheel` makes."""

    wheel: Path
    sdist: Path


def build(source: Path, folder: Path, *targets: str) -> None:
    """Builds `source` with this environment's hatchling: no network, no environment of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    command += [word for target in targets for word in ("-t", target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and what pip finds that it needs, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("clean") / "env")
    subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
    try:
        environment.pip("install", "-qq", str(built.wheel))
    except InstallError as error:
        pytest.skip(f"CLEAN ENVIRONMENT TESTS SKIPPED: {error}")
    return environment
