"""Other routers before the same simulated engines, live: real processes on loopback, in wall time.

Theory of operation. Eight `gorgo engine` of one kind run as processes of their own. One router after the other stands
before them, as its operator would start it, with the policy that it has for prompts that share a beginning. Each router
gets the same requests at the same times from `gorgo replay`, and between two kinds of traffic the engines' caches are
emptied. Cached tokens and the shares of the engines are read from the engines, so that nothing depends on what a router
passes on. Processor time is that of the router and its children. In the last part an engine is killed in the middle,
and starts again five seconds later. A router that cannot be installed is named with the reason.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import httpx
import yaml

from experiments.comparison import MEASURES
from experiments.environments import InstallError, installed
from experiments.grid import Grid, SystemReport
from experiments.runner import Runner, run_key
from experiments.systems.herd import HERD
from experiments.tables import TableSection, number
from gorgo.engines.exposition import read_gauges
from gorgo.errors import GorgoError
from gorgo.lab.datasets import generate_requests, load_requests
from gorgo.lab.demo.options import OURS
from gorgo.lab.demo.run import MODEL, UNKNOWN_URL, FleetLayout, Processes, start_engines, write_config
from gorgo.lab.replay import ReplayOptions, replay
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.traces import TraceFilters, TraceRequest
from tests.bench.behind_envoy import targets as envoy
from tests.bench.relay import measure
from tests.bench.relay.targets import Launch, Place, UnavailableError, nginx, sglang_router, start, stop
from tests.ports import free_port

NAME, TITLE = "live", "other routers before the same engines, live"
GROUPS = ("live",)
HEADER = (
    "traffic", "router", "requests", "errors", "TTFT mean ms", "p50", "p95", "E2E p95 s", "hit %", "largest share %",
    "router CPU ms a request", "us an event", "sent late ms",
)  # fmt: skip
SMG, VLLM_ROUTER, LITELLM = "smg==1.13.0", "vllm-router==0.1.17", "litellm==1.109.1"
#: What LiteLLM's proxy imports beside the client: its extra `proxy`, without the part that keeps keys in a database,
#: whose pinned version not every index has.
LITELLM_NEEDS = (
    "uvicorn", "fastapi", "backoff", "orjson", "apscheduler", "python-multipart", "cryptography", "websockets", "pyjwt",
    "rq", "fastapi-sso", "mcp", "boto3", "gunicorn", "uvloop", "pyyaml", "expression", "soundfile", "pynacl",
    "restrictedpython", "tomlkit", "httpx2", "hiredis", "granian", "litellm-enterprise", "polars", "inquirerpy",
    "pyroscope-io", "azure-identity", "azure-storage-blob",
)  # fmt: skip
#: Routers that this set-up cannot have.
NEVER = {"Dynamo's frontend": "it sends requests to workers of its own runtime alone, and to no URL"}
ENGINES = 8
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
KILLED = "herd, an engine is killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of a kind, some half a minute of them; `trace` None is a herd of sessions."""

    name: str
    trace: str | None
    filters: TraceFilters
    time_scale: float

    def scaled(self, factor: float) -> Traffic:
        """Return the same with so many times the requests."""
        return replace(self, filters=replace(self.filters, limit=max(2, round((self.filters.limit or 0) * factor))))

    def requests(self, seed: int) -> Sequence[TraceRequest]:
        filters = replace(self.filters, seed=seed)
        if self.trace is None:
            return filters.apply(generate_requests(replace(HERD, seed=seed)))
        return load_requests(self.trace, filters, seed=seed)


def traffics(conversation: str | None) -> list[Traffic]:
    """Return the kinds of traffic; that of the conversation trace with its file alone."""
    herd = Traffic(name="herd", trace=None, filters=TraceFilters(limit=183, max_output=48), time_scale=1 / 8)
    chats = TraceFilters(limit=160, max_input=24_000, max_output=48)
    found = [herd, Traffic(name="ART-Chat-like", trace="art-chat-apr6", filters=chats, time_scale=0.8)]
    if conversation is not None:
        filters = replace(chats, spread_s=3.0)
        found.append(Traffic(name="conversation trace", trace=conversation, filters=filters, time_scale=0.5))
    return [*found, replace(herd, name=KILLED)]


# -- routers


def gorgo_serve(place: Place) -> Launch:
    command = [sys.executable, "-m", "gorgo", "serve", "--config", str(_regions(place))]
    environment = {"GORGO_ADMIN_TOKEN": secrets.token_hex(16)}
    return Launch(arguments=command, environment=environment, version="gorgo serve, gorgo-ms")


