"""The proxy's own request path in virtual time: its ASGI app, ask, Router, exchange and relay, over simulated sites.

Only two things are not the proxy's: the clock, which is an event loop's that jumps to its next timer, and `Upstream`,
which puts a request on a `RemoteReplica` and gives its tokens back as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

from gorgo.config.values import WARM_INTERVAL_S
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.engines.registry import dialect
from gorgo.lab.sim.engine.driver import AnswerSoFar, SimAttempt
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.event_queue import EventQueue, Handler
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import RandomTable, TripDelays
from gorgo.lab.sim.port import Monitor
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers import KEYS_PER_REQUEST
from gorgo.lab.sim.workload import SimRequest
from gorgo.live.http.headers import Header
from gorgo.live.state import LiveState
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.server import data_app
from tests.proxy.fakes import DONE, ROLE, delta, event
from tests.proxy.passages import IteratedSource


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to its next timer as soon as nothing is left to do."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Selector(self._jump))
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self._virtual_s

    def _jump(self) -> None:
        due: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        self._virtual_s = max(self._virtual_s, due[0].when())


class _Selector(selectors.SelectSelector):
    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left to wait for: a task hangs"
        if timeout > 0:
            self._jump()
        return super().select(0)


class LoopKernel(EventQueue):
    """The simulator's heap, on an event loop's timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        super().__init__()

    @property
    def now(self) -> float:
        return self._loop.time()

    @now.setter
    def now(self, _value: float) -> None:
        """The loop says what time it is."""

    def at(self, time_s: float, handler: Handler) -> None:
        # A loop's own timers come in any order at the same time; whose turn it is is kept here.
        self._sequence += 1
        heappush(self._heap, (time_s, self._sequence, handler))
        self._loop.call_at(time_s, self._handle_next)

    def _handle_next(self) -> None:
        heappop(self._heap)[2]()


