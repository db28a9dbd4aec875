"""Other routers before the same engines, live: real processes on loopback, in wall time.

Theory of operation. Engines of one kind run as processes of their own: eight `gorgo engine`, two vLLM on the CPU, or
eight of NVIDIA Dynamo's mockers. One router after the other stands before them, as its operator would start it, with
the policy that it has for prompts that share a beginning. Each router gets the same requests at the same times from
`gorgo replay` and, of one kind, from aiperf. Between two kinds of traffic the engines' caches are emptied; engines
whose caches nothing empties start anew for each router. Cached tokens and the shares of the engines are read from the
engines, so that nothing depends on what a router passes on. Processor time is that of the router and its children. In
the last part an engine is killed in the middle, and starts again five seconds later. What cannot be installed, a
router, engines or aiperf, is named with the reason.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import httpx
import yaml

from experiments.aiperf import replay_records, run_aiperf, trace_lines
from experiments.comparison import MEASURES
from experiments.environments import InstallError, installed
from experiments.reports import Grid, SystemReport
from experiments.runner import Runner, run_key
from experiments.systems.dynamo import dynamo_environment
from experiments.systems.herd import HERD
from experiments.systems.live_engines import (
    ENGINES,
    LAYOUT,
    READY_S,
    Engines,
    frontend_command,
    gorgo_engines,
    mockers,
    mockers_alone,
    vllm_engines,
)
from experiments.tables import TableSection, number
from gorgo.errors import GorgoError
from gorgo.lab.datasets import HerdShape, generate_requests, load_requests
from gorgo.lab.demo import MODEL, UNKNOWN_URL, FleetLayout, write_config
from gorgo.lab.replay import replay
from gorgo.lab.replay_client import ReplayOptions, Tally
from gorgo.lab.results import ResultRow
from gorgo.lab.termination import termination_as_interrupt
from gorgo.lab.traces import TraceFilters, TraceRequest
from gorgo.policies.registry import OURS
from tests.bench.behind_envoy import targets as envoy
from tests.bench.relay import measure
from tests.bench.relay.targets import Launch, Place, UnavailableError, nginx, sglang_router, start, stop
from tests.ports import free_port
from tests.system.environments import aiperf_environment, vllm_environment
from tests.system.tiny_checkpoint import HUB_NAME, make_hub_cache, make_tiny_checkpoint

NAME, TITLE = "live", "other routers before the same engines, live"
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
#: Routers that cannot stand before `gorgo engine`.
NEVER = {"Dynamo's frontend": "it sends requests to workers of its own runtime alone, and to no URL"}
KILLED = "herd, an engine is killed"
#: Short prompts at the pace of a small model on two cores. The prompts of a herd have 10,000 tokens and more.
SHORT_HERD = replace(
    HERD, sessions=6, rounds=16, groups=2, gap_s=1.0, system_tokens=1_536, question_tokens=256, output_tokens=32
)
REQUEST_TIMEOUT_S = 60.0
#: As it is named where it is missing.
AIPERF = "aiperf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of a kind, some half a minute of them."""

    name: str
    trace: str | None = None  #: None is a herd of sessions.
    filters: TraceFilters
    time_scale: float
    herd: HerdShape = HERD
    by_aiperf: bool = False  #: Whether aiperf sends it, and not `gorgo replay`.

    def scaled(self, factor: float) -> Traffic:
        return replace(self, filters=replace(self.filters, limit=max(2, round((self.filters.limit or 0) * factor))))

    def requests(self, seed: int) -> Sequence[TraceRequest]:
        filters = replace(self.filters, seed=seed)
        if self.trace is None:
            return filters.apply(generate_requests(replace(self.herd, seed=seed)))
        return load_requests(self.trace, filters, seed=seed)


_HERD = Traffic(name="herd", filters=TraceFilters(limit=183, max_output=48), time_scale=1 / 8)
_SHORT_HERD = Traffic(name="herd of short prompts", filters=TraceFilters(limit=96), time_scale=0.5, herd=SHORT_HERD)