def gorgo_picker(place: Place) -> Launch:
    """`gorgo picker` behind Envoy by the configuration that it prints."""
    config = _regions(place)
    whole = envoy.printed_envoy(config)
    return envoy.launch_envoy(place, whole, {config: envoy.picker_command(config)}, "gorgo picker, gorgo-ms")


def smg(place: Place) -> Launch:
    program = _installed(SMG) / "smg"
    options = ["launch", "--host", "127.0.0.1", "--port", str(place.port), "--policy", "cache_aware"]
    metrics = ["--prometheus-port", str(free_port()), "--log-level", "error"]
    return Launch(
        arguments=[str(program), *options, *metrics, "--worker-urls", *_urls(place)], environment={},
        version=f"{SMG} cache_aware",
    )  # fmt: skip


def vllm_router(place: Place) -> Launch:
    program = _installed(VLLM_ROUTER) / "vllm-router"
    options = ["--host", "127.0.0.1", "--port", str(place.port), "--policy", "cache_aware"]
    metrics = ["--prometheus-port", str(free_port()), "--log-level", "error"]
    return Launch(
        arguments=[str(program), *options, *metrics, "--worker-urls", *_urls(place)], environment={},
        version=f"{VLLM_ROUTER} cache_aware",
    )  # fmt: skip


def litellm(place: Place) -> Launch:
    """LiteLLM's proxy, which has no rule for prefixes of engines: it chooses the least busy."""
    program = _installed(LITELLM, *LITELLM_NEEDS) / "litellm"
    one = {"model": f"openai/{MODEL}", "api_key": "none"}
    models = [{"model_name": MODEL, "litellm_params": {**one, "api_base": f"{url}/v1"}} for url in _urls(place)]
    config = place.folder / "litellm.yaml"
    # Without a key of its administrator it starts only if it may: it listens on loopback.
    keyless = {"dangerously_permit_weak_or_unset_master_key": True}
    document = {
        "model_list": models,
        "router_settings": {"routing_strategy": "least-busy"},
        "general_settings": keyless,
    }
    config.write_text(yaml.safe_dump(document))
    return Launch(
        arguments=[str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(place.port)],
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"},
        version=f"{LITELLM} least-busy",
    )


ROUTERS: Mapping[str, Callable[[Place], Launch]] = {
    "gorgo serve": gorgo_serve,
    "gorgo picker behind Envoy": gorgo_picker,
    "sglang-router": sglang_router,
    "smg": smg,
    "vllm-router": vllm_router,
    "LiteLLM": litellm,
    "Envoy, least request": envoy.plain,
    "nginx, in turn": nginx,
}


def _regions(place: Place) -> Path:
    """Write what `gorgo` knows of the fleet: the engines' prefill speed, as the policy's page says."""
    config = place.folder / "regions.yaml"
    write_config(config, OURS, 0, LAYOUT, dict(zip(LAYOUT.replicas, _urls(place), strict=True)))
    document = yaml.safe_load(config.read_text())
    document["proxy"] |= {"bind": f"127.0.0.1:{place.port}", "admin_bind": f"127.0.0.1:{free_port()}"}
    document["picker"] = {"bind": f"127.0.0.1:{free_port()}"}
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return config


def _urls(place: Place) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in place.replicas]


def _installed(requirement: str, *beside: str) -> Path:
    """Return the folder of the programs of a requirement."""
    try:
        return installed(f"router-{requirement.replace('==', '-')}", [requirement, *beside]).folder / "bin"
    except InstallError as error:
        raise UnavailableError(str(error)) from error


# -- runs


