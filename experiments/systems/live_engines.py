"""What stands behind the routers of `live`: simulated engines of this project, real vLLM, and NVIDIA Dynamo's mockers.

Theory of operation. Each kind of fleet starts as processes on loopback and gives back the same thing: where the engines
answer, where their counters are and what these are called. A mocker speaks Dynamo's own protocol alone. Other routers
reach it through a frontend that has no other worker; Dynamo's own frontend gets all of them. Mockers find each other
by files, and publish their caches through a NATS server, because Dynamo's default listens beyond loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.systems.dynamo import PROFILE, dynamo_environment, engine_of, write_table
from gorgo.engines.exposition import read_gauges
from gorgo.errors import GorgoError
from gorgo.lab.demo import MODEL, UNKNOWN_URL, FleetLayout, Processes, start_engines, write_config
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.policies.registry import OURS
from tests.ports import free_port
from tests.system.environments import vllm_environment
from tests.system.tiny_checkpoint import SHAPE, make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, vllm_server, wait_until_ready

ENGINES, VLLM_ENGINES = 8, 2
_PROFILE = find_profile("1xL40S-Llama-3.1-8B")
LAYOUT = FleetLayout(
    profile=_PROFILE.name,
    round_trip_ms={"local": 1},
    replicas={f"engine-{number}": "local" for number in range(ENGINES)},
    capacity={"prefill_tokens_per_s": round(_PROFILE.prefill_tokens_per_s)},
)
#: Until engines and a router answer: LiteLLM's imports take some ten seconds of processor time, which a busy machine
#: does not give in two minutes. A router that ends is not waited for.
READY_S = 600.0
#: How long an engine that was killed is away.
AWAY_S = 5.0
#: A mocker answers with tokens of chance below this number.
_MOCKED_TOKENS = 2_000
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Running engines, by name."""

    urls: Mapping[str, str]  #: Where each answers.
    counters: Sequence[str] = ()  #: What its counters of requests, tokens of prompts, cached and generated are called.
    #: Where they are, if not at its URL: some addresses of each, whose counters are added up.
    pages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    flush: str = ""  #: The path that empties its cache; empty: nothing does.
    capacity: Mapping[str, float] = field(default_factory=dict)  #: What `gorgo` is told of each.
    router_port: int | None = None  #: Of a router that belongs to these engines: where it listens.
    environment: Mapping[str, str] = field(default_factory=dict)  #: How that router finds them.
    processes: Processes | None = None  #: Of engines that can be killed, and start again, with their configuration.
    config: Path | None = None

    @property
    def ports(self) -> list[int]:
        return [int(url.rpartition(":")[2]) for url in self.urls.values()]

    def empty_caches(self) -> None:
        """Empty every cache, once what clients gave up has ended; raises `GorgoError` where requests go on running."""
        deadline_s = time.monotonic() + READY_S
        for url in self.urls.values() if self.flush else ():
            while httpx.post(f"{url}{self.flush}", timeout=30.0, trust_env=False).status_code != 200:
                if time.monotonic() > deadline_s:
                    raise GorgoError(f"{url}: its cache was not flushed: requests are running there")
                time.sleep(0.2)

    def totals(self) -> dict[str, list[float]]:
        """Return requests, tokens of prompts, cached and generated ones of each since its start."""
        found = {}
        for name, pages in (self.pages or {name: [url] for name, url in self.urls.items()}).items():
            texts = [httpx.get(f"{page}/metrics", timeout=30.0, trust_env=False).text for page in pages]
            gauges = read_gauges("\n".join(texts), set(self.counters))
            found[name] = [gauges.get(one, 0.0) for one in self.counters]
        return found

    async def away(self, name: str, after_s: float) -> None:
        """Kill an engine after a while, and start it again at its port."""
        assert self.processes is not None, "engines that can be killed"
        assert self.config is not None, "engines that start again"
        await asyncio.sleep(after_s)
        self.processes.kill(name)
        await asyncio.sleep(AWAY_S)
        port = self.urls[name].rpartition(":")[2]
        (self.config.parent / f"{name}.log").unlink()
        self.processes.start(name, ["engine", "--replica", name, "--config", str(self.config), "--port", port])
        await asyncio.to_thread(self.processes.wait_for_line, name, "listening on", timeout_s=READY_S)


@contextmanager
def gorgo_engines(folder: Path, seed: int) -> Iterator[Engines]:
    """Eight `gorgo engine`."""
    config = folder / "engines.yaml"
    write_config(config, OURS, seed, LAYOUT, dict.fromkeys(LAYOUT.replicas, UNKNOWN_URL))
    names = ("num_requests", "prompt_tokens", "cached_tokens", "generation_tokens")
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        yield Engines(
            urls=start_engines(processes, config, LAYOUT.replicas, timeout_s=READY_S), flush="/flush_cache",
            counters=[f"sglang:{name}_total" for name in names], capacity=LAYOUT.capacity, processes=processes,
            config=config,
        )  # fmt: skip


