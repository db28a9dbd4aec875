"""`run_engine`: one simulated replica on a port, with its routes.

Owns wiring and lifetime, the routes that generate, and those that answer probes, metrics, information and
administration. Leaves the state to `gorgo.lab.engine_server.replica`, bodies of requests to
`gorgo.lab.engine_server.job` and the form of responses to `gorgo.lab.engine_server.apis`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from time import monotonic, time
from typing import Any, cast

from aiohttp import HttpVersion11, web

from gorgo.errors import BadRequest
from gorgo.lab.engine_server import shapes
from gorgo.lab.engine_server.apis import (
    ChatFormat,
    CompletionFormat,
    EmbeddingFormat,
    GenerateFormat,
    GenerateStream,
    MessagesFormat,
    ResponsesFormat,
)
from gorgo.lab.engine_server.cache_reports import TOPIC, CacheMirror, KvEventLog, PushReporter, PushTarget, publishing
from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, MESSAGES, RESPONSES, Job, read_job
from gorgo.lab.engine_server.replica import FaultKind, SimulatedReplica, read_fault
from gorgo.lab.engine_server.stats import SGLANG_VERSION, VLLM_VERSION
from gorgo.lab.engine_server.streams import EventStream, ResponseFormat, Served, Streamed, TokenStream, Whole, join
from gorgo.lab.sim.engine.kv_cache import KvObservers
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.network import JITTER

# The routes that generate: chat, completions, responses, messages, `/generate`, embeddings.


_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

#: Before the ids of answers, as in the API of each route.
_ID_PREFIX = {
    CHAT: "chatcmpl-",
    COMPLETIONS: "cmpl-",
    GENERATE: "",
    EMBEDDINGS: "embd-",
    RESPONSES: "resp_",
    MESSAGES: "msg_",
}


def add_routes(app: web.Application, replica: SimulatedReplica) -> None:
    """Put the generating routes onto `app`; vLLM has no `/generate`."""
    for route in _ID_PREFIX:
        if route == GENERATE and replica.is_vllm:
            continue
        app.router.add_post(route, _Generation(replica, route).handle)


class _Generation:
    """One generating route."""

    def __init__(self, replica: SimulatedReplica, route: str) -> None:
        self._replica = replica
        self._route = route

    async def handle(self, request: web.Request) -> web.StreamResponse:
        replica = self._replica
        raw = await request.read()
        received_s = monotonic()
        inbound_s = replica.inbound_s(request, len(raw))
        fault = replica.faults.next_kind(now=received_s)
        if fault is FaultKind.REFUSE:
            return _reset(request)
        if fault is FaultKind.ERROR:
            return await self._refuse(inbound_s, "injected fault", 500)
        try:
            job = read_job(self._route, raw, replica.text_of)
            job = replace(job, adapter=replica.adapter_of(job.body))
            rid = replica.new_id(job.rid, _ID_PREFIX[self._route])
            answers = self._serve(job, rid, request)
            for served in answers:
                replica.engine.profile.check_size(served.prompt_tokens, served.output_tokens)
        except BadRequest as error:
            return await self._refuse(inbound_s, str(error), 400)
        lead = join(answers)
        _afflict(lead, fault)
        for served in answers[:: job.samples]:
            replica.admit(served, received_s + inbound_s)
        try:
            return await _respond(lead, request)
        finally:
            for served in answers:
                replica.leave(served)

    def _serve(self, job: Job, rid: str, request: web.Request) -> list[Served]:
        """Return an answer per prompt and sample; the ids of all but the first are the engine's alone."""
        replica = self._replica
        form = self._format()
        made: type[Served] = Whole
        if job.stream:
            is_plain = job.route in (CHAT, COMPLETIONS) and job.output.json is None
            made = GenerateStream if job.route == GENERATE else TokenStream if is_plain else EventStream
        head = {"id": rid, "created": int(time()), "model": replica.model_name}
        return [
            made(
                job,
                index,
                rid=f"{rid}/{index}" if index else rid,
                head=head,
                form=form,
                tape=replica.tape,
                send=replica.deliveries.send,
                transport=cast(asyncio.Transport, request.transport),
                chunked=request.version >= HttpVersion11,
            )
            for index in range(len(job.prompts) * job.samples)
        ]

    def _format(self) -> ResponseFormat:
        if self._route == RESPONSES:
            return ResponsesFormat(self._replica.remember)
        return _FORMATS[self._route]

    async def _refuse(self, inbound_s: float, message: str, status: int) -> web.Response:
        await self._replica.travel(inbound_s + self._replica.path.one_way_s())
        return web.json_response(_error(self._route, message, status), status=status)


_FORMATS: dict[str, ResponseFormat] = {
    CHAT: ChatFormat(),
    COMPLETIONS: CompletionFormat(),
    GENERATE: GenerateFormat(),
    EMBEDDINGS: EmbeddingFormat(),
    MESSAGES: MessagesFormat(),
}