class LiveShell:
    """The proxy over simulated sites; what these tell goes where the proxy's own loops would send it."""

    def __init__(self, state: LiveState, fleet: SimFleet, feed: Sequence[SimRequest], *, seed: int, block_tokens: int):
        self.kernel = LoopKernel(asyncio.get_running_loop())
        self._state = state
        self._app = data_app(state)
        self._feed = {str(request.index): request for request in feed}
        self._draws = RandomTable(seed)
        self._answers: dict[SimAttempt, asyncio.Queue[Outcome | None]] = {}
        self._attempts: dict[str, int] = {}
        #: What clients have of answers that broke off.
        self._parts: dict[str, AnswerSoFar] = {}
        self._block_tokens = block_tokens
        self.engines = {
            replica.name: RemoteReplica(
                self.kernel,
                self,
                replica,
                number=number,
                draws=self._draws,
                block_tokens=block_tokens,
                gaps=ItlHistogram(),
            )
            for number, replica in enumerate(fleet.replicas)
        }

    def start(self, *, probe_interval_s: float, scrape_interval_s: float) -> None:
        """The first look and the loops, when the simulation has them."""
        for site in self.engines.values():
            site.probe_first()
        for interval_s, ask in (
            (probe_interval_s, Monitor.probe),
            (scrape_interval_s, Monitor.scrape),
            (WARM_INTERVAL_S, Monitor.warm),
        ):
            self._every(interval_s, interval_s, ask)

    async def serve(self, body_of: Callable[[str], bytes]) -> dict[str, bytes]:
        """Send every request when it is due. Answers what each client got."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            clients = {}
            for request_id, request in self._feed.items():
                await asyncio.sleep(max(0.0, request.arrival_s - loop.time()))
                clients[request_id] = tasks.create_task(self._client(request_id, body_of(request_id)))
        return {request_id: task.result() for request_id, task in clients.items()}

    async def open(self, replica: str, headers: Sequence[Header]) -> SiteSource:
        """POST to a site; returns at the first token, as the engine sends its headers with it."""
        request_id = dict(headers)[b"x-request-id"].decode()
        request = self._feed[request_id]
        attempt = self._attempts[request_id] = self._attempts.get(request_id, 0) + 1
        before = self._parts.get(request_id)
        if before is not None:
            request = request.rest(before.tokens, block_tokens=self._block_tokens)
        sending = SimAttempt(
            request_id,
            f"{request_id}/{attempt}",
            request.blocks,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            body_bytes=request.body_bytes,
            trips=TripDelays(self._draws, request.index * KEYS_PER_REQUEST + attempt),
            before=before,
        )
        answer = self._answers[sending] = asyncio.Queue()
        self.engines[replica].send(sending)
        cancel = partial(self.engines[replica].cancel, sending)
        try:
            outcome = await answer.get()
        except asyncio.CancelledError:
            cancel()
            raise
        if outcome is not None and outcome.status is None:
            raise UpstreamError(outcome.error or "disconnected")
        return SiteSource(answer, cancel, status=200 if outcome is None or outcome.status is None else outcome.status)

    # -- what sites tell

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None:
        self._state.routing.router.replicas.on_connection(replica, connection, now=self.kernel.now)

    def on_probe(self, replica: str, rtt_s: float | None) -> None:
        self._state.routing.gateway.apply(
            self._state.routing.router.replicas.on_probe(replica, rtt_s, now=self.kernel.now)
        )

    def on_sample(self, replica: str, sample: EngineSample | None) -> None:
        self._state.routing.router.replicas.on_engine_sample(replica, sample, now=self.kernel.now)

    def on_first_token(self, sending: SimAttempt) -> None:
        self._answers[sending].put_nowait(None)

    def on_stalled(self, sending: SimAttempt) -> bool:
        return False

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None:
        if sending.so_far is not None:
            self._parts[sending.request_id] = sending.so_far
            before = 0 if sending.before is None else sending.before.tokens
            outcome = replace(outcome, output_tokens=sending.so_far.tokens - before)
        self._answers.pop(sending).put_nowait(outcome)

    # -- helpers

    def _every(self, at_s: float, interval_s: float, ask: Callable[[Monitor], None]) -> None:
        def ask_all() -> None:
            for site in self.engines.values():
                ask(site.ports[0].background)
            self._every(at_s + interval_s, interval_s, ask)

        self.kernel.at(at_s, ask_all)

    async def _client(self, request_id: str, body: bytes) -> bytes:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        got: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            got.append(message.get("body", b""))

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"x-request-id", request_id.encode()),
            ],
        }
        await self._app(scope, messages.get, send)
        return b"".join(got)


class SiteUpstream:
    """One replica of a `LiveShell`, as the exchange reaches it."""

    open_sources = 0

    def __init__(self, shell: LiveShell, replica: str) -> None:
        self._open = partial(shell.open, replica)

    async def open(
        self,
        _path: str,
        headers: Sequence[Header],
        _body: bytes,
        *,
        repeatable: bool = True,
        on_sent: Callable[[], None],
    ) -> SiteSource:
        on_sent()
        return await self._open(headers)

    async def fetch(
        self, _path: str, _headers: Sequence[Header] = (), *, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """The site counts no tokens for others: each of its events is one."""
        assert body is not None
        assert timeout_s > 0
        return 404, b""

    async def aclose(self) -> None:
        """Nothing is open."""


class SiteSource(IteratedSource):
    """An answer: the first token, an event a second, and the rest when the last token is there."""

    headers: Sequence[Header] = ((b"content-type", b"text/event-stream"),)

    def __init__(self, answer: asyncio.Queue[Outcome | None], cancel: Callable[[], None], *, status: int) -> None:
        self.status = status
        self._answer = answer
        self._cancel = cancel

    async def aclose(self) -> None:
        """The site keeps its own connections, and does nothing about an answer that has ended."""
        self._cancel()

    async def _next(self) -> Outcome | None:
        """The end of the answer, None after a second without: a stream that stands still is taken for stalled."""
        try:
            outcome = await asyncio.wait_for(self._answer.get(), 1.0)
        except TimeoutError:
            return None
        assert outcome is not None, "an answer ends once"
        return outcome

    async def each(self) -> AsyncIterator[bytes]:
        if self.status != 200:
            return
        yield ROLE + delta("first ")
        while (outcome := await self._next()) is None:
            yield delta("more ")
        if outcome.result is not AttemptResult.COMPLETED:
            # The engine counts in each event what it has sent.
            more = {"index": 0, "delta": {"content": "more "}}
            yield event({"choices": [more], "usage": {"completion_tokens": outcome.output_tokens}})
            raise UpstreamError(outcome.error or "disconnected")
        yield delta("last") + event({"choices": [], "usage": _usage(outcome)}) + DONE


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.output_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }


def use(state: LiveState, shell: LiveShell) -> None:
    """Let the proxy reach its replicas through `shell`. Its real connections, none of which is open, are dropped."""
    for name, target in state.replicas.targets.items():
        target.upstream = SiteUpstream(shell, name)  # type: ignore[assignment]
        # An engine that goes on with an answer.
        target.dialect = dialect("vllm")


def json_of(body: bytes) -> dict[str, Any]:
    """A body, parsed."""
    parsed: dict[str, Any] = json.loads(body)
    return parsed
