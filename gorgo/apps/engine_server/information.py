"""The routes that do not generate: probes, metrics, information and administration.

Owns their answers. Each takes the round trip of its region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic, time
from typing import Any

from aiohttp import web

from gorgo.apps.engine_server.faults import read_fault
from gorgo.apps.engine_server.kv_events import TOPIC
from gorgo.apps.engine_server.replica import SimulatedReplica
from gorgo.apps.engine_server.stats import SGLANG_VERSION
from gorgo.apps.engine_server.vllm_stats import VLLM_VERSION
from gorgo.errors import BadRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The real engine answers `/health` by generating a token, and first checks for it after this time.
_HEALTH_S = 1.0


def add_routes(app: web.Application, replica: SimulatedReplica) -> None:
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