def traffics(conversation: str | None) -> list[Traffic]:
    """Return the kinds of traffic; that of the conversation trace with its file alone."""
    chats = TraceFilters(limit=160, max_input=24_000, max_output=48)
    found = [
        _HERD,
        replace(_HERD, name="herd, sent by aiperf", by_aiperf=True),
        Traffic(name="ART-Chat-like", trace="art-chat-apr6", filters=chats, time_scale=0.8),
    ]
    if conversation is not None:
        filters = replace(chats, spread_s=3.0)
        found.append(Traffic(name="conversation trace", trace=conversation, filters=filters, time_scale=0.5))
    return [*found, replace(_HERD, name=KILLED)]


# -- routers


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlace(Place):
    """Where a router listens, and the engines that it has."""

    engines: Engines

    @classmethod
    def before(cls, engines: Engines, folder: Path) -> LivePlace:
        port = engines.router_port or free_port()
        return cls(port=port, replicas=engines.ports, folder=folder, engines=engines)


def gorgo_serve(place: LivePlace) -> Launch:
    command = [sys.executable, "-m", "gorgo", "serve", "--config", str(_regions(place))]
    environment = {"GORGO_ADMIN_TOKEN": secrets.token_hex(16)}
    return Launch(arguments=command, environment=environment, version="gorgo serve, gorgo-ms")


def gorgo_picker(place: LivePlace) -> Launch:
    """`gorgo picker` behind Envoy by the configuration that it prints."""
    config = _regions(place)
    whole = envoy.printed_envoy(config)
    return envoy.launch_envoy(place, whole, {config: envoy.picker_command(config)}, "gorgo picker, gorgo-ms")


def _cache_aware(requirement: str, *words: str) -> Callable[[LivePlace], Launch]:
    """Return what launches one of the routers that began as sglang-router, by its command."""

    def launch(place: LivePlace) -> Launch:
        program, *command = words
        command += ["--host", "127.0.0.1", "--port", str(place.port), "--policy", "cache_aware", "--log-level", "error"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--worker-urls"]
        command = [str(_installed(requirement) / program), *command, *_urls(place)]
        return Launch(arguments=command, environment={}, version=f"{requirement} cache_aware")

    return launch


def dynamo_frontend(place: LivePlace) -> Launch:
    """Dynamo's frontend with its KV router, which hears from the mockers what they have cached."""
    python = dynamo_environment().python
    options = ["--router-mode", "kv", "--router-min-initial-workers", str(len(place.replicas))]
    return Launch(
        arguments=[str(python), *frontend_command(place.port, *options)],
        environment={**place.engines.environment, "PYTHONPATH": ""},
        version="Dynamo's frontend, kv",
    )


def litellm(place: Place) -> Launch:
    """LiteLLM's proxy, which has no rule for prefixes of engines: it chooses the least busy."""
    program = _installed(LITELLM, *LITELLM_NEEDS) / "litellm"
    one = {"model": f"openai/{MODEL}", "api_key": "none"}
    models = [{"model_name": MODEL, "litellm_params": {**one, "api_base": f"{url}/v1"}} for url in _urls(place)]
    config = place.folder / "litellm.yaml"
    # Without a key of its administrator it starts only if it may: it listens on loopback.
    keyless = {"dangerously_permit_weak_or_unset_master_key": True}
    routing = {"routing_strategy": "least-busy"}
    document = {"model_list": models, "router_settings": routing, "general_settings": keyless}
    config.write_text(yaml.safe_dump(document))
    return Launch(
        arguments=[str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(place.port)],
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"},
        version=f"{LITELLM} least-busy",
    )


ROUTERS: Mapping[str, Callable[[LivePlace], Launch]] = {
    "gorgo serve": gorgo_serve,
    "gorgo picker behind Envoy": gorgo_picker,
    "sglang-router": sglang_router,
    "smg": _cache_aware(SMG, "smg", "launch"),
    "vllm-router": _cache_aware(VLLM_ROUTER, "vllm-router"),
    "LiteLLM": litellm,
    "Envoy, least request": envoy.plain,
    "nginx, in turn": nginx,
    "Dynamo's frontend": dynamo_frontend,
}


def _regions(place: LivePlace) -> Path:
    """Write what `gorgo` knows of the fleet: the engines' prefill speed, as the policy's page says."""
    config, engines = place.folder / "regions.yaml", place.engines
    layout = FleetLayout(
        profile=LAYOUT.profile, round_trip_ms=LAYOUT.round_trip_ms, capacity=engines.capacity,
        replicas=dict.fromkeys(engines.urls, "local"),
    )  # fmt: skip
    write_config(config, OURS, 0, layout, engines.urls)
    document = yaml.safe_load(config.read_text())
    document["proxy"] |= {"bind": f"127.0.0.1:{place.port}", "admin_bind": f"127.0.0.1:{free_port()}"}
    document["picker"] = {"bind": f"127.0.0.1:{free_port()}"}
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return config


def _urls(place: Place) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in place.replicas]


