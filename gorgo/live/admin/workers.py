"""The admin listener of a router of several workers: one answer of all of them.

Owns what becomes of a call (`WorkersApp`). The leader serves the listener; each worker has the whole admin app, which
answers calls that the leader passes on.

Theory of operation. A change is a call that every worker executes, in one order. Before it the leader asks whether all
of them can be reached; if one cannot, nothing changes. Then the leader executes it, alone writes the state file, and
passes it on. All of them start from one state and execute the same calls, so all of them come to the same state. A
worker that does not is started again, from the state of the leader. A worker that joins gets that state between two
calls. Reading calls are answered by the leader, or by all where each has a part of the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST

from gorgo.live.admin.routes import DEFAULT_ROWS
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error
from gorgo.live.logs import log
from gorgo.live.state import LiveState
from gorgo.live.workers.link import WorkerLink

App = Callable[[Message, Receive, Send], Any]

#: For a worker to say that it can be reached, s; one that cannot within it is stopped or blocked.
REACHED_S = 1.0
#: For a worker to execute a change: a new replica is probed for five seconds.
APPLIED_S = 10.0
_RELOAD = "/admin/reload"


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call as it is passed on."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""

    def as_scope(self) -> Message:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {},
        }


@dataclass(slots=True)
class WorkerAnswer:
    """The answer of one worker."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    async def take_message(self, message: Message) -> None:
        """Take the answer of an app."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    async def send_to(self, send: Send, body: bytes | None = None, content_type: bytes | None = None) -> None:
        """Send the answer to the client, with another body if one is given."""
        headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        if content_type is not None:
            headers = [pair for pair in headers if pair[0] != b"content-type"] + [(b"content-type", content_type)]
        body = self.body if body is None else body
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class WorkersApp:
    """The admin app of one worker among several.

    Parameters
    ----------
    app:
        The worker's own.
    state, link:
        Of the process.
    """

    def __init__(self, app: App, state: LiveState, link: WorkerLink) -> None:
        self._app = app
        self._state = state
        self._link = link
        #: Held by one change at a time, here and at the workers that execute it.
        self.turn = asyncio.Lock()
        link.on_question("change", self._change)
        link.on_question("push", self._execute)
        link.on_question("read", self._execute)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path, method = scope.get("path", ""), scope.get("method", "")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif method not in ("GET", "HEAD") and path.startswith("/internal/"):
            await self._pass_on(scope, receive, send, "push")
        elif method not in ("GET", "HEAD") and path.startswith("/admin/"):
            async with self.turn:
                await self._pass_on(scope, receive, send, "change")
        elif method == "GET" and path == "/metrics":
            await self._metrics(scope, receive, send)
        elif method == "GET" and path.startswith("/admin/decisions"):
            await self._decisions(scope, receive, send)
        elif method == "GET" and path == "/admin/check":
            await self._check(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # -- changes

    async def _pass_on(self, scope: Message, receive: Receive, send: Send, topic: str) -> None:
        """Execute a change here, then at all others; not at all if one of them cannot be reached."""
        link = self._link
        if link.paused:
            message = "a new version of this router takes over: nothing changed; try again"
            await send_error(send, HttpError(503, "restarting", message, headers=((b"retry-after", b"1"),)))
            return
        reached = await link.question_all("reached", limit_s=REACHED_S, workers=link.others)
        silent = [worker for worker in link.others if worker not in reached]
        if silent:
            names = ", ".join(map(str, silent))
            message = f"worker {names} cannot be reached: nothing changed; try again"
            await send_error(send, HttpError(503, "worker_unreachable", message, headers=((b"retry-after", b"1"),)))
            return
        body = bytearray()

        async def recorded() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
            return message

        answer = WorkerAnswer()
        await self._app(scope, recorded, answer.take_message)
        # What a reload has read is passed on by itself, in its order.
        if answer.status < 300 and scope["path"] != _RELOAD:
            headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
            call = WorkerCall(scope["method"], scope["path"], scope["query_string"], headers, bytes(body))
            answers = await link.question_all(topic, call, limit_s=APPLIED_S, workers=link.others)
            restart_differing(link, {worker: reply[0] for worker, reply in answers.items()}, answer.status)
        await answer.send_to(send)

    async def _change(self, call: WorkerCall) -> tuple[int, bytes]:
        async with self.turn:
            return await self._execute(call)

    async def _execute(self, call: WorkerCall) -> tuple[int, bytes]:
        """Return status and body of the own app's answer."""
        answer, sent = WorkerAnswer(), False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        await self._app(call.as_scope(), receive, answer.take_message)
        return answer.status, answer.body

    # -- reading calls

    async def _own(self, scope: Message, receive: Receive) -> tuple[WorkerAnswer, Mapping[int, tuple[int, bytes]]]:
        """Return the own answer, and if it may be read those of the others."""
        answer = WorkerAnswer()
        await self._app(scope, receive, answer.take_message)
        if answer.status in (401, 403, 405):
            return answer, {}
        call = WorkerCall(scope["method"], scope["path"], scope["query_string"], tuple(scope["headers"]))
        return answer, await self._link.question_all("read", call)

    async def _metrics(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = WorkerAnswer()
        await self._app(scope, receive, answer.take_message)
        if answer.status != 200:
            await answer.send_to(send)
            return
        await answer.send_to(send, await self._state.exposition(), CONTENT_TYPE_LATEST.encode())

    async def _decisions(self, scope: Message, receive: Receive, send: Send) -> None:
        """WorkerAnswer with the decisions of all: of one request those of the worker that served it."""
        answer, others = await self._own(scope, receive)
        well = [json.loads(body) for status, body in others.values() if status == 200]
        if scope["path"] != "/admin/decisions":
            if answer.status == 404 and well:
                answer.status = 200
                await answer.send_to(send, json.dumps(well[0]).encode())
                return
            await answer.send_to(send)
            return
        if answer.status != 200:
            await answer.send_to(send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        rows = merged_decisions(
            [json.loads(answer.body), *well],
            limit=int(query.get("limit", [str(DEFAULT_ROWS)])[0]),
            slowest=query.get("order") == ["slowest"],
        )
        await answer.send_to(send, json.dumps(rows).encode())

    async def _check(self, scope: Message, receive: Receive, send: Send) -> None:
        answer, others = await self._own(scope, receive)
        if answer.status == 200:
            checks = [json.loads(body) for status, body in others.values() if status == 200]
            await answer.send_to(send, json.dumps(merged_checks([json.loads(answer.body), *checks])).encode())
            return
        await answer.send_to(send)


def restart_differing(link: WorkerLink, statuses: Mapping[int, int], wanted: int) -> None:
    """Start workers again that have not executed a change as the leader has: nothing else makes them agree."""
    for worker in link.others:
        status = statuses.get(worker)
        if status is None or (status < 300) != (wanted < 300):
            log("worker_differs", level=logging.ERROR, worker=worker, status=status, expected=wanted)
            link.restart(worker)


def merged_decisions(answers: Iterable[Mapping[str, Any]], *, limit: int, slowest: bool) -> dict[str, Any]:
    """Return the rows of all workers in the order of one.

    >>> rows = [{"decided_s": 1.0}], [{"decided_s": 2.0}]
    >>> merged_decisions([{"now_s": 3.0, "decisions": each} for each in rows], limit=1, slowest=False)
    {'now_s': 3.0, 'decisions': [{'decided_s': 2.0}]}
    """
    parts = list(answers)
    rows = [decision for answer in parts for decision in answer["decisions"]]
    rows.sort(key=lambda decision: (decision["ttft_ms"] or 0.0) if slowest else decision["decided_s"], reverse=True)
    return {"now_s": max(answer["now_s"] for answer in parts), "decisions": list(islice(rows, limit))}


def merged_checks(checks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts of all workers in sum, and the first violation.

    >>> merged_checks([{"violation": None, "in_flight": 1}, {"violation": "x", "in_flight": 2}])
    {'violation': 'x', 'in_flight': 3}
    """
    merged: dict[str, Any] = {}
    for check in checks:
        for key, value in check.items():
            before = merged.get(key)
            if isinstance(value, Mapping):
                merged[key] = merged_checks([each for each in (before, value) if each is not None])
            elif isinstance(value, int) and before is not None:
                merged[key] = before + value
            elif before is None:
                merged[key] = value
    return merged
