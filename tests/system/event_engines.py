"""Two engines that publish KV events at ports which survive a restart: simulated ones, and vLLM on the CPU.

A router sees the first one's events through a relay that can be cut.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_ports
from tests.system.environments import Environment
from tests.system.vllm_server import CACHED_TOKENS_FLAG, vllm_server

_START_TIMEOUT_S = 60.0
_REGIONS = """
proxy: {{region: here}}
regions: [{{name: here}}]
replicas: [{{name: engine, region: here, url: "http://127.0.0.1:{port}", models: [{model}]}}]
simulation: {{rtt_ms: {{here: 0}}, profile: 1xL40S-Llama-3.1-8B}}
"""


@dataclass(frozen=True, slots=True)
class EventPorts:
    """Ports of one engine: requests, events, replays."""

    http: int
    events: int
    replays: int

    @classmethod
    def free(cls) -> EventPorts:
        """Return ports that nobody has; the one of replays follows that of events."""
        while True:
            first, second, third = free_ports(3)
            if third == second + 1:
                return cls(first, second, third)


@dataclass(slots=True)
class EventEngine:
    """One engine, killed and started again at its ports."""

    name: str
    ports: EventPorts
    start: Callable[[EventPorts], AbstractContextManager[Callable[[], None]]]
    _stack: ExitStack = field(default_factory=ExitStack)
    _kill: Callable[[], None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def begin(self) -> None:
        self._kill = self._stack.enter_context(self.start(self.ports))

    def kill(self) -> None:
        """As `kill -9`, in the middle of whatever it does."""
        assert self._kill is not None
        self._kill()
        self.close()

    def close(self) -> None:
        self._stack.close()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 5 * _START_TIMEOUT_S
        while not _answers(self.url):
            assert time.monotonic() < deadline, f"{self.name} did not start"
            time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How a kind of engine is configured and started."""

    engine: str
    model: str
    tokenizer: str
    block_tokens: int
    #: Tokens of an answer that takes some seconds while 200 are computed.
    long_answer: int
    start: Callable[[EventPorts], AbstractContextManager[Callable[[], None]]]


def simulated_kind(folder: Path) -> EngineKind:
    """`gorgo engine --kv-events`."""

    @contextmanager
    def start(ports: EventPorts) -> Iterator[Callable[[], None]]:
        config = folder / f"engine-{ports.http}.yaml"
        config.write_text(_REGIONS.format(port=ports.http, model="m"))
        words = ("engine", "--replica", "engine", "--config", str(config))
        command = [sys.executable, "-m", "gorgo", *words, "--kv-events", f"tcp://127.0.0.1:{ports.events}"]
        with (folder / f"engine-{ports.http}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield lambda: os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()

    return EngineKind("sglang", "m", "simulated", 16, 200, start)


def vllm_kind(environment: Environment, checkpoint: Path) -> EngineKind:
    """vLLM on the CPU with blocks of 32 tokens."""

    @contextmanager
    def start(ports: EventPorts) -> Iterator[Callable[[], None]]:
        endpoints = f'"endpoint": "tcp://*:{ports.events}", "replay_endpoint": "tcp://*:{ports.replays}"'
        events = f'{{"enable_kv_cache_events": true, "publisher": "zmq", {endpoints}}}'
        flags = (CACHED_TOKENS_FLAG, "--kv-events-config", events, "--max-model-len", "2048")
        with vllm_server(environment, checkpoint, *flags, port=ports.http) as server:
            yield server.kill

    return EngineKind("vllm", "tiny", str(checkpoint / "tokenizer.json"), 32, 40, start)


@contextmanager
def two_engines(kind: EngineKind) -> Iterator[Mapping[str, EventEngine]]:
    """Engines `left` and `right`, both ready."""
    engines = {name: EventEngine(name, EventPorts.free(), kind.start) for name in ("left", "right")}
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
            engine.begin()
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