def _installed(requirement: str, *beside: str) -> Path:
    """Return the folder of the programs of a requirement; raises `InstallError`."""
    return installed(f"router-{requirement.replace('==', '-')}", [requirement, *beside]).folder / "bin"


# -- fleets


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFleet:
    """Engines of a group, the routers that stand before them, and the traffic."""

    group: str  #: Of the table that has its rows, as the title.
    title: str
    started: Callable[[Path, int], AbstractContextManager[Engines]]  #: Runs the engines, by a folder and a seed.
    installed: Callable[[], object]  #: Makes what they need; raises `InstallError`.
    routers: Sequence[str]
    traffics: Callable[[str | None], Sequence[Traffic]]  #: Depends on the file of the conversation trace.
    anew: bool = False  #: Whether the engines start anew for each router.


#: Before engines that are slow to start: each of these routers stands for others.
_SOME = ("gorgo serve", "sglang-router", "smg", "vllm-router", "nginx, in turn")
FLEETS: Mapping[str, LiveFleet] = {
    "gorgo engine": LiveFleet(
        group="live", title="eight `gorgo engine`", started=gorgo_engines, installed=lambda: None,
        routers=[name for name in ROUTERS if name not in NEVER], traffics=traffics,
    ),
    "vLLM": LiveFleet(
        group="vllm", title="two real vLLM on the CPU", started=vllm_engines, installed=vllm_environment,
        routers=_SOME, traffics=lambda _: [_SHORT_HERD],
    ),
    "mockers": LiveFleet(
        group="mockers", title="eight of NVIDIA Dynamo's mockers", started=mockers, installed=dynamo_environment,
        routers=_SOME, traffics=lambda _: [_HERD], anew=True,
    ),
    "mockers alone": LiveFleet(
        group="mockers", title="eight of NVIDIA Dynamo's mockers", started=mockers_alone, installed=dynamo_environment,
        routers=list(NEVER), traffics=lambda _: [_HERD], anew=True,
    ),
}  # fmt: skip
GROUPS = tuple(dict.fromkeys(fleet.group for fleet in FLEETS.values()))


# -- runs


class NoAnswerError(GorgoError):
    """A router was started and does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """The row of a router under a traffic, with what was read from the engines and from the router's processes."""

    fleet: str
    router: str
    version: str
    traffic: str
    row: ResultRow
    hit: float
    share: float
    cpu_ms: float | None
    event_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """The rows of one round, and why a router has none: it did not answer."""

    rows: Sequence[LiveRow] = ()
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveTask:
    """One round: each router in turn before the same engines, under every kind of traffic."""

    fleet: str
    routers: tuple[str, ...]
    traffics: tuple[Traffic, ...]
    seed: int
    kind: ClassVar[type[LiveRun]] = LiveRun

    def key(self) -> str:
        traces = [one.trace for one in self.traffics if one.trace is not None]
        settings = [self.fleet, self.routers, self.traffics, self.seed]
        return run_key(OURS, traces, settings, code=sorted(Path(__file__).parent.glob("live*.py")))

    def run(self) -> LiveRun:
        """Run it now; raises `UnavailableError`, or `GorgoError` where a process does not do its part."""
        # A kill stops the processes, too.
        with termination_as_interrupt(), tempfile.TemporaryDirectory(prefix="gorgo-live-") as name:
            folder = Path(name)
            with FLEETS[self.fleet].started(folder, self.seed) as engines:
                rows: list[LiveRow] = []
                silent: dict[str, str] = {}
                for router in self.routers:
                    try:
                        rows += self._rows(router, engines, folder)
                    except NoAnswerError as why:
                        silent[router] = str(why)
                return LiveRun(rows=rows, silent=silent)

    def _rows(self, router: str, engines: Engines, folder: Path) -> Iterator[LiveRow]:
        own = folder / router.replace(" ", "-")
        own.mkdir()
        place = LivePlace.before(engines, own)
        launch = ROUTERS[router](place)
        process = start(launch, own)
        try:
            _wait_until_answering(f"http://127.0.0.1:{place.port}", router, process, own / "log")
            for traffic in self.traffics:
                _say(f"{router} before {self.fleet}: {traffic.name}, {traffic.filters.limit} requests")
                found = _measured(traffic, self.seed, place, process.pid)
                yield LiveRow(fleet=self.fleet, router=router, version=launch.version, traffic=traffic.name, **found)
        finally:
            stop(process)


