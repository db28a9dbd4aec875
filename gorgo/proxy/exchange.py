"""One request from its first byte to its last: read, route, attempt until an answer is committed to, account.

Owns the order of things. Leaves the choice to the Router, what happens at a replica to `attempts`, and what the client
is told instead of a replica's answer to `answer`.

Theory of operation: one task per exchange, the server's own. A second, tiny one waits for the client to leave and
cancels the first.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from gorgo.core.actions import Action, Cancel, Dispatch, Hedge, Hold, Reject
from gorgo.proxy.account import Account
from gorgo.proxy.answer import Answer
from gorgo.proxy.ask import Ask, read_ask
from gorgo.proxy.attempts import Attempts
from gorgo.proxy.body import ClientGone, draining, read_body
from gorgo.proxy.errors import HttpError, Message, Receive, Send, error_of
from gorgo.proxy.headers import Header, request_id
from gorgo.proxy.held import Attempted, Held
from gorgo.proxy.logs import log_failure
from gorgo.proxy.state import ProxyState
from gorgo.proxy.target import Target


class HotRoute:
    """An ASGI app for one route: every POST is an exchange."""

    def __init__(self, state: ProxyState, route: str) -> None:
        self._state = state
        self._route = route

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._state, self._route, scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        self._state.exchanges.add(task)
        try:
            await exchange.run(task)
        finally:
            self._state.exchanges.discard(task)


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_account",
        "_answer",
        "_attempts",
        "_client",
        "_headers",
        "_held",
        "_id",
        "_method",
        "_receive",
        "_received_s",
        "_route",
        "_route_id",
        "_state",
    )

    def __init__(self, state: ProxyState, route: str, scope: Message, receive: Receive, send: Send) -> None:
        self._state = state
        self._route = route
        self._method: str = scope["method"]
        #: Whose key it was, where clients need one.
        self._client: str | None = scope.get("gorgo.client")
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._received_s = state.clock()
        self._id = request_id(self._headers)
        #: By which the Router knows it, while it does.
        self._route_id: str | None = None
        self._account = Account(self._received_s)
        self._answer = Answer(state, send, self._id, self._account)
        #: Once it is routed.
        self._attempts: Attempts | None = None
        if state.tracing is not None:
            self._account.trace = state.tracing.begin(
                self._headers, route=route, request_id=self._id, received_s=self._received_s
            )
        #: Where its turn is told while it waits for a replica.
        self._held: Held | None = None

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Serve it, and whatever happens leave one log line and one count."""
        watch: asyncio.Task[None] | None = None
        try:
            try:
                ask = await self._read()
            except HttpError as refusal:
                async with draining(self._receive):
                    await self._answer.refuse(refusal)
                return
            watch = asyncio.create_task(self._watch(task))
            await self._serve(ask)
        except ClientGone:
            self._answer.gone = True
        except asyncio.CancelledError:
            if not self._answer.gone and not self._state.stopping:
                raise
            task.uncancel()
            if self._attempts is not None:
                await self._attempts.end_second()  # before the last words: it may be the one that speaks
            await self._answer.cut_short()
        except HttpError as refusal:
            await self._answer.refuse(refusal)
        except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
            self._account.status, self._account.code = 500, "internal_error"
            log_failure("internal_error", failure, request_id=self._id)
            if not self._answer.sink.started:
                await self._answer.refuse(
                    HttpError(500, "internal_error", "the proxy failed; the log has its request id")
                )
        finally:
            if watch is not None:
                watch.cancel()
            if self._attempts is not None:
                await self._attempts.end_second()
            if self._route_id is not None:
                self._state.desk.leave(self._route_id)
            self._account.close(
                self._state, self._route, self._id, sent_status=self._answer.sink.status, gone=self._answer.gone
            )

    # -- what is asked

    async def _read(self) -> Ask:
        if self._method != "POST":
            raise HttpError(405, "method_not_allowed", "expected POST", headers=((b"allow", b"POST"),))
        limit = self._state.limits.max_in_flight
        if len(self._state.exchanges) > limit:
            # Before the body is read: so many are enough to hold in memory.
            message = f"{limit} requests are in flight, the most this proxy takes"
            raise HttpError(429, "too_many_in_flight", message, headers=((b"retry-after", b"1"),))
        if self._state.stopping:
            raise HttpError(503, "stopping", "this proxy is stopping", headers=((b"retry-after", b"1"),))
        with self._state.uploads.coming(self._client):
            body = await read_body(self._receive, self._headers, limits=self._state.limits)
        self._account.asked(self._state)
        started = perf_counter()
        self._route_id = route_id = self._state.desk.enter(self._id, self)
        ask = read_ask(
            self._state,
            self._route,
            self._headers,
            body,
            request_id=route_id,
            received_s=self._received_s,
            client=self._client,
        )
        self._account.decision_s = perf_counter() - started
        self._account.ask = ask
        return ask

    @property
    def _known_id(self) -> str:
        assert self._route_id is not None, "the Router knows it"
        return self._route_id

    @property
    def _routed(self) -> Attempts:
        assert self._attempts is not None, "the Router knows it"
        return self._attempts

    # -- attempts

    async def _serve(self, ask: Ask) -> None:
        attempts = self._attempts = Attempts(self._state, self._route, self._headers, ask, self._answer, self._account)
        started = perf_counter()
        action: Action | None = self._state.desk.submit(ask.route)
        self._state.metrics.decided(self._account.decision_s + perf_counter() - started)
        taken: Target | None = None
        if isinstance(action, Hold):
            action, taken = await self._wait_in_time()
        while isinstance(action, Dispatch):
            action = await attempts.run(action, taken or attempts.take(action))
            taken = None
            if action is None and attempts.race.second is not None:
                # It has lost, or failed while the other one was open: how the request ends is the other's affair.
                action, taken = await attempts.race.join() or (None, None)
        if isinstance(action, Reject):
            raise error_of(action)

    async def _wait_in_time(self) -> Attempted:
        limit_s = self._state.limits.total_timeout_s
        try:
            async with asyncio.timeout(limit_s - (self._state.clock() - self._received_s)):
                return await self._wait()
        except TimeoutError:
            message = f"no replica could take the request within the {limit_s:g} s that it may take in all"
            raise HttpError(504, "total_timeout", message) from None

    async def _wait(self) -> Attempted:
        """Until the Router has decided, in whichever event that comes to be."""
        self._held = held = Held(self._state.clock())
        try:
            return await held.told
        except asyncio.CancelledError:
            left = held.left()
            if left is None:
                self._state.desk.abandon(self._known_id)
            elif isinstance(left[0], Dispatch) and left[1] is not None:
                self._routed.give_back(left[0], left[1])
            raise
        finally:
            self._held = None
            self._account.held_s = self._state.clock() - held.since_s
            self._state.metrics.held(self._account.held_s)

    def deliver(self, action: Action) -> None:
        """What the Router wants of this request, from an event of another one or of time. Never waits."""
        attempts = self._routed
        match action:
            case Dispatch() if self._held is not None:
                target = attempts.take(action)
                if not self._held.tell(action, target):
                    attempts.give_back(action, target)
            case Reject() if self._held is not None:
                self._held.tell(action, None)
            case Hedge():
                attempts.hedge(action.dispatch)
            case Cancel():
                attempts.race.beat(action.attempt_id)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request that does not wait")

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """When the client leaves, end `task` at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answer.sink.finished:
            self._answer.gone = True
            task.cancel()