@contextmanager
def vllm_engines(folder: Path, seed: int) -> Iterator[Engines]:
    """Two vLLM on the CPU with a small model of random weights; each has answered once."""
    environment = vllm_environment()
    checkpoint = make_tiny_checkpoint(folder / "tiny", shape=SHAPE, seed=seed)
    flags = (CACHED_TOKENS_FLAG, "--served-model-name", MODEL)
    # Those of prompts that were computed: `prefix_cache_hits` also counts a hedge that was given up.
    names = ("request_success", "prompt_tokens", "prompt_tokens_cached", "generation_tokens")
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(environment, checkpoint, *flags)) for _ in range(VLLM_ENGINES)]
        try:
            wait_until_ready(*servers, timeout_s=READY_S)
        except TimeoutError as error:
            raise GorgoError(str(error)) from error
        for server in servers:
            body = {"model": MODEL, "prompt": "ba" * 1_000, "max_tokens": 4}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=READY_S, trust_env=False).raise_for_status()
        urls = {f"engine-{number}": server.url for number, server in enumerate(servers)}
        yield Engines(urls=urls, counters=[f"vllm:{name}_total" for name in names], flush="/reset_prefix_cache")


@contextmanager
def mockers(folder: Path, seed: int) -> Iterator[Engines]:
    """Eight of Dynamo's mockers, each behind a frontend of its own, which any router can send requests to."""
    with _mockers(folder, seed, spaces=list(LAYOUT.replicas)) as (processes, environment, systems):
        python = str(dynamo_environment().python)
        urls = {name: f"http://127.0.0.1:{free_port()}" for name in systems}
        for name, url in urls.items():
            command = [python, *frontend_command(int(url.rpartition(":")[2])), "--namespace", name]
            processes.start_command(f"{name}-frontend", command)
        for name in urls:
            processes.wait_for_line(f"{name}-frontend", "completion endpoints enabled", timeout_s=READY_S)
        pages = {name: [systems[name], url] for name, url in urls.items()}
        yield Engines(
            urls=urls, counters=_MOCKER_COUNTERS, pages=pages, capacity=LAYOUT.capacity, environment=environment
        )


@contextmanager
def mockers_alone(folder: Path, seed: int) -> Iterator[Engines]:
    """Eight of Dynamo's mockers for its own frontend, which alone counts their tokens."""
    with _mockers(folder, seed, spaces=["one"]) as (_, environment, systems):
        port = free_port()
        pages = {name: [url] for name, url in systems.items()} | {"frontend": [f"http://127.0.0.1:{port}"]}
        yield Engines(urls=systems, counters=_MOCKER_COUNTERS, pages=pages, router_port=port, environment=environment)


_MOCKER_COUNTERS = (
    "dynamo_component_requests_total", "dynamo_frontend_input_sequence_tokens_sum",
    "dynamo_frontend_cached_tokens_sum", "dynamo_frontend_output_tokens_total",
)  # fmt: skip


def frontend_command(port: int, *options: str) -> list[str]:
    """Return the words behind Python of a frontend that listens there."""
    return ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *_PLANES, *options]


@contextmanager
def _mockers(
    folder: Path, seed: int, *, spaces: Sequence[str]
) -> Iterator[tuple[Processes, Mapping[str, str], Mapping[str, str]]]:
    """Yield running mockers, those of one namespace together: how they are found, and where each has counters."""
    environment = dynamo_environment()
    model, engine, nats = mocked_model(folder / "model", seed=seed), folder / "engine.json", free_port()
    write_table(PROFILE, folder / "engine.npz")
    engine.write_text(json.dumps({"engine": engine_of(PROFILE, folder / "engine.npz")}))
    found = {"DYN_FILE_KV": str(folder / "discovery"), "NATS_SERVER": f"nats://127.0.0.1:{nats}"}
    found |= {f"DYN_{name}_HOST": "127.0.0.1" for name in ("TCP_RPC", "TCP_RESPONSE_STREAM", "SYSTEM", "EVENT_PLANE")}
    with Processes(folder, {**os.environ, **found, "PYTHONPATH": ""}) as processes:
        server = environment.folder / "bin" / "nats-server"
        processes.start_command("nats", [str(server), "--addr", "127.0.0.1", "--port", str(nats)])
        processes.wait_for_line("nats", "Server is ready", timeout_s=READY_S)
        systems = {}
        for number, name in enumerate(LAYOUT.replicas):
            port, space = free_port(), spaces[number % len(spaces)]
            systems[name] = f"http://127.0.0.1:{port}"
            command = ["env", f"DYN_SYSTEM_PORT={port}", str(environment.python), "-m", "dynamo.mocker", *_PLANES]
            options = ["--model-path", str(model), "--model-name", MODEL, "--extra-engine-args", str(engine)]
            processes.start_command(name, [*command, *options, "--endpoint", f"dyn://{space}.backend.generate"])
        for name in systems:
            processes.wait_for_line(name, "Metrics background tasks started", timeout_s=READY_S)
        yield processes, found, systems


def mocked_model(folder: Path, *, seed: int) -> Path:
    """Make the files by which a frontend counts and writes tokens: a mocker answers with ones that the model lacks."""
    make_tiny_checkpoint(folder, seed=seed)
    (folder / "model.safetensors").unlink()
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"<{number}>": number for number in range(len(words), _MOCKED_TOKENS)}
    file.write_text(json.dumps(tokenizer))
    return folder
