"""Open attempts and the requests behind them: what is reserved, by whom, until when.

Owns the guarantee that load is counted at dispatch and released exactly once, however often an end is reported. An
attempt holds its `Replica`, not a slot: the slot may belong to another replica when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.network import one_way_s
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.concurrency import Checkpoint
from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.shadow import ShadowScore
from gorgo.core.prefix.residency import ConfirmedPrefix


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from its first dispatch to the end of its last attempt."""

    request: RouteRequest
    #: Its client's account has it (`core.quotas`).
    quota_held: bool = False
    attempts: int = 0
    tried_replicas: set[str] = field(default_factory=set)
    #: Attempts that have not ended, first one first.
    open_attempts: list[Attempt] = field(default_factory=list)
    #: It was sent to a second replica while the first had not answered.
    hedged: bool = False
    #: The attempt that is the answer, and whether the request's sample is written.
    winner: Attempt | None = None
    closed: bool = False
    first_dispatched_s: float | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch. What the decision believed is kept for the sample."""

    attempt_id: str
    state: RequestState
    replica: Replica
    dispatched_s: float
    policy: str
    weights_version: int
    estimated_cached_tokens: int
    best_cached_tokens: int
    predicted_ttft_s: float | None
    estimate: TtftEstimate
    rtt_s: float
    #: When it should reach the engine, and how long its prefill takes by the replica's prior.
    arrival_s: float
    prior_s: float
    #: Terms of the replica's cost, and what a shadow policy makes of it.
    terms: Mapping[str, float] = field(default_factory=dict)
    shadow: ShadowScore | None = None
    first_token_s: float | None = None
    #: Where the replica's account of its batch stood when it was sent.
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    #: What the replica had shown to hold of the prompt at dispatch.
    confirmed_prefix: ConfirmedPrefix = field(default_factory=ConfirmedPrefix)


class InFlightTable:
    """Attempts that have not ended, by id."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, attempt_id: str) -> Attempt | None:
        """An open attempt."""
        return self._open.get(attempt_id)

    def new_id(self, state: RequestState) -> str:
        """`REQUEST/ATTEMPT`; a client that reuses an id while it is in flight gets one with a mark appended."""
        attempt_id = f"{state.request.request_id}/{state.attempts}"
        while attempt_id in self._open:
            attempt_id += "+"
        return attempt_id

    def open(self, attempt: Attempt) -> None:
        self._open[attempt.attempt_id] = attempt
        attempt.state.open_attempts.append(attempt)
        member, request = attempt.replica, attempt.state.request
        self._fleet.reserve(member, request.prompt_tokens)
        prefill_s = attempt.prior_s * member.prefill_queue.speed.factor
        attempt.checkpoint = member.concurrency.on_dispatched(prefill_s=prefill_s, now=attempt.dispatched_s)
        member.prefill_queue.add(
            attempt.attempt_id, arrives_s=attempt.arrival_s, prior_s=attempt.prior_s, seen=request.streamed
        )
        member.publish_queue(self._fleet.columns)

    def first_token(self, attempt_id: str, *, now: float) -> Attempt | None:
        """The attempt if this is its first first-token, else `None`."""
        attempt = self._open.get(attempt_id)
        if attempt is None or attempt.first_token_s is not None:
            return None
        attempt.first_token_s = now
        member, request = attempt.replica, attempt.state.request
        self._fleet.release_prefill(member, request.prompt_tokens)
        member.reported_speed.on_request(request.prompt_tokens - attempt.estimated_cached_tokens, attempt.prior_s)
        tell = member.prefill_queue.on_first_token if request.streamed else member.prefill_queue.remove
        tell(attempt_id, engine_s=now - one_way_s(self._fleet.columns, member.slot))
        member.publish_queue(self._fleet.columns)
        return attempt

    def check(self) -> None:
        """Assert that every replica is charged with what is open there and nothing else; visits all of it."""
        columns = self._fleet.columns
        for name, member in self._fleet.replicas.items():
            tokens = [each.state.request.prompt_tokens for each in self._open.values() if each.replica is member]
            waiting = [
                each.state.request.prompt_tokens
                for each in self._open.values()
                if each.replica is member and each.first_token_s is None
            ]
            charged = columns.in_flight_requests[member.slot], columns.in_flight_tokens[member.slot]
            assert charged == (len(tokens), sum(tokens)), f"{name}: {charged} reserved for {len(tokens)} open attempts"
            assert columns.queued_prefill_tokens[member.slot] == sum(waiting), f"{name}: tokens before a first token"
            member.prefill_queue.check()

    def close(self, attempt_id: str, *, now: float) -> Attempt | None:
        """The attempt if it was open, with its load released; `None` at any later time."""
        attempt = self._open.pop(attempt_id, None)
        if attempt is None:
            return None
        attempt.state.open_attempts.remove(attempt)
        member, tokens = attempt.replica, attempt.state.request.prompt_tokens
        if attempt.first_token_s is None:
            self._fleet.release_prefill(member, tokens)
            member.prefill_queue.remove(attempt_id, engine_s=now + one_way_s(self._fleet.columns, member.slot))
            member.publish_queue(self._fleet.columns)
        self._fleet.release(member, tokens)
        member.concurrency.on_left(now=now)
        return attempt
