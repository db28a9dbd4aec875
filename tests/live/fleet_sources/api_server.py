"""An API server of Kubernetes on a real socket: lists in pages, watches with history, 410, tokens, faults."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PODS = "/api/v1/namespaces/llm/pods"
NODES = "/api/v1/nodes"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"


@dataclass
class ApiServer:
    """Collections by path. A change is an event of every open watch of its path."""

    objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    #: Events as (version, path, kind, object).
    history: list[tuple[int, str, str, dict[str, Any]]] = field(default_factory=list)
    version: int = 100
    #: Versions below are not stored any longer.
    oldest: int = 0
    #: Tokens that are accepted; `None` accepts any request.
    tokens: set[str] | None = None
    #: Status of every answer while set.
    broken: int | None = None
    #: Body of the next list in place of the right one.
    wrong_body: bytes | None = None
    #: Bytes per write of a watch, with a turn of the event loop between two.
    dribble: int | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    watches: dict[asyncio.Event, str] = field(default_factory=dict)
    port: int = 0
    secure: bool = False
    _transports: set[asyncio.Transport] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://127.0.0.1:{self.port}"

    # -- what a test changes

    def put(self, path: str, *documents: dict[str, Any]) -> None:
        for document in documents:
            known = self.objects.setdefault(path, {})
            name = document["metadata"]["name"]
            self._record(path, "MODIFIED" if name in known else "ADDED", document)
            known[name] = document

    def delete(self, path: str, name: str) -> None:
        self._record(path, "DELETED", self.objects[path].pop(name))

    def bookmark(self, path: str) -> None:
        self._record(path, "BOOKMARK", {"kind": "Any", "metadata": {}})

    def forget(self) -> None:
        """Compact the history: a watch from any version before now is 410."""
        self.oldest = self.version + 1
        self.version += 1
        self.history.clear()

    def cut(self) -> int:
        """Break the connections of all watches; return how many."""
        transports, self._transports = self._transports, set()
        for transport in transports:
            transport.abort()
        return len(transports)

    def _record(self, path: str, kind: str, document: dict[str, Any]) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, path, kind, json.loads(json.dumps(document))))
        for changed, followed in self.watches.items():
            if followed == path:
                changed.set()

    def lists(self, path: str) -> int:
        return sum(found == path and "watch" not in params for found, params in self.requests)

    # -- what it answers

    async def handle(self, request: web.Request) -> web.StreamResponse:
        params = dict(request.query)
        self.requests.append((request.path, params))
        authorization = request.headers.get("authorization")
        self.authorizations.append(authorization)
        if self.broken is not None:
            return _status(self.broken, "the test broke it")
        if self.tokens is not None and (authorization or "").removeprefix("Bearer ") not in self.tokens:
            return _status(401, "Unauthorized")
        return await (self._watch(request, params) if "watch" in params else self._list(request.path, params))

    async def _list(self, path: str, params: dict[str, str]) -> web.StreamResponse:
        if self.wrong_body is not None:
            body, self.wrong_body = self.wrong_body, None
            return web.Response(body=body, content_type="application/json")
        names = sorted(name for name, found in self.objects.get(path, {}).items() if _selected(found, params))
        first, limit = int(params.get("continue") or 0), int(params["limit"])
        rest = str(first + limit) if first + limit < len(names) else ""
        items = [self.objects[path][name] for name in names[first : first + limit]]
        metadata = {"resourceVersion": str(self.version), "continue": rest}
        return web.json_response({"kind": "List", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        version = int(params["resourceVersion"])
        if version < self.oldest:
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        changed = asyncio.Event()
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._transports.add(transport)
        self.watches[changed] = request.path
        try:
            async with asyncio.timeout(int(params["timeoutSeconds"])):
                while True:
                    for at, path, kind, document in list(self.history):
                        if (
                            at > version
                            and path == request.path
                            and (kind == "BOOKMARK" or _selected(document, params))
                        ):
                            await self._send(response, json.dumps({"type": kind, "object": document}).encode() + b"\n")
                            version = at
                    if self.oldest > version:
                        expired = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                        await self._send(response, json.dumps({"type": "ERROR", "object": expired}).encode() + b"\n")
                        return response
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return response
        finally:
            del self.watches[changed]
            self._transports.discard(transport)

    async def _send(self, response: web.StreamResponse, line: bytes) -> None:
        step = self.dribble or len(line)
        for start in range(0, len(line), step):
            await response.write(line[start : start + step])
            await asyncio.sleep(0)


def _selected(document: dict[str, Any], params: dict[str, str]) -> bool:
    metadata = document["metadata"]
    labels = metadata.get("labels", {})
    for term in filter(None, params.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if labels.get(key) != value:
            return False
    named = params.get("fieldSelector", "").removeprefix("metadata.name=")
    return not named or metadata["name"] == named


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def api_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[ApiServer]:
    server = ApiServer(secure=tls is not None)
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        server.cut()
        await runner.cleanup()
