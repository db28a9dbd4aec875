"""Engines that all tests of processes share, and a proxy and its folder for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gorgo.lab.demo import Processes
from tests.tuner.sidecar.rig import PATIENCE_S, REPLICAS, TOKEN, Rig, write_config


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("engines")
    write_config(folder / "regions.yaml", dict.fromkeys(REPLICAS, "http://127.0.0.1:1"))
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        for name in REPLICAS:
            processes.start(
                name, ["engine", "--replica", name, "--config", str(folder / "regions.yaml"), "--port", "0"]
            )
        yield {
            name: processes.wait_for_line(name, r"listening on (http://\S+)", timeout_s=PATIENCE_S)[1]
            for name in REPLICAS
        }


@pytest.fixture
def rig(tmp_path: Path, engines: dict[str, str]) -> Iterator[Rig]:
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with Processes(tmp_path, environ) as processes:
        rig = Rig(tmp_path, processes, engines)
        rig.serve()
        yield rig