def _wait_until_answering(url: str, router: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a router's first answer; raises `NoAnswerError` with the end of its log.

    One that refuses so plain a body (400) is not waited for.
    """
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    deadline_s = time.monotonic() + READY_S
    said = ""
    while time.monotonic() < deadline_s and process.poll() is None and not said.startswith("400"):
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=10.0, trust_env=False)
            if answer.status_code == 200:
                return
            said = f"{answer.status_code} {answer.text[:300]}"
        except httpx.HTTPError as error:
            said = repr(error)
        time.sleep(0.2)
    late = "refuses every request" if said.startswith("400") else f"did not answer within {READY_S:g} s"
    how = late if process.poll() is None else f"ended with {process.returncode}"
    end = log.read_text(errors="replace").strip().rpartition("\n")[2][-300:]
    raise NoAnswerError(f"{router} {how}; at last: {said}; its log ends: {end}")


def _measured(traffic: Traffic, seed: int, place: LivePlace, router: int) -> dict[str, Any]:
    """Send the traffic; return its row and the other figures of a `LiveRow`."""
    engines, requests = place.engines, traffic.requests(seed)
    engines.empty_caches()
    options = ReplayOptions(
        trace=Path(traffic.trace or "herd"), url=f"http://127.0.0.1:{place.port}", time_scale=traffic.time_scale,
        model=MODEL, show_progress=False, request_timeout_s=REQUEST_TIMEOUT_S,
    )  # fmt: skip
    before, cpu_s = engines.totals(), measure.cpu_times(measure.process_tree(router))[0]
    half_s = requests[-1].timestamp_s * traffic.time_scale / 2
    killed = next(iter(engines.urls)) if traffic.name == KILLED else None
    if traffic.by_aiperf:
        row = _sent_by_aiperf(requests, options, place.folder)
    else:
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
        # While aiperf starts, a router without requests takes processor time, too.
        "cpu_ms": None if traffic.by_aiperf else 1e3 * cpu_s / len(requests),
        # An engine sends an event for each token. Those of an engine that was killed are not known.
        "event_us": 1e6 * cpu_s / generated if generated and killed is None and not traffic.by_aiperf else None,
    }


async def _replayed(
    requests: Sequence[TraceRequest], options: ReplayOptions, engines: Engines, killed: str | None, half_s: float
) -> ResultRow:
    async with asyncio.TaskGroup() as group:
        if killed is not None:
            group.create_task(engines.away(killed, half_s))
        report = group.create_task(replay(requests, options))
    return report.result().row


def _sent_by_aiperf(requests: Sequence[TraceRequest], options: ReplayOptions, folder: Path) -> ResultRow:
    """Send the bodies of a replay by aiperf, at the same times."""
    trace, scale = folder / "trace.jsonl", options.time_scale
    trace.write_text("".join(trace_lines(requests, model=MODEL, time_scale=scale)))
    hub_cache = make_hub_cache(make_tiny_checkpoint(folder / "tiny"), folder / "hub")
    found = run_aiperf(
        aiperf_environment(), options.url, trace, folder / "aiperf", model=MODEL, tokenizer=HUB_NAME,
        hub_cache=hub_cache, timeout_s=READY_S, more=["--request-timeout-seconds", f"{options.request_timeout_s:g}"],
    )  # fmt: skip
    tally = Tally()
    for record in replay_records(found, requests, time_scale=scale):
        tally.add(record)
    return tally.row(options, planned=len(requests))


# -- the report


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Run every router that is there before every fleet that is there, and return a table for each group."""
    fleets = {name: fleet for name, fleet in FLEETS.items() if fleet.group in groups}
    missing = dict(_unavailable(fleets.values()))
    tasks = [task for name in fleets for task in _tasks(name, grid, missing)]
    runs = runner.runs(tasks, title=TITLE)
    missing |= {f"{name} before {task.fleet}": why for task, run in runs.items() for name, why in run.silent.items()}
    rows = [row for run in runs.values() for row in run.rows]
    tables = [
        TableSection(
            f"{TITLE}: {title}", HEADER, list(_lines([one for one in rows if FLEETS[one.fleet].group == group]))
        )
        for group, title in {fleet.group: fleet.title for fleet in fleets.values()}.items()
    ]
    if "live" in groups:
        missing |= {f"{name} before gorgo engine": why for name, why in NEVER.items()}
    lines = [f"SKIPPED {name}: {why}" for name, why in missing.items()]
    lines.append(f"{len(grid.seeds)} rounds, real processes in wall time; {measure.describe_machine()}.")
    as_json = [{**asdict(one), "row": one.row.as_json()} for one in rows]
    return SystemReport(sections=tables, end="\n\n".join(lines), rows=as_json)


def _tasks(name: str, grid: Grid, missing: Collection[str]) -> Iterator[LiveTask]:
    """Yield the runs of a fleet: one for each router where the engines start anew."""
    fleet = FLEETS[name]
    if fleet.title in missing:
        return
    kinds = [one.scaled(grid.scale) for one in fleet.traffics(grid.trace) if not (one.by_aiperf and AIPERF in missing)]
    there = [router for router in fleet.routers if router not in missing]
    for routers in [[router] for router in there] if fleet.anew else [there]:
        yield from (LiveTask(name, tuple(routers), tuple(kinds), seed) for seed in grid.seeds)


def _unavailable(fleets: Collection[LiveFleet]) -> Iterator[tuple[str, str]]:
    """Yield the engines, tools and routers that cannot be started here, and why; says so at once."""
    wanted: dict[str, Callable[[], object]] = {fleet.title: fleet.installed for fleet in fleets}
    if any(one.by_aiperf for fleet in fleets for one in fleet.traffics(None)):
        wanted[AIPERF] = aiperf_environment
    wanted |= {name: partial(_launched, name) for fleet in fleets for name in fleet.routers}
    for name, make in wanted.items():
        try:
            make()
        except (InstallError, UnavailableError) as why:
            _say(f"SKIPPED {name}: {why}")
            yield name, str(why)


def _launched(router: str) -> None:
    """Make what a router needs; raises `UnavailableError`."""
    with tempfile.TemporaryDirectory(prefix="gorgo-live-") as folder:
        engines = Engines(urls={f"engine-{number}": UNKNOWN_URL for number in range(ENGINES)})
        ROUTERS[router](LivePlace.before(engines, Path(folder)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _lines(rows: Iterable[LiveRow]) -> Iterator[tuple[str, ...]]:
    found = list(rows)
    traffics, routers = (dict.fromkeys(getattr(row, name) for row in found) for name in ("traffic", "router"))
    for traffic, router in product(traffics, routers):
        if some := [row for row in found if (row.traffic, row.router) == (traffic, router)]:
            yield traffic, router, *_cells(some)


def _cells(found: Sequence[LiveRow]) -> Iterator[str]:
    rows = [one.row for one in found]
    yield f"{sum(row.n for row in rows)}"
    yield f"{sum(row.errors for row in rows)}"
    for name, form in (("mean TTFT", ".0f"), ("p50 TTFT", ".0f"), ("p95 TTFT", ".0f"), ("p95 E2E", ".2f")):
        yield _mean([MEASURES[name](row) for row in rows], form)
    yield _mean([one.hit for one in found], ".1f", 100)
    yield _mean([one.share for one in found], ".0f", 100)
    yield _mean([one.cpu_ms for one in found], ".2f")
    yield _mean([one.event_us for one in found], ".0f")
    yield _mean([row.slip_ms_p95 or 0.0 for row in rows], ".1f")


def _mean(values: Sequence[float | None], form: str, factor: float = 1) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known) if known else None, form, factor)
