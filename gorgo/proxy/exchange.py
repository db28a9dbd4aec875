"""One request from its first byte to its last: read, route, attempt until an answer is committed to, account.

Owns the order of things and the guarantee that every attempt the Router dispatched is told finished exactly once, in
whatever way it ends. Leaves the choice to the Router, the answer's bytes to `relay`, connections to `upstream`.

Theory of operation: one task per exchange, the server's own. A second, tiny one waits for the client to leave and
cancels the first. Each attempt has one `finally`; until it learns better, its outcome is that the client left, which is
what a cancellation at any point means.
"""

from __future__ import annotations

import asyncio
from time import monotonic, perf_counter
from typing import Any

from gorgo.core.actions import Action, Cancel, Dispatch, Hedge, Hold, Reject
from gorgo.core.request import Ending, Outcome
from gorgo.proxy.account import Account
from gorgo.proxy.ask import Ask, read_ask
from gorgo.proxy.body import ClientGone, draining, read_body
from gorgo.proxy.errors import HttpError, Message, Receive, Send, error_event, error_of, send_error
from gorgo.proxy.headers import Header, new_id, request_id, upstream_headers
from gorgo.proxy.held import Attempted, Held
from gorgo.proxy.logs import log_failure
from gorgo.proxy.race import Race
from gorgo.proxy.relay import Relay, RelayPlan, failure_of
from gorgo.proxy.sink import Sink
from gorgo.proxy.state import ProxyState
from gorgo.proxy.target import Target
from gorgo.proxy.upstream import UpstreamError
from gorgo.proxy.watchdog import Watchdog