class NoAnswerError(GorgoError):
    """A router was started and does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """The row of a router under a traffic, with what was read from the engines and from the router's processes."""

    router: str
    version: str
    traffic: str
    row: ResultRow
    hit: float
    share: float
    cpu_ms: float
    event_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The rows of one round, and why a router has none: it did not answer."""

    rows: Sequence[LiveRow] = ()
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveTask:
    """One round: each router in turn before the same engines, under every kind of traffic."""

    routers: tuple[str, ...]
    traffics: tuple[Traffic, ...]
    seed: int
    kind: ClassVar[type[LiveRun]] = LiveRun

    def key(self) -> str:
        traces = [one.trace for one in self.traffics if one.trace is not None]
        return run_key(OURS, traces, [self.routers, self.traffics, self.seed], code=[Path(__file__)])

    def run(self) -> LiveRun:
        """Run it now; raises `UnavailableError`, or `GorgoError` where a process does not do its part."""
        with tempfile.TemporaryDirectory(prefix="gorgo-live-") as folder, _engines(Path(folder), self.seed) as engines:
            rows: list[LiveRow] = []
            silent: dict[str, str] = {}
            for name in self.routers:
                try:
                    rows += self._rows(name, engines, Path(folder))
                except NoAnswerError as why:
                    silent[name] = str(why)
            return LiveRun(rows=rows, silent=silent)

    def _rows(self, router: str, engines: Engines, folder: Path) -> Iterator[LiveRow]:
        own = folder / router.replace(" ", "-")
        own.mkdir()
        place = Place(port=free_port(), replicas=engines.ports, folder=own)
        launch = ROUTERS[router](place)
        process = start(launch, own)
        try:
            _wait_until_answering(f"http://127.0.0.1:{place.port}", router, process, own / "log")
            for traffic in self.traffics:
                print(f"{router}: {traffic.name}, {traffic.filters.limit} requests", file=sys.stderr, flush=True)  # noqa: T201
                found = _measured(traffic, self.seed, place.port, process.pid, engines)
                yield LiveRow(router=router, version=launch.version, traffic=traffic.name, **found)
        finally:
            stop(process)


@dataclass(frozen=True, slots=True)
class Engines:
    """Running engines, by name, and how they were started."""

    processes: Processes
    config: Path
    urls: Mapping[str, str]

    @property
    def ports(self) -> list[int]:
        return [int(url.rpartition(":")[2]) for url in self.urls.values()]

    def flush(self) -> None:
        """Empty every cache, once what clients gave up has ended; raises `GorgoError` where requests go on running."""
        deadline_s = time.monotonic() + READY_S
        for url in self.urls.values():
            while httpx.post(f"{url}/flush_cache", timeout=30.0, trust_env=False).status_code != 200:
                if time.monotonic() > deadline_s:
                    raise GorgoError(f"{url}: its cache was not flushed: requests are running there")
                time.sleep(0.2)

    def totals(self) -> dict[str, list[float]]:
        """Return requests, tokens of prompts, cached and generated ones of each since its start."""
        names = [f"sglang:{of}_total" for of in ("num_requests", "prompt_tokens", "cached_tokens", "generation_tokens")]
        found = {}
        for name, url in self.urls.items():
            gauges = read_gauges(httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).text, set(names))
            found[name] = [gauges.get(one, 0.0) for one in names]
        return found

    async def away(self, name: str, after_s: float) -> None:
        """Kill an engine after a while, and start it again at its port."""
        await asyncio.sleep(after_s)
        self.processes.kill(name)
        await asyncio.sleep(AWAY_S)
        port = self.urls[name].rpartition(":")[2]
        (self.config.parent / f"{name}.log").unlink()
        self.processes.start(name, ["engine", "--replica", name, "--config", str(self.config), "--port", port])
        await asyncio.to_thread(self.processes.wait_for_line, name, "listening on", timeout_s=READY_S)


@contextmanager
def _engines(folder: Path, seed: int) -> Iterator[Engines]:
    config = folder / "engines.yaml"
    write_config(config, OURS, seed, LAYOUT, dict.fromkeys(LAYOUT.replicas, UNKNOWN_URL))
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        yield Engines(processes, config, start_engines(processes, config, LAYOUT.replicas, timeout_s=READY_S))


def _wait_until_answering(url: str, router: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a router's first answer; raises `NoAnswerError` with the end of its log."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    deadline_s = time.monotonic() + READY_S
    said = ""
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=10.0, trust_env=False)
            if answer.status_code == 200:
                return
            said = f"{answer.status_code} {answer.text[:200]}"
        except httpx.HTTPError as error:
            said = repr(error)
        time.sleep(0.2)
    how = f"did not answer within {READY_S:g} s" if process.poll() is None else f"ended with {process.returncode}"
    end = log.read_text(errors="replace").strip().rpartition("\n")[2][-300:]
    raise NoAnswerError(f"{router} {how}; at last: {said}; its log ends: {end}")


def _measured(traffic: Traffic, seed: int, port: int, router: int, engines: Engines) -> dict[str, Any]:
    """Send the traffic; return its row and the other figures of a `LiveRow`."""
    engines.flush()
    requests = traffic.requests(seed)
    options = ReplayOptions(
        trace=Path(traffic.trace or "herd"),
        url=f"http://127.0.0.1:{port}",
        time_scale=traffic.time_scale,
        model=MODEL,
        show_progress=False,
        request_timeout_s=60.0,
    )
    before, cpu_s = engines.totals(), measure.cpu_times(measure.process_tree(router))[0]
    half_s = requests[-1].timestamp_s * traffic.time_scale / 2
    killed = next(iter(LAYOUT.replicas)) if traffic.name == KILLED else None
    row = asyncio.run(_replayed(requests, options, engines, killed, half_s))
    cpu_s = measure.cpu_times(measure.process_tree(router))[0] - cpu_s
    # A process that was killed has forgotten what it did.
    parts = [
        tuple(now - then for now, then in zip(after, before[name], strict=True))
        for name, after in engines.totals().items()
        if name != killed
    ]
    served, prompt, cached, generated = (sum(column) for column in zip(*parts, strict=True))
    return {
        "row": row,
        "hit": cached / prompt if prompt else 0.0,
        "share": max(part[0] for part in parts) / served if served else 0.0,
        "cpu_ms": 1e3 * cpu_s / len(requests),
        # An engine sends an event for each token. Those of an engine that was killed are not known.
        "event_us": 1e6 * cpu_s / generated if generated and killed is None else None,
    }


async def _replayed(
    requests: Sequence[TraceRequest], options: ReplayOptions, engines: Engines, killed: str | None, half_s: float
) -> ResultRow:
    async with asyncio.TaskGroup() as group:
        if killed is not None:
            group.create_task(engines.away(killed, half_s))
        report = group.create_task(replay(requests, options))
    return report.result().row


# -- the report


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Run every router that is there, seed by seed, and return the table."""
    assert set(groups) == set(GROUPS), "there is one"
    kinds = tuple(one.scaled(grid.scale) for one in traffics(grid.trace))
    missing = dict(_unavailable())
    there = tuple(name for name in ROUTERS if name not in missing)
    runs = runner.runs([LiveTask(there, kinds, seed) for seed in grid.seeds], title=TITLE)
    missing |= {name: why for run in runs.values() for name, why in run.silent.items()}
    rows = [row for run in runs.values() for row in run.rows]
    cells = [
        (traffic.name, router, *_cells([one for one in rows if (one.traffic, one.router) == (traffic.name, router)]))
        for traffic in kinds
        for router in there
        if router not in missing
    ]
    lines = [f"SKIPPED {router}: {why}" for router, why in {**missing, **NEVER}.items()]
    lines.append(f"{len(grid.seeds)} rounds, real processes in wall time; {measure.describe_machine()}.")
    found = [{**asdict(one), "row": one.row.as_json()} for one in rows]
    return SystemReport(sections=[TableSection(TITLE, HEADER, cells)], end="\n\n".join(lines), rows=found)


