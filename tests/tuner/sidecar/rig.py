"""Real processes for tests of the tuner: engines, a proxy, clients that never stop asking, and a tuner beside them."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.lab.demo import Processes
from tests.ports import free_port

TOKEN = "token-of-the-tests"
REPLICAS = {"near": 1, "far": 15}
#: Of everything that is waited for: twice the tuner's longest pause between attempts to write, for two cores are shared
#: with other tests.
PATIENCE_S = 120.0
#: Of each client: traffic that leaves the cores to those who are tested.
PAUSE_S = 0.2
#: As published, with windows that fill within seconds.
PAPER = ["--mode", "paper", "--seed", "1"]
SETTINGS = "{window: 12, hop: 6, warm_up_s: 0, poll_s: 0.1}\n"

#: A search that does not end by itself while a test waits: ES converges after some twenty generations.
ENDLESS = ["--algorithm", "random", "--max-generations", "100000"]


def until(done: Callable[[], Any], what: str, said: Callable[[], str] = str) -> Any:
    """`said()` is what to read beside a failure, as it is then."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := done()):
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}; {said()[-800:]}"
        time.sleep(0.05)
    return found


class Rig:
    """Two engines, one proxy on ports that stay, and a tuner."""

    def __init__(self, folder: Path, processes: Processes, engines: Mapping[str, str]) -> None:
        self.folder, self.processes = folder, processes
        self.url, self.admin = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.keep_history_in(folder)
        self.tuners = 0
        self.settings = folder / "tune.yaml"
        self.settings.write_text(SETTINGS)
        write_config(folder / "regions.yaml", engines)

    def keep_history_in(self, folder: Path) -> None:
        self.file = folder / "history.sqlite3"
        self.database = f"sqlite:///{self.file}"

    def serve(self, name: str = "serve") -> None:
        binds = ["--bind", self.url.removeprefix("http://"), "--admin-bind", self.admin.removeprefix("http://")]
        words = ["serve", "--config", str(self.folder / "regions.yaml"), *binds, "--state", str(self.folder / "s.json")]
        self.processes.start(name, words)
        self.processes.wait_for_line(name, r"listening on", timeout_s=PATIENCE_S)

    def tune(self, *words: str, url: str | None = None) -> str:
        self.tuners += 1
        name = f"tune-{self.tuners}"
        places = ["--url", url or self.admin, "--database", self.database, "--settings", str(self.settings)]
        self.processes.start(name, ["tune", *places, *PAPER, *words])
        return name

    def end(self, name: str, by: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes._running.pop(name)
        process.send_signal(by)
        return process.wait(PATIENCE_S)

    def said(self, name: str) -> str:
        return self.processes._said(name)

    def pid(self, name: str) -> int:
        return self.processes._running[name].pid

    def until_said(self, name: str, words: str, *, times: int = 1) -> None:
        until(lambda: self.said(name).count(words) >= times, repr(words), lambda: self.said(name))

    def until_weights_move(self) -> None:
        """The tuner is at work: it puts weights."""
        version = self.weights()["version"]
        until(lambda: self.weights()["version"] > version + 1, "weights are put", self._said_last)

    def weights(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{self.admin}/admin/weights", headers=headers, timeout=10).raise_for_status()
        shown: dict[str, Any] = answer.json()
        return shown

    def numbers(self) -> list[int]:
        if not self.file.exists():
            return []
        reader = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True, timeout=10)
        try:
            return [number for (number,) in reader.execute("SELECT number FROM generation ORDER BY id")]
        except sqlite3.OperationalError:  # no table yet
            return []
        finally:
            reader.close()

    def until_generation(self, number: int) -> None:
        until(lambda: number in self.numbers(), f"generation {number}", self._said_last)

    def _said_last(self) -> str:
        return self.said(f"tune-{self.tuners}")


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
