"""The routes that generate: chat, completions, `/generate`, embeddings.

Owns a request's way from body to response. Everything between is `replica`, `streams` and the engine model.
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import cast

from aiohttp import HttpVersion11, web

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.faults import FaultKind
from gorgo.apps.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, Job, read_job
from gorgo.apps.engine_server.replica import SimulatedReplica
from gorgo.apps.engine_server.streams import GenerateStream, Served, Streamed, TokenStream, Whole
from gorgo.apps.engine_server.text import token_count
from gorgo.errors import BadRequest

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

#: Before the ids of answers, as OpenAI's API has it.
_ID_PREFIX = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", GENERATE: "", EMBEDDINGS: "embd-"}


def add_routes(app: web.Application, replica: SimulatedReplica) -> None:
    """Put the generating routes onto `app`."""
    for route in (CHAT, COMPLETIONS, GENERATE, EMBEDDINGS):
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
            job = read_job(self._route, raw)
            rid = replica.new_id(job.rid, _ID_PREFIX[self._route])
            replica.engine.profile.check_size(token_count(job.text), job.output_tokens)
        except BadRequest as error:
            return await self._refuse(inbound_s, str(error), 400)
        served = self._serve(job, rid, request)
        _afflict(served, fault)
        replica.admit(served, received_s + inbound_s)
        try:
            return await _respond(served, request)
        finally:
            replica.leave(served)

    def _serve(self, job: Job, rid: str, request: web.Request) -> Served:
        replica = self._replica
        made = Whole if not job.stream else GenerateStream if job.route == GENERATE else TokenStream
        return made(
            job,
            rid=rid,
            model_name=replica.model_name,
            created=int(time()),
            tape=replica.tape,
            send=replica.deliveries.send,
            transport=cast(asyncio.Transport, request.transport),
            chunked=request.version >= HttpVersion11,
        )

    async def _refuse(self, inbound_s: float, message: str, status: int) -> web.Response:
        await self._replica.travel(inbound_s + self._replica.path.one_way_s())
        generating = self._route == GENERATE
        body = shapes.generate_error(message) if generating else shapes.error(message, status)
        return web.json_response(body, status=status)


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