def _unavailable() -> Iterator[tuple[str, str]]:
    """Yield the routers that cannot be started here, and why; says so at once."""
    for name, launch in ROUTERS.items():
        with tempfile.TemporaryDirectory(prefix="gorgo-live-") as folder:
            try:
                launch(Place(port=free_port(), replicas=[1] * ENGINES, folder=Path(folder)))
            except UnavailableError as why:
                print(f"SKIPPED {name}: {why}", file=sys.stderr, flush=True)  # noqa: T201
                yield name, str(why)


def _cells(found: Sequence[LiveRow]) -> Iterator[str]:
    rows = [one.row for one in found]
    yield f"{sum(row.n for row in rows)}"
    yield f"{sum(row.errors for row in rows)}"
    for name, form in (("mean TTFT", ".0f"), ("p50 TTFT", ".0f"), ("p95 TTFT", ".0f"), ("p95 E2E", ".2f")):
        values = [value for row in rows if (value := MEASURES[name](row)) is not None]
        yield number(fmean(values) if values else None, form)
    yield f"{100 * fmean(one.hit for one in found):.1f}"
    yield f"{100 * fmean(one.share for one in found):.0f}"
    yield f"{fmean(one.cpu_ms for one in found):.2f}"
    events = [one.event_us for one in found if one.event_us is not None]
    yield number(fmean(events) if events else None, ".0f")
    yield f"{fmean(row.slip_ms_p95 or 0.0 for row in rows):.1f}"