#: For the last words to a client that may have stopped reading.
_LAST_WORDS_S = 5.0
#: Ends of an attempt that the replica did not make.
_LEFT = frozenset({Ending.CLIENT_GONE, Ending.SUPERSEDED, Ending.OUT_OF_TIME})
#: The replica had no connection left for one more: busy, not broken.
_BUSY_REASONS = frozenset({"connections_exhausted"})


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
        "_ask",
        "_client",
        "_gone",
        "_headers",
        "_held",
        "_http_version",
        "_id",
        "_method",
        "_race",
        "_receive",
        "_received_s",
        "_route",
        "_route_id",
        "_send",
        "_sink",
        "_state",
    )

    def __init__(self, state: ProxyState, route: str, scope: Message, receive: Receive, send: Send) -> None:
        self._state = state
        self._route = route
        self._method: str = scope["method"]
        self._http_version: str = scope["http_version"]
        #: Whose key it was, where clients need one.
        self._client: str | None = scope.get("gorgo.client")
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        self._sink = Sink(send)
        self._received_s = state.clock()
        self._id = request_id(self._headers)
        #: By which the Router knows it, while it does.
        self._route_id: str | None = None
        self._ask: Ask | None = None
        self._account = Account(self._received_s)
        if state.tracing is not None:
            self._account.trace = state.tracing.begin(
                self._headers, route=route, request_id=self._id, received_s=self._received_s
            )
        self._gone = False
        #: Where its turn is told while it waits for a replica.
        self._held: Held | None = None
        self._race = Race()

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Serve it, and whatever happens leave one log line and one count."""
        watch: asyncio.Task[None] | None = None
        try:
            try:
                ask = await self._read()
            except HttpError as refusal:
                async with draining(self._receive):
                    await self._refuse(refusal)
                return
            watch = asyncio.create_task(self._watch(task))
            await self._serve(ask)
        except ClientGone:
            self._gone = True
        except asyncio.CancelledError:
            if not self._gone and not self._state.stopping:
                raise
            task.uncancel()
            await self._cut_short()
        except HttpError as refusal:
            await self._refuse(refusal)
        except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
            self._account.status, self._account.code = 500, "internal_error"
            log_failure("internal_error", failure, request_id=self._id)
            if not self._sink.started:
                await self._refuse(HttpError(500, "internal_error", "the proxy failed; the log has its request id"))
        finally:
            if watch is not None:
                watch.cancel()
            if self._race.second is not None and (fault := await self._race.end()) is not None:
                log_failure("internal_error", fault, request_id=self._id)
            if self._route_id is not None:
                self._state.desk.leave(self._route_id)
            sent = self._sink.status
            self._account.close(self._state, self._route, self._id, sent_status=sent, gone=self._gone)

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
        body = await read_body(self._receive, self._headers, limits=self._state.limits)
        if self._http_version == "2":
            # Over HTTP/2 the server could not show a client that an answer was cut. Only now, because it breaks the
            # connection when it has to answer before the body is complete.
            raise HttpError(505, "http_version", "expected HTTP/1.1")
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
        self._ask = self._account.ask = ask
        return ask

    @property
    def _known_id(self) -> str:
        assert self._route_id is not None, "the Router knows it"
        return self._route_id

    # -- attempts

    async def _serve(self, ask: Ask) -> None:
        started = perf_counter()
        action: Action | None = self._state.desk.submit(ask.route)
        self._state.metrics.decided(self._account.decision_s + perf_counter() - started)
        taken: Target | None = None
        if isinstance(action, Hold):
            action, taken = await self._wait_in_time()
        while isinstance(action, Dispatch):
            action = await self._attempt(ask, action, taken or self._take(action))
            taken = None
            if action is None and self._race.second is not None:
                # It has lost, or failed while the other one was open: how the request ends is the other's affair.
                action = await self._race.join()
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
            else:
                self._give_back(*left)
            raise
        finally:
            self._held = None
            self._account.held_s = self._state.clock() - held.since_s
            self._state.metrics.held(self._account.held_s)

    def deliver(self, action: Action) -> None:
        """What the Router wants of this request, from an event of another one or of time. Never waits."""
        match action:
            case Dispatch() | Reject() if self._held is not None:
                target = self._take(action) if isinstance(action, Dispatch) else None
                if not self._held.tell(action, target) and isinstance(action, Dispatch) and target is not None:
                    self._give_back(action, target)
            case Hedge():
                self._hedge(action.dispatch)
            case Cancel():
                self._race.beat(action.attempt_id)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request that does not wait")

    def _take(self, dispatch: Dispatch) -> Target:
        # In the step of the dispatch, so it is the process that the Router meant; it may leave the fleet from here on.
        target = self._state.targets[dispatch.replica]
        target.acquire()
        return target

    def _give_back(self, action: Action, target: Target | None) -> None:
        """A dispatch that came when the client had left: nothing was sent."""
        if isinstance(action, Dispatch) and target is not None:
            target.release()
            self._state.desk.finish(action, Outcome(Ending.CLIENT_GONE))

    def _hedge(self, dispatch: Dispatch) -> None:
        """A second attempt beside the first, in a task of its own, unless the answer has begun."""
        if self._race.answer is not None or self._sink.started or self._race.second is not None or self._ask is None:
            self._state.desk.finish(dispatch, Outcome(Ending.SUPERSEDED))
            return
        self._account.hedged = True
        self._state.metrics.hedged(dispatch.replica, dispatch.region)
        self._race.add(dispatch.attempt_id, self._compete(self._ask, dispatch, self._take(dispatch)))

    async def _compete(self, ask: Ask, dispatch: Dispatch, target: Target) -> Action | None:
        """The second attempt, unless it was beaten before its task began."""
        if dispatch.attempt_id in self._race:
            return await self._attempt(ask, dispatch, target)
        target.release()
        return self._state.desk.finish(dispatch, Outcome(Ending.SUPERSEDED))

    def _claim(self, dispatch: Dispatch) -> None:
        """Called before anything is sent to the client: from here on this attempt is the answer."""
        self._race.claim(dispatch.attempt_id)
        self._account.replica = dispatch.replica

    async def _attempt(self, ask: Ask, dispatch: Dispatch, target: Target) -> Action | None:
        """One dispatch to its end. Answers what the Router wants next, `None` when it wants nothing of this attempt."""
        task = asyncio.current_task()
        assert task is not None
        engine_id: str | None = None
        outcome = Outcome(Ending.CLIENT_GONE)
        try:
            self._race.begin(dispatch.attempt_id)
            self._account.began(self._state, dispatch)
            engine_id = new_id() if ask.nameable and target.dialect.id_header else None
            outcome = await self._try(ask, dispatch, target, engine_id)
        except asyncio.CancelledError:
            if dispatch.attempt_id in self._race or self._gone:
                raise
            task.uncancel()
            outcome = Outcome(Ending.SUPERSEDED)
        finally:
            # What must be given back comes first, whatever befalls those who only keep accounts.
            self._race.over(dispatch.attempt_id)
            target.release()
            action = self._state.desk.finish(dispatch, outcome)
            if engine_id is not None and _given_up(outcome):
                self._state.aborts.tell(target, engine_id)
            self._account.ended(self._state, ask, dispatch, outcome, target)
        if isinstance(action, Dispatch):
            self._state.metrics.retried(outcome.ending.value)
        return action

    async def _try(self, ask: Ask, dispatch: Dispatch, target: Target, engine_id: str | None) -> Outcome:
        limits, spent_s = target.deadlines, self._state.clock() - self._received_s
        first_s = limits.first_content_s if ask.route.streamed else limits.whole_answer_s
        dog = Watchdog(first_s, last=monotonic() + limits.total_s - spent_s)
        try:
            with dog:
                return await self._relay(ask, dispatch, target, dog, engine_id)
        except UpstreamError as failure:
            return await self._broken(failure.reason)
        except TimeoutError:
            if dog.out_of_time:
                return await self._out_of_time()
            if self._sink.sending:
                # The client stopped reading for as long as a replica may stay silent: it is cut, not waited for.
                self._gone = True
                return Outcome(Ending.CLIENT_GONE, status=self._sink.status, error="client_stalled")
            return await self._broken("timeout")

    async def _relay(
        self, ask: Ask, dispatch: Dispatch, target: Target, dog: Watchdog, engine_id: str | None
    ) -> Outcome:
        asked = target.request_usage and ask.with_usage is not None
        body = ask.with_usage if asked and ask.with_usage is not None else ask.body
        headers = upstream_headers(self._headers, request_id=self._id, api_key=target.api_key)
        if engine_id is not None and target.dialect.id_header is not None:
            headers.append((target.dialect.id_header.encode(), engine_id.encode()))
        if self._account.trace is not None:
            headers = self._account.trace.carry(headers, dispatch.attempt_id)
        source = await target.upstream.open(self._route, headers, body)
        try:
            failure = failure_of(source.status)
            if failure is not None:
                return failure
            return await Relay(source, self._sink, dog, self._plan(dispatch, target, asked)).run()
        finally:
            await source.aclose()

    def _plan(self, dispatch: Dispatch, target: Target, asked: bool) -> RelayPlan:
        def on_content() -> None:
            now = self._state.clock()
            self._claim(dispatch)
            self._state.desk.first_content(dispatch.attempt_id, now=now)
            self._account.first_content(self._state, dispatch, now=now)

        def on_head(head: bytes) -> None:
            if self._state.targets.get(dispatch.replica) is target:
                self._state.homes.learn(head, dispatch.replica)

        return RelayPlan(
            route=self._route,
            own_headers=self._own_headers(dispatch),
            chunk_limit_s=target.deadlines.between_chunks_s,
            strip_usage=asked,
            on_content=on_content,
            on_commit=lambda: self._claim(dispatch),
            on_head=on_head if self._route == "/v1/responses" else None,
        )

    async def _broken(self, reason: str) -> Outcome:
        """The replica failed. Once anything was sent, only the client can be told."""
        if not self._sink.started:
            ending = Ending.BUSY if reason in _BUSY_REASONS else Ending.FAILED_BEFORE_CONTENT
            return Outcome(ending, error=reason)
        await self._end_stream(502, "upstream_failed", "the replica broke off in the middle of its answer")
        return Outcome(Ending.FAILED_AFTER_CONTENT, status=self._sink.status, error=reason)

    async def _out_of_time(self) -> Outcome:
        """It has taken as long as it may in all, other attempts and waits included. No replica is to blame."""
        if not self._sink.started:
            return Outcome(Ending.OUT_OF_TIME, error="total_timeout")
        await self._end_stream(504, "total_timeout", "the answer took longer than a request may take in all")
        return Outcome(Ending.OUT_OF_TIME, status=self._sink.status, error="total_timeout")

    def _own_headers(self, dispatch: Dispatch) -> list[Header]:
        decision = dispatch.decision
        headers = [
            (b"x-request-id", self._id.encode()),
            (b"x-gorgo-replica", dispatch.replica.encode()),
            (b"x-gorgo-region", dispatch.region.encode()),
            (b"x-gorgo-policy", decision.policy.encode()),
            (b"x-gorgo-weights-version", b"%d" % decision.weights_version),
            (b"x-gorgo-believed-cached-tokens", b"%d" % decision.believed_cached_tokens),
        ]
        if decision.predicted_ttft_s is not None:
            headers.append((b"x-gorgo-predicted-ttft-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)))
        return headers

    # -- endings

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """When the client leaves, end `task` at once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._sink.finished:
            self._gone = True
            task.cancel()

    async def _refuse(self, refusal: HttpError) -> None:
        """An error of the proxy's own, instead of any answer."""
        assert not self._sink.started, "an answer has begun"
        # From here on a client that leaves has had its answer.
        self._sink.finished = True
        self._account.status, self._account.code = refusal.status, refusal.code
        self._state.metrics.rejected(refusal.code)
        policy = self._state.router.policy.name.encode()
        own = ((b"x-request-id", self._id.encode()), (b"x-gorgo-policy", policy))
        await send_error(self._send, refusal, own)

    async def _cut_short(self) -> None:
        """The client left, or the grace of a stopping proxy is over."""
        if self._gone or self._sink.finished:
            return
        if self._sink.started:
            await self._end_stream(503, "stopping", "the proxy is stopping")
        else:
            await self._refuse(HttpError(503, "stopping", "the proxy is stopping", headers=((b"retry-after", b"1"),)))

    async def _end_stream(self, status: int, code: str, message: str) -> None:
        """Tell the error in the stream, where it can be told; any other answer is cut, and the client sees that."""
        self._account.status, self._account.code = status, code
        if not self._sink.carries_events:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._sink.finish(error_event(status, code, message))
        except TimeoutError:
            self._gone = True


def _given_up(outcome: Outcome) -> bool:
    """It is the proxy that ended it: the engine may be at it still."""
    return outcome.ending in _LEFT or outcome.error == "timeout"
