"""The routes by which engines push what they cache: evictions each 100 ms, and the whole cache each few seconds.

Each replica has a token of its own, so that an engine can speak for its replica alone. No push token is good for an
admin route, and the admin token for no push.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import ceil

from starlette.requests import Request
from starlette.responses import Response

from gorgo.errors import closest
from gorgo.live.admin.bodies import json_response, read_body
from gorgo.live.admin.token_check import CHALLENGE, TokenCheck, bearer
from gorgo.live.cache_push.reports import HASH_BYTES, MAX_PACKED_BYTES, PACKED, from_json, from_query, unpacked
from gorgo.live.cache_push.source import HASHES_PER_S, LEAST_HASHES, CachePush, PushSource
from gorgo.live.http.errors import HttpError
from gorgo.live.state import Replicas, Routing

#: Packed bodies that are being read, in sum: eight of the largest.
MAX_READ_BYTES = 8 * MAX_PACKED_BYTES

_Apply = Callable[[PushSource, CachePush], Awaitable[None]]


class PushRoutes:
    """The handlers of one running proxy.

    Parameters
    ----------
    wrong:
        Delays and counts wrong tokens.
    """

    def __init__(self, routing: Routing, replicas: Replicas, wrong: TokenCheck) -> None:
        self._routing = routing
        self._replicas = replicas
        self._wrong = wrong
        self._reading = 0

    async def sync(self, request: Request) -> Response:
        return await self._answer(request, self._replicas.pushes.sync)

    async def eviction(self, request: Request) -> Response:
        return await self._answer(request, self._replicas.pushes.evict)

    async def _answer(self, request: Request, apply: _Apply) -> Response:
        allowed = await self._replicas_of(request)
        packed = request.headers.get("content-type", "").partition(";")[0].strip().lower() == PACKED
        if packed:
            push = from_query(request.query_params.multi_items())
            source, size = self._source(push, allowed), _announced(request)
            self._admit(source, size // HASH_BYTES)
            push = replace(push, hashes=unpacked(await self._read(request, size)))
        else:
            push = from_json(await read_body(request))
            source = self._source(push, allowed)
            self._admit(source, len(push.hashes))
        await apply(source, replace(push, model=self._routing.models.canonical(push.model)))
        return json_response({"worker_id": push.replica, "sync_needed": source.needs_snapshot})

    async def _replicas_of(self, request: Request) -> frozenset[str]:
        """Return the replicas that the token speaks for. Raises `HttpError` (401)."""
        tokens = {name: target.secrets.push_token for name, target in self._replicas.targets.items()}
        if not any(tokens.values()):
            message = "pushes are off: no replica has a push_token_env"
            raise HttpError(401, "push_off", message, headers=CHALLENGE)
        given = bearer(request.headers)
        if given is not None:
            # Every token is compared, so that the time shows none of them.
            right = [name for name, token in tokens.items() if token and hmac.compare_digest(given, token.encode())]
            if right:
                return frozenset(right)
            await self._wrong.refuse()
        message = "expected Authorization: Bearer and the token in the replica's push_token_env"
        raise HttpError(401, "unauthorized", message, headers=CHALLENGE)

    def _source(self, push: CachePush, allowed: frozenset[str]) -> PushSource:
        """Return what the replica of a push has pushed. Raises `HttpError` for another one than the token's."""
        targets = self._replicas.targets
        if push.replica not in targets:
            hint = closest(push.replica, allowed)
            message = f"worker_id: no replica is named {push.replica[:60]!r}{hint}"
            raise HttpError(404, "replica_not_found", message)
        if push.replica not in allowed:
            raise HttpError(403, "other_replica", "worker_id: the token is that of another replica")
        listed = self._routing.models.listed(push.replica)
        if push.model is not None and listed and self._routing.models.canonical(push.model) not in listed:
            raise HttpError(404, "model_not_found", f"model: the replica serves {', '.join(listed)}")
        return targets[push.replica].pushes

    def _admit(self, source: PushSource, hashes: int) -> None:
        """Charge a push. Raises `HttpError` (429) for one beyond the rate."""
        wait_s = source.charge(hashes, now=self._routing.clock())
        if wait_s:
            bound = f"at most {HASHES_PER_S} hashes per second, where a push counts as {LEAST_HASHES} at least"
            headers = ((b"retry-after", b"%d" % ceil(wait_s)),)
            raise HttpError(429, "push_rate", f"the replica pushes too much: {bound}", headers=headers)

    async def _read(self, request: Request, size: int) -> bytearray:
        """Return a packed body. Raises `HttpError` (503) while too many bytes are being read."""
        if self._reading + size > MAX_READ_BYTES:
            message = "the proxy reads as many pushes as it may"
            raise HttpError(503, "buffers_full", message, headers=((b"retry-after", b"1"),))
        self._reading += size
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
            return body
        finally:
            self._reading -= size


def _announced(request: Request) -> int:
    """Return the length of a packed body: memory and rate are bounded before it is read. Raises `HttpError`."""
    announced = request.headers.get("content-length", "")
    if not (announced.isascii() and announced.isdigit()):
        raise HttpError(411, "length_required", f"expected a content-length for a body of {PACKED}")
    size = int(announced[:19])
    if size > MAX_PACKED_BYTES:
        raise HttpError(413, "request_too_large", f"the body is larger than {MAX_PACKED_BYTES} bytes")
    return size
