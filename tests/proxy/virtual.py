"""A proxy in virtual time: its ASGI app, before replicas that answer as scripts say and when they say.

Nothing here waits: the event loop's clock jumps to its next timer, and every clock of the proxy is the loop's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import pytest

from gorgo.config.model import Config
from gorgo.live.build import build_live
from gorgo.live.event_loop import RouterGateway
from gorgo.live.http.errors import Message
from gorgo.live.http.headers import Header
from gorgo.live.state import LiveState
from gorgo.live.telemetry.health import HealthLog
from gorgo.live.upstream.client import UpstreamClient, UpstreamError
from gorgo.policies.registry import make_policy
from gorgo.proxy.server import data_app
from tests.lab.sim.live_shell import VirtualLoop
from tests.proxy.conftest import system_tls
from tests.proxy.passages import IteratedSource

CHAT = "/v1/chat/completions"
EVENTS = ((b"content-type", b"text/event-stream"),)
JSON = ((b"content-type", b"application/json"),)
#: Seconds to wait, bytes to send, or how it breaks off.
Step = float | bytes | UpstreamError


@dataclass
class Script:
    """One answer. Without steps it is complete with its headers."""

    steps: Sequence[Step] = ()
    status: int = 200
    headers: Sequence[Header] = EVENTS
    #: Until its headers, s; or why there are none.
    head_s: float = 0.0
    refuses: str | None = None


class ScriptedSource(IteratedSource):
    """An answer that has begun."""

    def __init__(self, script: Script, closed: Callable[[], None]) -> None:
        self.status = script.status
        self.headers = script.headers
        self._steps = script.steps
        self._closed = closed

    async def each(self) -> AsyncIterator[bytes]:
        for step in self._steps:
            if isinstance(step, bytes):
                yield step
            elif isinstance(step, UpstreamError):
                raise step
            else:
                await asyncio.sleep(step)

    async def aclose(self) -> None:
        self._closed()


@dataclass
class Received:
    """One request at a replica."""

    at_s: float
    path: str
    headers: Sequence[Header]
    body: bytes
    #: When the proxy was done with its answer.
    closed_s: float | None = None


@dataclass
class ScriptedUpstream:
    """One replica, as exchanges reach it; the last script repeats."""

    scripts: list[Script]
    received: list[Received] = field(default_factory=list)
    open_responses: int = 0
    #: What its engine says the tokens are, asked for them in this form; without it the engine has no such route.
    tokens_of: Callable[[dict[str, Any]], list[str]] | None = None

    async def fetch(
        self, path: str, headers: Sequence[Header], *, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        assert (path, timeout_s <= 1) == ("/tokenize", True)
        if self.tokens_of is None or body is None:
            return 404, b"{}"
        return 200, json.dumps({"tokens": self.tokens_of(json.loads(body))}).encode()

    async def open(
        self, path: str, headers: Sequence[Header], body: bytes, *, repeatable: bool = True, on_sent: Callable[[], None]
    ) -> ScriptedSource:
        now = asyncio.get_running_loop().time
        request = Received(now(), path, headers, body)
        self.received.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.open_responses += 1
        on_sent()

        def closed() -> None:
            self.open_responses -= 1
            request.closed_s = now()

        try:
            await asyncio.sleep(script.head_s)
            if script.refuses is not None:
                raise UpstreamError(script.refuses)
        except BaseException:
            closed()
            raise
        return ScriptedSource(script, closed)

    async def aclose(self) -> None:
        return


@dataclass
class Answered:
    """What one client was sent, and when."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    #: (time, bytes)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False
    #: When its exchange was over, to the microsecond.
    at_s: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    @property
    def code(self) -> str | None:
        """Of the error that it is, if it is one."""
        if self.headers.get("content-type") != "application/json":
            return None
        error: dict[str, Any] = json.loads(self.body).get("error", {})
        return error.get("code")


class VirtualProxy:
    """The proxy and its replicas, by name."""

    def __init__(self, state: LiveState, replicas: dict[str, ScriptedUpstream]) -> None:
        self.state = state
        self.replicas = replicas
        self._app = data_app(state)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def ask(
        self,
        *body: Step,
        route: str = CHAT,
        headers: Sequence[Header] = (),
        leaves_s: float | None = None,
        reads: Callable[[bytes], Awaitable[None]] | None = None,
        method: str = "POST",
        extends: bool = False,
        media_type: bytes = b"application/json",
    ) -> Answered:
        """One request, whose body comes in pieces. Its client leaves after so many seconds, if it does.

        `extends`: with the listener's extensions of the scope, for a body that comes with its head.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue()
        answered = Answered()

        async def arrive() -> None:
            pieces = [step for step in body if isinstance(step, bytes)]
            for step in body:
                if isinstance(step, bytes):
                    pieces.pop()
                    messages.put_nowait({"type": "http.request", "body": step, "more_body": bool(pieces)})
                else:
                    await asyncio.sleep(cast(float, step))

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.status = message["status"]
                answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            if reads is not None:
                await reads(message["body"])
            answered.parts.append((self.now_s, message["body"]))
            answered.complete = not message["more_body"]

        path, _, query = route.partition("?")
        scope: dict[str, object] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"content-type", media_type), *headers],
        }
        on_disconnect: list[Callable[[], None]] = []
        if extends:
            whole = b"".join(step for step in body if isinstance(step, bytes))
            scope["extensions"] = {"gorgo.take_body": lambda: whole, "gorgo.on_disconnect": on_disconnect.append}
        arriving = asyncio.create_task(arrive())
        serving = asyncio.create_task(self._app(scope, messages.get, send))
        await asyncio.wait((serving,), timeout=leaves_s)
        messages.put_nowait({"type": "http.disconnect"})
        for call in () if serving.done() else on_disconnect:
            call()
        await serving
        arriving.cancel()
        answered.at_s = round(self.now_s, 6)
        return answered

    def total(self, name: str, **labels: str) -> float:
        return self.state.telemetry.metrics.registry.get_sample_value(name, labels) or 0.0


def in_virtual_time(
    test: Callable[[VirtualProxy], Awaitable[None]], config: Config, scripts: dict[str, list[Script]], **options: Any
) -> None:
    """Run `test` with a proxy of `config`, whose replicas have these scripts, a round trip of 10 ms away."""

    async def run() -> None:
        now = asyncio.get_running_loop().time
        policy = make_policy(config.proxy.policy)
        wiring = {"weights": None, "environ": {}, "key": 1, "seed": 1, "tls": system_tls(), **options}
        state = build_live(config, policy=policy, **wiring)
        await state.aclose()
        state.routing.clock = now
        state.routing.gateway = RouterGateway(state.routing.router, now, HealthLog(state.telemetry.metrics))
        replicas = {name: ScriptedUpstream(list(found)) for name, found in scripts.items()}
        for name, upstream in replicas.items():
            state.replicas.targets[name].upstream = cast(UpstreamClient, upstream)
            state.routing.router.replicas.on_probe(name, 0.01, now=now())
        await test(VirtualProxy(state, replicas))
        assert not state.exchanges
        assert (state.routing.router.in_flight, state.routing.router.queued) == (0, 0)
        assert not any(replica.open_responses for replica in replicas.values())
        state.routing.gateway.close()

    with pytest.MonkeyPatch.context() as patched, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        now = runner.get_loop().time
        exchange = ("exchange", "passage", "relay", "response")
        for module in (*(f"proxy.exchange.{name}" for name in exchange), "live.http.body"):
            patched.setattr(f"gorgo.{module}.monotonic", now)
        runner.run(run())
