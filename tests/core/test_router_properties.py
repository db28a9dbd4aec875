"""The ledger under any interleaving: after every event the kept columns equal a naive recount, and zero at the end.

A request is answered once: it waits, has attempts open, or has ended, and what has ended is never heard of again. The
shell tells the end of a cancelled attempt late, or of another one first, as it likes.

Events come in any order and as often as hypothesis likes: first tokens and finishes twice, of attempts long ended or
never known, while replicas leave, come back, drain, fail their probes and are readmitted. Hypothesis finds short
sequences; hedges, cancels and requests that leave the queue need long ones, which seeded walks take.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.dispatch.lifecycle import REFUSED_ELSEWHERE, SERVED_ELSEWHERE
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OutlierLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Action, Cancel, Dispatch, Hedge, Hold, Reject
from gorgo.core.messages.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEventBatch,
    KvTier,
)
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.core.router import Router
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, blocks_of, finished, set_policy, specs, submitted

NAMES = ("a", "b", "c", "d", "e")
LIMITS = RouterLimits(
    max_attempts=3,
    max_in_flight=12,
    max_samples=10_000,
    stale_after_s=30.0,
    max_index_blocks=20,
    outlier=OutlierLimits(failures=2, base_s=2.0, max_s=8.0),
    overload=OverloadLimits(queue_enabled=True, queue_max_requests=6, max_backlog_s=0.1, no_replica_wait_s=5.0),
    hedging=HedgeLimits(budget_ratio=0.5),
    retry_budget_minimum=3,
    slow_start_s=10.0,
    clients=ClientRules(ClientLimits(max_in_flight=8)),
    fallbacks=2,
)
fleets = st.lists(st.sampled_from(NAMES), unique=True, max_size=5)
names = st.sampled_from(NAMES)
#: Which of several, by its remainder.
picks = st.integers(0, 1000)
#: How a try ends behind a gateway, that goes on to another replica.
TRIES = (
    SERVED_ELSEWHERE,
    REFUSED_ELSEWHERE,
    Outcome(AttemptResult.UPSTREAM_4XX, status=401, unsent=True),
    Outcome(AttemptResult.BUSY, status=429),
    Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500, error="status_500"),
)


def hashes_of(words: list[int]) -> list[int]:
    return chain_hashes(token_bytes(words), block_tokens=1)


@dataclass
class Open:
    """The naive twin of an open attempt. `joined` tells one stay of a replica in the fleet from the next."""

    replica: str
    joined: int
    tokens: int
    waiting: bool = True
    #: Its load is released, and its outcome follows.
    released: bool = False


@dataclass
class Asked:
    """The naive twin of a request: how often it was answered with an end."""

    client: str | None
    subset: frozenset[str] | None = None
    held: bool = False
    hedged: bool = False
    ended: int = 0


class LedgerMachine(RuleBasedStateMachine):
    @initialize(policy=st.just("gorgo-ms") | st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 1000))
    def start(self, policy: str, seed: int) -> None:
        self.now = 0.0
        self.router = Router(
            specs("a", "b", "c"), make_policy(policy), rng=np.random.default_rng(seed), boot_id="b", limits=LIMITS
        )
        self.fleet = ["a", "b", "c"]
        self.joined: Counter[str] = Counter()
        self.open: dict[str, Open] = {}
        self.tokens: dict[str, int] = {}
        self.tried: dict[str, list[str]] = {}
        self.asked: dict[str, Asked] = {}
        self.stopped: set[str] = set()
        self.seen: list[str] = ["never/1"]
        self.samples = 0
        self.left_the_queue = 0
        self.moved = self.released = 0
        self.actions: Counter[type[Action]] = Counter()

    def follow(self, actions: list[Action]) -> None:
        for action in actions:
            self.actions[type(action)] += 1
            asked = self.asked[action.request_id]
            match action:
                case Hold():
                    assert not asked.held
                    assert not self.tried[action.request_id]
                    asked.held = True
                case Reject():
                    assert self.stopped.issuperset(self.attempts_of(action.request_id)), (
                        "those that are cancelled end later"
                    )
                    asked.held, asked.ended = False, asked.ended + 1
                case Dispatch():
                    asked.held = False
                    self.sent(action)
                case Hedge():
                    assert not asked.hedged
                    asked.hedged = True
                    assert len(self.attempts_of(action.request_id)) == 1
                    self.sent(action.dispatch)
                case Cancel():
                    assert action.attempt_id in self.open
                    self.stopped.add(action.attempt_id)
                    assert asked.hedged
            assert asked.ended <= 1

    def sent(self, dispatch: Dispatch) -> None:
        request_id = dispatch.request_id
        assert not self.asked[request_id].ended
        assert dispatch.attempt_id not in self.open
        assert dispatch.replica in self.fleet
        subset = self.asked[request_id].subset
        assert subset is None or subset.issuperset([dispatch.replica, *dispatch.fallbacks])
        assert len(dispatch.fallbacks) <= LIMITS.fallbacks
        assert len({dispatch.replica, *dispatch.fallbacks}) == 1 + len(dispatch.fallbacks)
        assert set(dispatch.fallbacks) <= set(self.fleet) - set(self.tried[request_id])
        self.tried[request_id].append(dispatch.replica)
        assert len(set(self.tried[request_id])) == len(self.tried[request_id]) <= LIMITS.max_attempts + 1
        self.reserved(dispatch)

    def reserved(self, dispatch: Dispatch) -> None:
        tokens = self.tokens[dispatch.request_id]
        self.open[dispatch.attempt_id] = Open(dispatch.replica, self.joined[dispatch.replica], tokens)
        self.seen.append(dispatch.attempt_id)

    def attempts_of(self, request_id: str) -> list[str]:
        return [attempt_id for attempt_id in self.open if attempt_id.split("/")[0] == request_id]

    @rule(
        tokens=st.integers(0, 10**6),
        words=st.lists(st.integers(0, 2), max_size=6),
        pinned=st.none() | names,
        streamed=st.booleans(),
        client=st.sampled_from([None, "a", "b"]),
        priority=st.integers(-1, 1),
        slo_s=st.none() | st.floats(0.01, 50),
        subset=st.none() | st.frozensets(names),
    )
    def submit(
        self,
        tokens: int,
        words: list[int],
        pinned: str | None,
        streamed: bool,
        client: str | None,
        priority: int,
        slo_s: float | None,
        subset: frozenset[str] | None = None,
    ) -> None:
        request_id = f"r{len(self.tokens)}"
        self.tokens[request_id], self.tried[request_id] = tokens, []
        self.asked[request_id] = Asked(client, subset)
        request = a_request(
            request_id,
            prompt_tokens=tokens,
            blocks=blocks_of(*words),
            received_s=self.now,
            pinned_replica=pinned,
            streamed=streamed,
            body_bytes=4 * tokens,
        )
        hashes = {1: hashes_of(words)} if tokens % 3 else {}
        request = replace(request, client=client, priority=priority, slo_ttft_s=slo_s, kv_hashes=hashes)
        request = replace(request, replicas=subset)
        actions = submitted(self.router, request, now=self.now)
        assert [action.request_id for action in actions].count(request_id) == 1
        assert actions[-1].request_id == request_id
        self.follow(actions)

    @rule(pick=picks)
    def first_token(self, pick: int) -> None:
        attempt_id = self.seen[pick % len(self.seen)]
        actions = self.router.on_first_token(attempt_id, now=self.now)
        assert attempt_id in self.open or actions == []
        self.follow(actions)
        if attempt_id in self.open:
            self.open[attempt_id].waiting = False

    @rule(pick=picks)
    def abandon(self, pick: int) -> None:
        known = [*self.asked, "never"]
        request_id = known[pick % len(known)]
        self.follow(self.router.abandon(request_id, now=self.now))
        if request_id in self.asked and self.asked[request_id].held:
            self.asked[request_id].held = False
            self.asked[request_id].ended += 1
            self.left_the_queue += 1

    @rule(pick=picks, ending=st.sampled_from(list(AttemptResult)))
    def finish(self, pick: int, ending: AttemptResult) -> None:
        self.end(self.seen[pick % len(self.seen)], ending)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """The call of a gateway has ended, before what the access log says of it. Gateways do not hedge."""
        attempt_id = self.seen[pick % len(self.seen)]
        one = self.open.get(attempt_id)
        if one is not None and self.asked[attempt_id.split("/")[0]].hedged:
            return
        actions = self.router.on_released(attempt_id, now=self.now)
        assert (one is not None and not one.released) or actions == []
        if one is not None:
            self.released += not one.released
            one.released = True
        self.follow(actions)

    @rule(pick=picks, name=names, outcome=st.sampled_from(TRIES))
    def serve_elsewhere(self, pick: int, name: str, outcome: Outcome) -> None:
        """A gateway retried by itself, and says how the try ended, or does not."""
        attempt_id = self.seen[pick % len(self.seen)]
        failures = {row.name: row.failures for row in self.router.view.snapshots(now=self.now)}
        moved, others = self.router.on_served_elsewhere(attempt_id, name, outcome, now=self.now)
        was = self.open.pop(attempt_id, None)
        self.follow(others)
        if was is None:
            assert (moved, others) == (None, [])
            return
        stays = was.joined == self.joined[was.replica] and was.replica in self.fleet
        for row in self.router.view.snapshots(now=self.now):
            failed = row.failures - failures[row.name]
            if outcome.unsent:
                assert 0 <= failed <= 1, "what the next replica answers decides"
                continue
            blamed = stays and row.name == was.replica and outcome.result.failed
            assert failed == blamed, "one is blamed, once, and none for a wrong request or a full replica"
        request_id = attempt_id.split("/")[0]
        if moved is not None:
            assert (moved.replica, moved.request_id) == (name, request_id)
            assert moved.attempt_id not in self.seen
            self.moved += 1
            self.reserved(moved)
            self.open[moved.attempt_id].waiting = was.waiting
        elif not self.attempts_of(request_id) and not self.asked[request_id].ended:
            assert name not in self.fleet
            self.samples += 1
            self.asked[request_id].ended = 1

    def pick_open(self, pick: int) -> int:
        """Which of those seen, for one that is open, if any is."""
        running = list(self.open) or self.seen
        return self.seen.index(running[pick % len(running)])

    def end(self, attempt_id: str, ending: AttemptResult) -> None:
        # What is released has been answered.
        is_sent = attempt_id in self.open and self.open[attempt_id].released
        actions = finished(self.router, attempt_id, Outcome(ending, sent=is_sent), now=self.now)
        was_open = self.open.pop(attempt_id, None) is not None
        assert was_open or actions == []
        request_id = attempt_id.split("/")[0]
        others = self.attempts_of(request_id)
        own = [action for action in actions if action.request_id == request_id]
        self.follow(actions)
        if not was_open or self.asked[request_id].ended > any(isinstance(action, Reject) for action in own):
            return
        goes_on = any(isinstance(action, Dispatch) for action in own)
        unanswered = (
            AttemptResult.FAILED_BEFORE_CONTENT,
            AttemptResult.BUSY,
            AttemptResult.SUPERSEDED,
            AttemptResult.DEADLINE_EXCEEDED,
        )
        # What was told to stop has no say, however it ends: the other one has the answer.
        left = {*others} - self.stopped
        leaves_it = (left and ending in unanswered) or (others and attempt_id in self.stopped)
        if goes_on or leaves_it:
            return
        self.samples += 1
        self.asked[request_id].ended = 1
        cancelled = {action.attempt_id for action in own if isinstance(action, Cancel)}
        assert left <= cancelled <= {*others}, "whoever is left is to be stopped"

    @rule(fleet=fleets)
    def set_fleet(self, fleet: list[str]) -> None:
        for name in set(self.fleet) - set(fleet):
            self.joined[name] += 1
        self.fleet = fleet
        self.router.replicas.set_fleet(specs(*fleet), now=self.now)

    @rule(pick=picks, draining=st.booleans())
    def drain(self, pick: int, draining: bool) -> None:
        if self.fleet:
            self.router.replicas.drain(self.fleet[pick % len(self.fleet)], draining, now=self.now)

    @rule(name=names, rtt_s=st.none() | st.floats(0, 1))
    def probe(self, name: str, rtt_s: float | None) -> None:
        self.follow(self.router.replicas.on_probe(name, rtt_s, now=self.now))

    @rule(name=names, window=st.none() | st.floats(1_000, 1e6))
    def path(self, name: str, window: float | None) -> None:
        connection = None if window is None else OpenConnection(TcpWindows(window, 65_535.0), self.now)
        assert self.router.replicas.on_connection(name, connection, now=self.now) == []

    @rule(name=names, used=st.none() | st.integers(0, 1000), capacity=st.none() | st.integers(0, 600))
    def scrape(self, name: str, used: int | None, capacity: int | None) -> None:
        sample = EngineSample(used_tokens=used, kv_capacity_tokens=capacity)
        assert self.router.replicas.on_engine_sample(name, sample, now=self.now) == []

    @rule(name=names, words=st.lists(st.integers(0, 2), max_size=6), what=st.integers(0, 5), complete=st.booleans())
    def report(self, name: str, words: list[int], what: int, complete: bool) -> None:
        """KV events, a push, or the loss of either."""
        own, now = hashes_of(words), self.now
        stored = BlocksStored(tuple(own), None, token_bytes(words), 1, KvTier.GPU)
        event = (stored, BlocksRemoved(tuple(own[-1:]), KvTier.GPU), CacheCleared())[what % 3]
        if what < 3:
            batch = KvEventBatch(sent_s=None, rank=0, events=(event,))
            self.router.caches.on_kv_events(name, batch, model=None, block_tokens=1, complete=complete, now=now)
        elif what == 3:
            self.router.caches.on_snapshot(name, CacheSnapshot(None, 1, own), now=now)
        elif what == 4:
            self.router.caches.on_evictions(name, CacheEvictions(None, 1, own[-1:]), now=now)
        elif complete:
            self.router.caches.on_kv_lost(name, now=now)
        else:
            self.router.caches.on_push_lost(name, now=now)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def set_policy(self, policy: str) -> None:
        set_policy(self.router, policy, now=self.now)

    @rule(step_s=st.floats(0, 40))
    def time_passes(self, step_s: float) -> None:
        self.now += step_s
        self.follow(self.router.handle_timer(now=self.now))
        due = self.router.next_timer()
        assert due is None or due > self.now

    @invariant()
    def columns_equal_a_recount(self) -> None:
        rows = self.router.view.snapshots(now=self.now)
        assert sorted(row.name for row in rows) == sorted(self.fleet)
        assert sorted(self.router.caches.sources(now=self.now)) == sorted(self.fleet)
        loads = [one for one in self.open.values() if not one.released]
        for row in rows:
            mine = [one for one in loads if (one.replica, one.joined) == (row.name, self.joined[row.name])]
            assert row.in_flight_requests == len(mine)
            assert row.in_flight_tokens == sum(one.tokens for one in mine)
            assert row.queued_prefill_tokens == sum(one.tokens for one in mine if one.waiting)
        assert self.router.in_flight == len(loads)
        assert len(self.router.samples) == self.samples
        assert self.router.queued == sum(asked.held for asked in self.asked.values())
        self.router._admission.queue.check()

    @invariant()
    def nobody_is_lost(self) -> None:
        for request_id, asked in self.asked.items():
            assert asked.ended <= 1
            assert asked.ended or asked.held or self.attempts_of(request_id), request_id

    @invariant()
    def the_index_and_the_columns_are_sound(self) -> None:
        self.router.check()

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        while self.open or self.router.queued:
            while self.open:
                self.end(next(iter(self.open)), AttemptResult.FAILED_BEFORE_CONTENT)
            for request_id in [name for name, asked in self.asked.items() if asked.held]:
                self.follow(self.router.abandon(request_id, now=self.now))
                self.asked[request_id].held, self.asked[request_id].ended = False, 1
        assert all(asked.ended == 1 for asked in self.asked.values())
        for client in ("a", "b"):
            assert self.router.quotas.in_flight(client) == 0
        self.columns_equal_a_recount()
        for row in self.router.view.snapshots(now=self.now):
            assert (row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens) == (0, 0, 0)
            # Some round trips later: the last cancel has to get there.
            assert (
                next(one for one in self.router.view.snapshots(now=self.now + 100.0) if one.name == row.name).backlog_s
                == 0
            )


def test_load_returns_to_zero_over_long_walks_that_meet_every_action() -> None:
    met: Counter[type[Action]] = Counter()
    left_the_queue = moved = released = 0
    for seed in range(12):
        try:
            walked = walk(seed)
        except AssertionError as fault:
            fault.add_note(f"in the walk of seed {seed}")
            raise
        met += walked.actions
        left_the_queue += walked.left_the_queue
        moved += walked.moved
        released += walked.released
    assert set(met) == {Hold, Reject, Dispatch, Hedge, Cancel}
    assert min(met.values()) >= 30
    assert left_the_queue >= 10
    assert min(moved, released) >= 30


def walk(seed: int) -> LedgerMachine:
    """Requests that come and end more often than the fleet changes, under a policy that predicts; zero at the end."""
    rng = np.random.default_rng(seed)
    walk = LedgerMachine()
    walk.start(policy="gorgo-ms", seed=seed)
    results = list(AttemptResult)
    for name in walk.fleet:
        walk.probe(name=name, rtt_s=0.01)
    for _ in range(400):
        pick, chance = int(rng.integers(1000)), rng.random()
        if chance < 0.35:
            walk.submit(
                tokens=int(10 ** rng.uniform(0, 4)),
                words=rng.integers(0, 3, rng.integers(7)).tolist(),
                pinned=None if rng.random() < 0.9 else "a",
                streamed=bool(rng.random() < 0.8),
                client=(None, "a", "b")[pick % 3],
                priority=pick % 3 - 1,
                slo_s=None if rng.random() < 0.7 else float(rng.uniform(0.01, 50)),
                subset=None if pick % 5 else frozenset(rng.permutation(NAMES)[:3].tolist()),
            )
        elif chance < 0.39:
            walk.serve_elsewhere(
                pick=walk.pick_open(pick), name=NAMES[pick % len(NAMES)], outcome=TRIES[pick % len(TRIES)]
            )
        elif chance < 0.43:
            walk.release(pick=walk.pick_open(pick))
        elif chance < 0.57:
            walk.finish(pick=walk.pick_open(pick), ending=results[pick % len(results)])
        elif chance < 0.67:
            walk.first_token(pick=walk.pick_open(pick))
        elif chance < 0.72:
            walk.abandon(pick=max(0, len(walk.asked) - 1 - pick % 5))
        elif chance < 0.85:
            walk.time_passes(step_s=float(10 ** rng.uniform(-3, 1)))
        elif chance < 0.89:
            words = rng.integers(0, 3, 1 + rng.integers(6)).tolist()
            walk.report(name=NAMES[pick % len(NAMES)], words=words, what=pick % 7 % 6, complete=bool(pick % 3))
        elif chance < 0.97:
            walk.probe(name=NAMES[pick % len(NAMES)], rtt_s=None if rng.random() < 0.05 else float(rng.uniform(0, 0.2)))
        else:
            walk.set_fleet(fleet=["a", *rng.permutation(NAMES[1:])[: pick % 5].tolist()])
        walk.columns_equal_a_recount()
        walk.nobody_is_lost()
        walk.the_index_and_the_columns_are_sound()
    walk.teardown()
    return walk


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoadReturnsToZeroUnderAnyInterleaving = LedgerMachine.TestCase
