"""What tests of terraform/ need, and why they are skipped where they are.

`make test` has those that need the `terraform` program alone; those marked `system` also need the AWS provider's plugin
or an install, and run by `make test-system` and `make terraform-check`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.environments import Environment, InstallError, cloud_environment
from tests.terraform.workspace import Workspace

_HERE = Path(__file__).parent
_PROVIDER = "registry.terraform.io/hashicorp/aws/5.100.0"
#: An apply and a destroy of the whole fleet, and an install the first time.
_SYSTEM_TIMEOUT_S = 1800


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "system" in config.getoption("markexpr")
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("system"):
            item.add_marker(pytest.mark.timeout(_SYSTEM_TIMEOUT_S))
            if not asked:
                item.add_marker(pytest.mark.skip(reason="system test: run by `make terraform-check`"))


@pytest.fixture(scope="session")
def terraform() -> None:
    """The program."""
    if shutil.which("terraform") is None:
        pytest.skip("TERRAFORM TESTS SKIPPED: there is no `terraform` on the PATH")


@pytest.fixture(scope="session")
def workspace(terraform: None, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy of terraform/ for what needs no provider."""
    return Workspace.copied(tmp_path_factory.mktemp("terraform"))


@pytest.fixture(scope="session")
def rendered(workspace: Workspace) -> dict[str, Any]:
    """Outputs of the core and of observability for this repository's regions.yaml."""
    return workspace.rendered()


@pytest.fixture(scope="session")
def plugins() -> Path:
    """The folder of a mirror with the AWS provider: GORGO_TEST_TERRAFORM_PLUGINS, else where machines keep one."""
    named = os.environ.get("GORGO_TEST_TERRAFORM_PLUGINS")
    usual = [Path.home() / ".terraform.d/plugins", Path("/usr/share/terraform/plugins"), *Path("/opt").glob("*")]
    for folder in [Path(named)] if named else usual:
        if (folder / _PROVIDER).is_dir():
            return folder
    where = "in GORGO_TEST_TERRAFORM_PLUGINS" if named else "on this machine; GORGO_TEST_TERRAFORM_PLUGINS names one"
    pytest.skip(f"TERRAFORM TESTS ON AWS'S SCHEMA SKIPPED: no mirror with {_PROVIDER} {where}")


@pytest.fixture(scope="session")
def cloud() -> Environment:
    """checkov and moto, installed once."""
    try:
        return cloud_environment()
    except InstallError as error:
        pytest.skip(f"TERRAFORM SCAN AND APPLY SKIPPED: {error}")


@pytest.fixture
def aws(terraform: None, plugins: Path, tmp_path: Path) -> Workspace:
    """The paper's environment, initialised from the mirror."""
    made = Workspace.copied(tmp_path)
    made.terraform("init", "-backend=false", f"-plugin-dir={plugins}", "-lockfile=readonly", at="terraform/envs/paper")
    return made
