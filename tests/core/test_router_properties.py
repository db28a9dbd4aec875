"""The ledger under any interleaving: after every event the kept columns equal a naive recount, and zero at the end.

The events come in any order and as often as hypothesis likes: first tokens and finishes twice, of attempts long ended
or never known, while replicas leave, come back, drain, fail their probes and are readmitted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.actions import Action, Dispatch, Reject
from gorgo.core.health import EjectionLimits
from gorgo.core.path import Windows
from gorgo.core.request import Ending, EngineSample, OpenConnection, Outcome
from gorgo.core.router import Router, RouterLimits
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import a_request, blocks_of, specs

NAMES = ("a", "b", "c", "d", "e")
LIMITS = RouterLimits(
    max_attempts=3,
    max_in_flight=12,
    samples_kept=10_000,
    stale_after_s=30.0,
    max_index_blocks=20,
    ejection=EjectionLimits(failures=2, base_s=2.0, max_s=8.0),
)
fleets = st.lists(st.sampled_from(NAMES), unique=True, max_size=5)
names = st.sampled_from(NAMES)


@dataclass
class Open:
    """The naive twin of an open attempt. `joined` tells one stay of a replica in the fleet from the next."""

    replica: str
    joined: int
    tokens: int
    waiting: bool = True


class LedgerMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 1000))
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
        self.seen: list[str] = ["never/1"]
        self.samples = 0

    def follow(self, actions: list[Action], request_id: str) -> None:
        for action in actions:
            if isinstance(action, Reject):
                assert action.request_id == request_id
                continue
            assert isinstance(action, Dispatch)
            assert action.attempt_id not in self.open
            assert action.replica in self.fleet
            self.tried[request_id].append(action.replica)
            assert len(set(self.tried[request_id])) == len(self.tried[request_id]) <= LIMITS.max_attempts
            self.open[action.attempt_id] = Open(action.replica, self.joined[action.replica], self.tokens[request_id])
            self.seen.append(action.attempt_id)

    @rule(
        tokens=st.integers(0, 10**6),
        words=st.lists(st.integers(0, 2), max_size=6),
        pinned=st.none() | names,
        streamed=st.booleans(),
    )
    def submit(self, tokens: int, words: list[int], pinned: str | None, streamed: bool) -> None:
        request_id = f"r{len(self.tokens)}"
        self.tokens[request_id], self.tried[request_id] = tokens, []
        request = a_request(
            request_id,
            prompt_tokens=tokens,
            blocks=blocks_of(*words),
            received_s=self.now,
            pinned_replica=pinned,
            streamed=streamed,
            body_bytes=4 * tokens,
        )
        actions = self.router.submit(request, now=self.now)
        assert len(actions) == 1
        self.follow(actions, request_id)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        attempt_id = data.draw(st.sampled_from(self.seen))
        assert self.router.on_first_token(attempt_id, now=self.now) == []
        if attempt_id in self.open:
            self.open[attempt_id].waiting = False

    @rule(data=st.data(), ending=st.sampled_from(list(Ending)))
    def finish(self, data: st.DataObject, ending: Ending) -> None:
        self.end(data.draw(st.sampled_from(self.seen)), ending)

    def end(self, attempt_id: str, ending: Ending) -> None:
        actions = self.router.on_finish(attempt_id, Outcome(ending), now=self.now)
        was_open = self.open.pop(attempt_id, None) is not None
        self.samples += was_open and not any(isinstance(action, Dispatch) for action in actions)
        assert was_open or actions == []
        self.follow(actions, attempt_id.split("/")[0])

    @rule(fleet=fleets)
    def set_fleet(self, fleet: list[str]) -> None:
        for name in set(self.fleet) - set(fleet):
            self.joined[name] += 1
        self.fleet = fleet
        self.router.set_fleet(specs(*fleet), now=self.now)

    @rule(data=st.data(), draining=st.booleans())
    def drain(self, data: st.DataObject, draining: bool) -> None:
        if self.fleet:
            self.router.drain(data.draw(st.sampled_from(self.fleet)), draining, now=self.now)

    @rule(name=names, rtt_s=st.none() | st.floats(0, 1))
    def probe(self, name: str, rtt_s: float | None) -> None:
        assert self.router.on_probe(name, rtt_s, now=self.now) == []

    @rule(name=names, window=st.none() | st.floats(1_000, 1e6))
    def path(self, name: str, window: float | None) -> None:
        connection = None if window is None else OpenConnection(Windows(window, 65_535.0), self.now)
        assert self.router.on_path(name, connection, now=self.now) == []

    @rule(name=names, used=st.none() | st.integers(0, 1000), capacity=st.none() | st.integers(0, 600))
    def scrape(self, name: str, used: int | None, capacity: int | None) -> None:
        sample = EngineSample(used_tokens=used, kv_capacity_tokens=capacity)
        assert self.router.on_engine_sample(name, sample, now=self.now) == []

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def set_policy(self, policy: str) -> None:
        self.router.set_policy(make_policy(policy), now=self.now)

    @rule(step_s=st.floats(0, 40))
    def time_passes(self, step_s: float) -> None:
        self.now += step_s
        assert self.router.handle_timer(now=self.now) == []
        due = self.router.next_timer()
        assert due is None or due > self.now

    @invariant()
    def columns_equal_a_recount(self) -> None:
        rows = self.router.fleet_view(now=self.now)
        assert sorted(row.name for row in rows) == sorted(self.fleet)
        for row in rows:
            mine = [one for one in self.open.values() if (one.replica, one.joined) == (row.name, self.joined[row.name])]
            assert row.in_flight_requests == len(mine)
            assert row.in_flight_tokens == sum(one.tokens for one in mine)
            assert row.queued_prefill_tokens == sum(one.tokens for one in mine if one.waiting)
        assert self.router.in_flight == len(self.open)
        assert len(self.router.samples) == self.samples

    @invariant()
    def the_index_is_sound(self) -> None:
        self.router.index.check()

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        while self.open:
            self.end(next(iter(self.open)), Ending.FAILED_BEFORE_CONTENT)
        self.columns_equal_a_recount()
        for row in self.router.fleet_view(now=self.now):
            assert (row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens) == (0, 0, 0)
            # Some round trips later: the last cancel has to get there.
            assert next(one for one in self.router.fleet_view(now=self.now + 100.0) if one.name == row.name).busy_s == 0


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLoadReturnsToZeroUnderAnyInterleaving = LedgerMachine.TestCase
