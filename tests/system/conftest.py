"""What the system tests need, made once: installs, two vLLM on the CPU; and why they are skipped where they are."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.environments import Environment, InstallError, aiperf_environment, apt_install, vllm_environment
from tests.system.tiny_checkpoint import SHAPE, make_hub_cache, make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, VllmServer, vllm_server, wait_until_ready

_HERE = Path(__file__).parent
#: An install of gigabytes counts against the time of the first test.
_TIMEOUT_S = 1200


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything in this folder is marked `system`, and runs only where that was asked for."""
    asked = "system" in config.getoption("markexpr")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))
            if not asked:
                item.add_marker(pytest.mark.skip(reason="system test: run by `make test-system`"))


@pytest.fixture(scope="session")
def vllm() -> Environment:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("VLLM TESTS SKIPPED: its CPU build is for Linux on x86-64 only")
    try:
        return vllm_environment()
    except InstallError as error:
        pytest.skip(f"VLLM TESTS SKIPPED: {error}")


@pytest.fixture(scope="session")
def aiperf() -> Environment:
    try:
        return aiperf_environment()
    except InstallError as error:
        pytest.skip(f"AIPERF TESTS SKIPPED: {error}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vllm") / "tiny", shape=SHAPE)


@pytest.fixture(scope="session")
def hub_cache(checkpoint: Path) -> Path:
    return make_hub_cache(checkpoint, checkpoint.parent / "hub")


@pytest.fixture(scope="session")
def vllm_servers(vllm: Environment, checkpoint: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two that report cached tokens."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(vllm_server(vllm, checkpoint, CACHED_TOKENS_FLAG)) for _ in range(2))
        wait_until_ready(first, second)
        yield first, second


@pytest.fixture(scope="session")
def iptables() -> None:
    """Root and iptables, from apt where it is missing."""
    if os.geteuid() != 0:
        pytest.skip("LONG PATH TESTS SKIPPED: delaying packets needs root")
    try:
        if not shutil.which("iptables"):
            apt_install("iptables")
    except InstallError as error:
        pytest.skip(f"LONG PATH TESTS SKIPPED: {error}")
