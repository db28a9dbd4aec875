"""The routes that generate: chat, completions, responses, messages, `/generate`, embeddings.

Owns a request's way from body to response. Everything between is `replica`, `streams`, `apis` and the engine model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic, time
from typing import cast

from aiohttp import HttpVersion11, web

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.apis.chat import ChatFormat, CompletionFormat
from gorgo.apps.engine_server.apis.messages import MessagesFormat
from gorgo.apps.engine_server.apis.responses import ResponsesFormat
from gorgo.apps.engine_server.apis.sglang import EmbeddingFormat, GenerateFormat, GenerateStream
from gorgo.apps.engine_server.faults import FaultKind
from gorgo.apps.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, MESSAGES, RESPONSES, Job, read_job
from gorgo.apps.engine_server.replica import SimulatedReplica
from gorgo.apps.engine_server.streams import EventStream, ResponseFormat, Served, Streamed, TokenStream, Whole, join
from gorgo.errors import BadRequest

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
