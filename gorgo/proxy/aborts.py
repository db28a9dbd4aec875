"""Telling an engine that nobody waits for a request any more, by the id that the proxy gave it.

Owns the calls. That the connection is closed as well, which most engines take for the same, is the exchange's.

Only ids of the proxy's own making are told: SGLang ends every request whose id begins with the one it is told, so a
client that could choose it would end those of others.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import partial

from gorgo.proxy.headers import new_id, upstream_headers
from gorgo.proxy.target import Target
from gorgo.proxy.upstream import UpstreamError

#: So many at once are a fleet that is cut off or a wave of clients that left; the closed connections have to do then.
MAX_OPEN = 256
#: Later than this the request has ended by itself, or never will.
TIMEOUT_S = 5.0

_JSON = (b"content-type", b"application/json")


class Aborts:
    """Calls that are under way."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def tell(self, target: Target, request_id: str) -> None:
        """End it there. Waits for nothing; a call that fails changes nothing."""
        if target.dialect.abort_path is None or len(self._open) >= MAX_OPEN:
            return
        # In this step, not in the task's first: a replica that has left is closed when nobody uses it.
        target.acquire()
        task = asyncio.create_task(_tell(target, target.dialect.abort_path, request_id))
        self._open.add(task)
        task.add_done_callback(partial(self._told, target))

    def _told(self, target: Target, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        target.release()

    async def aclose(self) -> None:
        """No more of them."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _tell(target: Target, path: str, request_id: str) -> None:
    headers = upstream_headers((_JSON,), request_id=new_id(), api_key=target.api_key)
    body = json.dumps({"rid": request_id}).encode()
    with suppress(UpstreamError):  # It is gone, and its requests with it.
        await target.upstream.fetch(path, headers, timeout_s=TIMEOUT_S, body=body)