def _error(route: str, message: str, status: int) -> dict[str, object]:
    if route == GENERATE:
        return shapes.generate_error(message)
    if route == RESPONSES:
        return shapes.responses_error(message, status)
    return shapes.messages_error(message, status) if route == MESSAGES else shapes.error(message, status)


async def _respond(served: Served, request: web.Request) -> web.StreamResponse:
    if not isinstance(served, Streamed):
        await served.done
        assert isinstance(served, Whole), "what is not streamed comes whole"
        return web.Response(body=served.body, content_type="application/json")
    await served.started
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    await response.prepare(request)
    served.open()
    await served.done
    with suppress(ConnectionError):  # the client left at its last token
        await response.write_eof()
    return response


def _afflict(served: Served, fault: FaultKind) -> None:
    """Let a fault that concerns one response happen to it."""
    half = max(1, served.output_tokens // 2)
    if fault is FaultKind.HANG_BEFORE_FIRST_TOKEN:
        served.last_arrival_s = float("inf")
    elif fault is FaultKind.HANG_MID_STREAM:
        served.hangs_at = half
    elif fault is FaultKind.RESET_MID_STREAM:
        served.resets_at = half


def _reset(request: web.Request) -> web.Response:
    """Close the connection without an answer; the returned response is not sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


# The routes that do not generate. Each takes the round trip of its region.


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The real engine answers `/health` by generating a token, and first checks for it after this time.
_HEALTH_S = 1.0


def add_information_routes(app: web.Application, replica: SimulatedReplica) -> None:
    """Put the informing and administrating routes onto `app`."""
    information = _Information(replica)
    app.router.add_get("/v1/models", _far(replica, information.models))
    app.router.add_get("/metrics", _far(replica, information.metrics))
    app.router.add_post("/sim/faults", information.inject)
    (_add_vllm_routes if replica.is_vllm else _add_sglang_routes)(app, replica, information)


def _add_sglang_routes(app: web.Application, replica: SimulatedReplica, information: _Information) -> None:
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, _far(replica, information.health))
    for path in ("/ready", "/ping"):
        app.router.add_get(path, _far(replica, information.alive))
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, _far(replica, information.model_info))
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, _far(replica, information.server_info))
    app.router.add_get("/v1/loads", _far(replica, information.loads))
    app.router.add_get("/flush_cache", _far(replica, information.flush_cache))
    app.router.add_post("/flush_cache", _far(replica, information.flush_cache))


def _add_vllm_routes(app: web.Application, replica: SimulatedReplica, information: _Information) -> None:
    for path in ("/health", "/ping"):
        app.router.add_get(path, _far(replica, information.alive))
    app.router.add_get("/version", _far(replica, information.version))
    app.router.add_get("/kv_event_sources", _far(replica, information.kv_event_sources))
    app.router.add_post("/reset_prefix_cache", _far(replica, information.flush_cache))


def _far(replica: SimulatedReplica, handler: Handler) -> Handler:
    """The same route at the end of the replica's path."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if replica.faults.refuses_all(now=monotonic()) and request.transport is not None:
            request.transport.abort()
        await replica.travel(replica.inbound_s(request))
        response = await handler(request)
        await replica.travel(replica.path.one_way_s())
        return response

    return answer


class _Information:
    """The answers."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica = replica
        self._started_s = int(time())

    async def health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(_HEALTH_S)
        return web.Response()

    async def alive(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        replica = self._replica
        base = replica.model_name
        owner = "vllm" if replica.is_vllm else "sglang"
        card = {"object": "model", "created": self._started_s, "owned_by": owner}
        size = replica.engine.profile.context_tokens
        cards = [card | {"id": base, "root": base, "parent": None, "max_model_len": size}]
        cards += [
            card | {"id": name, "root": f"/loras/{name}", "parent": base, "max_model_len": None}
            for name in self._replica.adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VLLM_VERSION})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        events = self._replica.kv_events
        if events is None:
            return web.json_response({})
        source = {"endpoint": events.endpoint, "replay_endpoint": events.replay, "topic": TOPIC}
        return web.json_response({"0": {"enable_kv_cache_events": True, "publisher": "zmq", **source}})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._model_info())

    async def server_info(self, _: web.Request) -> web.Response:
        replica = self._replica
        profile, load = replica.engine.profile, replica.stats.load(time())
        info = {
            **self._model_info(),
            "version": SGLANG_VERSION,
            "status": "ready",
            "simulated": True,
            "profile": profile.name,
            "schedule_policy": "fcfs",
            "chunked_prefill_size": profile.chunk_tokens,
            "context_length": profile.context_tokens,
            "max_running_requests": profile.max_running_requests,
            "max_total_num_tokens": profile.kv_tokens,
            "page_size": 1,
            "enable_cache_report": True,
            "enable_metrics": True,
            "internal_states": [{"last_gen_throughput": load["gen_throughput"], "load": load["num_running_reqs"]}],
            "step_lag_s": replica.steps.lag_s,
        }
        if replica.kv_events is not None:
            port, replay_port = replica.kv_events.ports
            info["page_size"] = replica.engine.cache.event_tokens
            info["kv_events"] = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": port,
                "replay_endpoint_port_base": replay_port,
                "topic": TOPIC,
                "block_size": replica.engine.cache.event_tokens,
                "dp_size": 1,
            }
        return web.json_response(info)

    async def loads(self, _: web.Request) -> web.Response:
        now = time()
        profile = self._replica.engine.profile
        answer = {
            "timestamp": now,
            "version": SGLANG_VERSION,
            "accelerator": profile.name,
            "num_accelerators": 1,
            "loads": [self._replica.stats.load(now)],
        }
        return web.json_response(answer)

    async def metrics(self, _: web.Request) -> web.Response:
        text = self._replica.stats.exposition(time())
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def flush_cache(self, _: web.Request) -> web.Response:
        flushed = self._replica.engine.flush()
        text = "Cache flushed." if flushed else "Cache not flushed: requests are waiting or running."
        return web.Response(text=text + "\n", status=200 if flushed else 400)

    async def inject(self, request: web.Request) -> web.Response:
        """Not of SGLang: `POST /sim/faults`, which is not far away and never refused."""
        try:
            fault = read_fault(await request.json())
        except (BadRequest, ValueError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        self._replica.inject(fault)
        return web.json_response({"kind": fault.kind.value, "count": fault.count, "seconds": fault.seconds})

    def _model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._replica.model_name,
            "served_model_name": self._replica.model_name,
            "tokenizer_path": self._replica.model_name,
            "is_generation": True,
            "weight_version": "default",
            "preferred_sampling_params": None,
        }


#: SGLang runs under uvicorn, which closes a connection idle for so long.
KEEP_ALIVE_S = 5.0

#: Longest request body: far above 32,768 tokens of text, and a bound all the same.
_MAX_BODY_BYTES = 64 * 1024 * 1024


async def run_engine(
    *,
    name: str,
    profile: EngineProfile,
    rtt_ms: float,
    seed: int,
    host: str,
    port: int,
    ready: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    model: str = "gorgo-sim",
    adapters: Sequence[str] = (),
    keep_alive_s: float = KEEP_ALIVE_S,
    jitter: float = JITTER,
    push: PushTarget | None = None,
    kv_events: str | None = None,
    notify: Callable[[str], None] = print,
) -> None:
    """Serve a simulated replica until `stop` is set, or for ever.

    Parameters
    ----------
    name:
        Of the replica; enters the seed, so that replicas of one fleet do not jitter alike.
    profile:
        The simulated engine.
    model, adapters:
        Names that `/v1/models` lists: the base model, and LoRA adapters of it.
    rtt_ms, jitter:
        Distance to the client: mean round trip, and the mean of the exponential added to each one-way trip, as a share
        of it.
    push:
        Where the engine pushes what it caches; nowhere by default.
    kv_events:
        Address of ZeroMQ at which the engine publishes what it caches; nowhere by default.
    notify:
        Called with what happens to pushes.
    ready:
        Called with the bound address once connections are accepted.
    """
    replica = SimulatedReplica(
        name=name, model_name=model, profile=profile, rtt_s=rtt_ms / 1e3, jitter=jitter, seed=seed, adapters=adapters
    )
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    add_routes(app, replica)
    add_information_routes(app, replica)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=keep_alive_s, shutdown_timeout=1.0
    )
    await runner.setup()
    reporting = None
    publisher = AsyncExitStack()
    cache = replica.engine.cache
    mirror = CacheMirror(block_tokens=cache.event_tokens)
    events = KvEventLog(block_tokens=cache.event_tokens, vllm=replica.is_vllm)
    observers = [each for each, wanted in ((mirror, push), (events, kv_events)) if wanted is not None]
    if observers:
        cache.report_to(KvObservers(observers))
    if push is not None:
        reporting = asyncio.create_task(PushReporter(push, mirror, notify=notify).run())
    try:
        if kv_events is not None:
            replica.kv_events = await publisher.enter_async_context(
                publishing(kv_events, events, vllm=replica.is_vllm, travel_s=replica.path.one_way_s)
            )
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        if ready is not None:
            bound = runner.addresses[0]
            ready(bound[0], bound[1])
        await (stop or asyncio.Event()).wait()
    finally:
        if reporting is not None:
            reporting.cancel()
            await asyncio.wait((reporting,))
        await publisher.aclose()
        replica.close()
        await runner.cleanup()
