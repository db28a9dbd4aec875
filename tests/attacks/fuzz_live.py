"""Fuzzed items over sockets: a whole proxy between a client that sends anything and engines that answer anything.

Owns one event loop whose callbacks are timed by the processor. An item fails if the proxy has an internal error, logs
one, does not end the exchange, or holds the loop for longer than the limit. After each batch no exchange, reservation
or buffered byte is left; after the last the proxy stops, and no task is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, Literal
from unittest.mock import patch

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, RegionConfig
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from tests.proxy.conftest import QUIET, Running, proxy_for, until
from tests.proxy.fakes import chat

#: Items at a time: most of their time is a wait for a timeout.
BATCH = 64
#: Of the proxy, s: an incomplete request or answer ends soon.
_TIMEOUT_S = 0.1
#: Until the first bytes of a response, s; and until the client leaves a connection that stays open, s.
_END_S, _SILENT_S = 20.0, 0.3
_METRICS_ROUTES = ("/metrics", "/v1/loads?include=core")
_FIRST = b"GET /health HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n"
_GOOD = b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'


@dataclass(frozen=True, slots=True)
class LiveItem:
    """Bytes of a client, of an engine's answer, or of the metrics of the engine `name`."""

    kind: Literal["request", "answer", "metrics"]
    name: str
    data: bytes


@dataclass(slots=True)
class LiveFound:
    """What came of the items; `longest_ms` is the longest callback of the loop."""

    items: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    longest_ms: float = 0.0
    longest: str = ""
    errors: list[str] = field(default_factory=list)
    tasks_left: int = 0


class _Engine:
    """Engines of all kinds at one address: POSTs are answered by their request id, metrics by the one text."""

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes] = {}
        self.metrics = b""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        assert self._server is not None, "opened before"
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await until(lambda: not self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields.get(b"content-length", 0)))
                odd = self.answers.get(fields.get(b"x-request-id", b""))
                if not head.startswith(b"POST "):
                    known = head.split(b" ")[1].decode("latin-1") in _METRICS_ROUTES
                    writer.write(_answer(self.metrics, 200 if known else 404))
                elif odd is None:
                    writer.write(_answer(_GOOD))
                else:
                    writer.write(odd)
                    writer.close()
                await writer.drain()
        writer.close()
        self._writers.discard(writer)


class LiveProxy:
    """The proxy and its engines; `run` sends items through them."""

    def __init__(self, running: Running, engine: _Engine, found: LiveFound) -> None:
        self._running, self._engine, self.found = running, engine, found
        self._monitors = {
            name: ReplicaMonitor(running.state, target) for name, target in running.state.replicas.targets.items()
        }

    async def run(self, items: Sequence[LiveItem]) -> None:
        """Send a batch, and wait until nothing of it is left."""
        await asyncio.gather(*(self._send(item) for item in items if item.kind != "metrics"))
        for item in items:
            if item.kind == "metrics":
                self._engine.metrics = item.data
                await self._monitors[item.name].scrape()
        await self._running.idle()
        self._engine.answers.clear()
        self.found.items += len(items)

    async def _send(self, item: LiveItem) -> None:
        data = item.data
        if item.kind == "answer":
            name = b"%d" % len(self._engine.answers)
            self._engine.answers[name] = item.data
            body = chat(stream=True)
            head = "POST %s HTTP/1.1\r\nhost: g\r\nconnection: close\r\nx-request-id: %s\r\ncontent-length: %d\r\n\r\n"
            data = (head % ("/v1/chat/completions", name.decode(), len(body))).encode() + body
        got = await _exchange(self._running.addresses.data, data)
        status = got.split(b" ", 2)[1].decode() if got.startswith(b"HTTP/1.1 ") else "none" if not got else "odd"
        self.found.statuses[status] = self.found.statuses.get(status, 0) + 1
        if status in ("500", "odd") or b"internal_error" in got:
            self.found.errors.append(f"{item.kind} {item.data[:2000]!r}: {got[:500]!r}")


async def _exchange(address: tuple[str, int], data: bytes) -> bytes:
    """Return what comes back on a connection of its own until its end or its silence; a reset is an end."""
    got = b""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(1 << 16), _SILENT_S if got else _END_S):
            got += part
    except ConnectionError:
        pass
    except TimeoutError:
        if not got:
            return b"no answer in time"
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return got


def _answer(body: bytes, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


class _Errors(logging.Handler):
    """Records of level error, as texts."""

    def __init__(self, found: LiveFound) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.errors.append(f"{record.name}: {self.format(record)}")


@contextmanager
def _timed(found: LiveFound) -> Iterator[None]:
    """Time each callback of the loop."""
    run = asyncio.Handle._run

    def timed(self: Any) -> None:
        callback = self._callback  # a handle forgets it when it is cancelled
        began = thread_time()
        run(self)
        spent_ms = (thread_time() - began) * 1000
        if spent_ms > found.longest_ms:
            found.longest_ms, found.longest = round(spent_ms, 2), repr(getattr(callback, "__self__", callback))[:300]

    with patch.object(asyncio.Handle, "_run", timed):
        yield


@contextmanager
def live_proxy(engines: Sequence[str], found: LiveFound) -> Iterator[tuple[asyncio.Runner, LiveProxy]]:
    """A proxy before one replica of each kind of engine, and the loop that runs it."""
    handler = _Errors(found)
    loggers = [logging.getLogger(name) for name in ("gorgo", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner, _timed(found):
            stack, live = runner.run(_started(engines, found))
            runner.run(live.run([LiveItem("request", "/health", _FIRST), LiveItem("answer", "", _answer(_GOOD))]))
            # The start serves no request yet, and the first ones import what is imported late.
            found.longest_ms, found.items, found.statuses = 0.0, 0, {}
            try:
                yield runner, live
            finally:
                runner.run(stack.aclose())
                found.tasks_left = runner.run(_other_tasks())
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


async def _started(engines: Sequence[str], found: LiveFound) -> tuple[AsyncExitStack, LiveProxy]:
    stack, engine = AsyncExitStack(), _Engine()
    port = await engine.open()
    stack.push_async_callback(engine.aclose)
    config = Config(
        proxy=QUIET,
        regions=(RegionConfig(name="here"),),
        replicas=tuple(
            ReplicaConfig(name=name, region="here", url=f"http://127.0.0.1:{port}", engine=name) for name in engines
        ),
        limits=LimitsConfig(**_short_limits()),
        overload=OverloadConfig(no_replica_wait_s=0.0),
    )
    patches = stack.enter_context(pytest.MonkeyPatch.context())
    return stack, LiveProxy(await stack.enter_async_context(proxy_for(config, patches, [])), engine, found)


def _short_limits() -> Mapping[str, Any]:
    names = ("header_timeout_s", "body_timeout_s", "first_token_timeout_s", "response_timeout_s")
    return dict.fromkeys((*names, "stream_idle_timeout_s"), _TIMEOUT_S) | {"shutdown_grace_s": 5.0}


async def _other_tasks() -> int:
    """Return the tasks that are left, this one aside."""
    with suppress(TimeoutError):
        await until(lambda: len(asyncio.all_tasks()) == 1)
    return len(asyncio.all_tasks()) - 1
