"""Real processes: engines, proxy and tuner, under traffic, while they are killed, frozen, restarted and locked out."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from gorgo.apps.demo.processes import Processes
from gorgo.cli import app
from tuner.history import History

TOKEN = "token-of-a-test"
REPLICAS = {"near": 1, "far": 15}
#: Of everything that is waited for; two cores are shared with other tests.
PATIENCE_S = 60.0
#: Of each client: traffic that leaves the cores to those who are tested.
PAUSE_S = 0.2
PAPER = ["--mode", "paper", "--window", "12", "--hop", "6", "--warm-up-s", "0", "--poll-s", "0.1", "--seed", "1"]

#: Each starts three or four interpreters; a minute is enough on two cores that are free, and these are shared.
pytestmark = pytest.mark.timeout(240)


def until(done: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rig:
    """Two engines, one proxy on ports that stay, and a tuner."""

    def __init__(self, folder: Path, processes: Processes, engines: Mapping[str, str]) -> None:
        self.folder, self.processes = folder, processes
        self.url, self.admin = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.database = f"sqlite:///{folder}/history.sqlite3"
        self.tuners = 0
        write_config(folder / "regions.yaml", engines)

    def serve(self, name: str = "serve") -> None:
        binds = ["--bind", self.url.removeprefix("http://"), "--admin-bind", self.admin.removeprefix("http://")]
        words = ["serve", "--config", str(self.folder / "regions.yaml"), *binds, "--state", str(self.folder / "s.json")]
        self.processes.start(name, words)
        self.processes.wait_for_line(name, r"listening on")

    def tune(self) -> str:
        self.tuners += 1
        name = f"tune-{self.tuners}"
        self.processes.start(name, ["tune", "--url", self.admin, "--database", self.database, *PAPER])
        return name

    def end(self, name: str, by: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes._running.pop(name)
        process.send_signal(by)
        return process.wait(PATIENCE_S)

    def said(self, name: str) -> str:
        return self.processes._said(name)

    def weights(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{self.admin}/admin/weights", headers=headers, timeout=10).raise_for_status()
        shown: dict[str, Any] = answer.json()
        return shown

    def numbers(self) -> list[int]:
        if not (self.folder / "history.sqlite3").exists():
            return []
        reader = sqlite3.connect(f"file:{self.folder}/history.sqlite3?mode=ro", uri=True, timeout=10)
        try:
            return [number for (number,) in reader.execute("SELECT number FROM generation ORDER BY id")]
        except sqlite3.OperationalError:  # no table yet
            return []
        finally:
            reader.close()

    def until_generation(self, number: int) -> None:
        until(lambda: number in self.numbers(), f"generation {number}: {self.said(f'tune-{self.tuners}')[-500:]}")


class Traffic(threading.Thread):
    """Eight clients that ask again and again, with a pause; `errors` are answers that no client should get."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.done, self.errors = url, 0, [""] * 0
        self._ending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(8)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "m", "prompt": f"client {number} " * 20, "max_tokens": 2, "stream": True}
        while not self._ending.is_set():
            try:
                answer = await client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    self.errors.append(f"{answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
            self.done += 1
            await asyncio.sleep(PAUSE_S)

    def __enter__(self) -> Traffic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join(PATIENCE_S)


def write_config(path: Path, engines: Mapping[str, str]) -> None:
    config = {
        "proxy": {"region": "near", "policy": "gorgo"},
        "regions": [{"name": name} for name in REPLICAS],
        "replicas": [{"name": name, "region": name, "url": url, "models": ["m"]} for name, url in engines.items()],
        "simulation": {"rtt_ms": dict(REPLICAS), "seed": 0},
    }
    path.write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("engines")
    write_config(folder / "regions.yaml", dict.fromkeys(REPLICAS, "http://127.0.0.1:1"))
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        for name in REPLICAS:
            processes.start(
                name, ["engine", "--replica", name, "--config", str(folder / "regions.yaml"), "--port", "0"]
            )
        yield {name: processes.wait_for_line(name, r"listening on (http://\S+)")[1] for name in REPLICAS}


@pytest.fixture
def rig(tmp_path: Path, engines: dict[str, str]) -> Iterator[Rig]:
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with Processes(tmp_path, environ) as processes:
        rig = Rig(tmp_path, processes, engines)
        rig.serve()
        yield rig


def test_clients_notice_nothing_when_the_tuner_is_killed_and_a_second_one_goes_on(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        first = rig.tune()
        rig.until_generation(2)
        version = rig.weights()["version"]
        assert version > 3, "weights were put"
        assert rig.end(first, signal.SIGKILL) == -signal.SIGKILL
        asked = traffic.done
        until(lambda: traffic.done > asked + 20, "traffic without a tuner")
        left = rig.numbers()
        second = rig.tune()
        rig.until_generation(left[-1] + 2)
        assert f"goes on with campaign 1, generation {left[-1] + 1}" in rig.said(second)
        assert rig.end(second) == 0
    assert traffic.errors == []
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    history = History(rig.database)
    assert [row.outcome for row in history.campaigns()] == [None]
    policy, best = history.weights_of("best")
    history.close()
    assert (policy, best) == ("gorgo", rig.weights()["weights"]), "the incumbent is in force when nobody watches"


def test_a_freeze_holds_over_a_restart_of_the_proxy_and_a_thaw_lets_the_tuner_go_on(rig: Rig) -> None:
    with Traffic(rig.url):
        tuner = rig.tune()
        rig.until_generation(2)
        words = ["--url", rig.admin, "--token", TOKEN]
        frozen = CliRunner().invoke(
            app, ["freeze", *words, "--weights", "1", "--database", rig.database, "--reason", "held-out week"]
        )
        assert frozen.exit_code == 0, frozen.output
        until(lambda: "frozen: held-out week" in rig.said(tuner), "the tuner notices")
        pinned = rig.weights()
        generations = len(rig.numbers())
        assert rig.end("serve") == 0
        until(lambda: "routing goes on, the tuner tries again" in rig.said(tuner), "the tuner misses the proxy")
        rig.serve("serve-again")
        again = rig.weights()
        assert (again["weights"], again["frozen"]) == (pinned["weights"], pinned["frozen"])
        until(lambda: "the proxy answers again" in rig.said(tuner), "the tuner is back")
        assert len(rig.numbers()) == generations, "nothing was tried in between"
        thawed = CliRunner().invoke(app, ["thaw", *words])
        assert thawed.exit_code == 0, thawed.output
        rig.until_generation(generations + 1)
        assert rig.end(tuner) == 0
    said = rig.said(tuner)
    assert "restart: the proxy is another run than before" in said
    assert "Traceback" not in said
    history = History(rig.database)
    kinds = [event.kind for event in history.events()]
    history.close()
    assert sorted(set(kinds)) == ["foreign", "freeze", "restart", "thaw"]
    assert rig.numbers() == list(range(len(rig.numbers())))


def test_a_locked_database_stops_neither_traffic_nor_tuner_and_loses_no_row(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        tuner = rig.tune()
        rig.until_generation(1)
        other = sqlite3.connect(rig.folder / "history.sqlite3", isolation_level=None, timeout=10)
        other.execute("BEGIN IMMEDIATE")
        before = rig.numbers()
        until(lambda: "another process writes to it" in rig.said(tuner), "the tuner complains")
        version = rig.weights()["version"]
        until(lambda: rig.weights()["version"] > version + 1, "the tuner goes on")
        assert rig.numbers() == before, "rows of before are there"
        other.execute("ROLLBACK")
        other.close()
        assert rig.end(tuner) == 0
    assert traffic.errors == []
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= len(before) + 2
    assert rig.said(tuner).count("another process writes to it") == 1
