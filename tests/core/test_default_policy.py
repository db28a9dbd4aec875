"""The default policy in a Router: replicas that prefill in parallel, and stalls of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.request_filter import LEARN_AFTER_S
from gorgo.core.latency.prefill import LONGEST_AGAIN_S, MOST_AT_ONCE, ParallelPrefills, PrefillQueue
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Action, Dispatch, Hold
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted, timed

# --- Replicas that prefill in parallel, under the default policy with its queue, and those that do not.


RTT_S = 0.01
#: From a first token to the end of its answer.
DECODE_S = 0.3
#: When what was learned at the start must hold.
SETTLED_S = 10.0
#: Seconds of a prefill of so many tokens.
Prefill = Callable[[int], float]


class Engines:
    """One or more engines behind one URL, each with one queue; `None` is one for every request."""

    def __init__(self, prefill_s: Prefill, engines: int | None) -> None:
        self._prefill_s = prefill_s
        self._free_s = None if engines is None else [0.0] * engines

    def first_token_s(self, tokens: int, *, now: float) -> float:
        if self._free_s is None:
            return now + self._prefill_s(tokens)
        engine = self._free_s.index(min(self._free_s))
        self._free_s[engine] = max(self._free_s[engine], now) + self._prefill_s(tokens)
        return self._free_s[engine]


class Run:
    """Replicas, and Poisson arrivals for so long, of which a share is streamed."""

    def __init__(
        self,
        policy: str,
        prefill_s: Prefill,
        *,
        engines: int | None = None,
        replicas: int = 2,
        rate: float = 16.0,
        tokens: tuple[int, int] = (500, 9_890),
        seed: int = 0,
        lasts_s: float = 18.0,
        streamed: float = 1.0,
        decode_s: tuple[float, float] = (DECODE_S, DECODE_S),
    ) -> None:
        names = "abcd"[:replicas]
        self.router = Router(
            [ReplicaSpec(name, "here") for name in names],
            make_policy(policy),
            rng=np.random.default_rng(1),
            boot_id="boot",
            limits=RouterLimits(overload=OverloadLimits(queue_enabled=True)),
        )
        self._engines = {name: Engines(prefill_s, engines) for name in names}
        for name in self._engines:
            self.router.replicas.on_probe(name, RTT_S, now=0.0)
        self.ttft_s: dict[str, float] = {}
        self._requests: dict[str, RouteRequest] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._decode_s: dict[str, float] = {}
        rng, kinds, at_s = np.random.default_rng(seed), np.random.default_rng(seed + 1000), 0.0
        while (at_s := at_s + rng.exponential(1 / rate)) < lasts_s:
            name = f"r{len(self._requests)}"
            is_streamed = bool(kinds.random() < streamed)
            request = RouteRequest(name, at_s, int(rng.integers(*tokens)), b"", 64.0, 1, streamed=is_streamed)
            self._decode_s[name] = kinds.uniform(*decode_s)
            self._requests[name] = request
            self._at(at_s, lambda now, request=request: self._arrive(request, now))  # type: ignore[misc]
        while self._events:
            now, _, event = heappop(self._events)
            event(now)
            due_s = self.router.next_timer()
            if due_s is not None and now < lasts_s + 300.0:
                self._at(max(due_s, now + 1e-3), self._timer)

    def p95_s(self, since_s: float = SETTLED_S) -> float:
        late = [self.ttft_s[name] for name, request in self._requests.items() if request.received_s >= since_s]
        return float(np.quantile(late, 0.95))

    def at_once(self, name: str = "a") -> int:
        (snapshot,) = [each for each in self.router.view.snapshots(now=0.0) if each.name == name]
        return snapshot.parallel_prefills

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), event))

    def _arrive(self, request: RouteRequest, now: float) -> None:
        own, others = self.router.submit(request, now=now)
        self._do([*others, own], now)

    def _timer(self, now: float) -> None:
        due_s = self.router.next_timer()
        if due_s is not None and due_s <= now:
            self._do(self.router.handle_timer(now=now), now)

    def _do(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Dispatch):
                tokens = self._requests[action.request_id].prompt_tokens
                first_s = self._engines[action.replica].first_token_s(tokens, now=now + RTT_S / 2) + RTT_S / 2
                self._at(first_s, lambda at, attempt=action: self._first_token(attempt, at))  # type: ignore[misc]

    def _first_token(self, attempt: Dispatch, now: float) -> None:
        self.ttft_s[attempt.request_id] = now - self._requests[attempt.request_id].received_s
        if self._requests[attempt.request_id].streamed:
            self._do(self.router.on_first_token(attempt.attempt_id, now=now), now)
        self._at(now + self._decode_s[attempt.request_id], lambda at: self._end(attempt, at))

    def _end(self, attempt: Dispatch, now: float) -> None:
        own, others = self.router.on_finish(attempt.attempt_id, Outcome(AttemptResult.COMPLETED, status=200), now=now)
        assert own is None
        self._do(others, now)


def drawn(seed: int) -> Prefill:
    """Return times that have nothing to do with the prompt."""
    rng = np.random.default_rng(seed)
    return lambda _tokens: rng.uniform(0.3, 0.86)


ALWAYS = 0.86


@pytest.mark.parametrize("policy", ["gorgo-ms", "gorgo-residual"])
@pytest.mark.parametrize(
    "prefill_s",
    [lambda tokens: tokens / 11_500, lambda _tokens: ALWAYS, drawn(9), lambda tokens: 0.3 + tokens / 20_000],
    ids=["as the prior says", "always the same", "by chance", "a constant and a rate"],
)
def test_replicas_that_prefill_in_parallel_are_as_quick_as_under_least_load(policy: str, prefill_s: Prefill) -> None:
    """16 requests a second, each with a first token within 0.86 s wherever it goes."""
    assert Run(policy, prefill_s).p95_s() <= 1.1 * Run("least-load", prefill_s).p95_s()


@pytest.mark.parametrize("policy", ["gorgo-ms", "gorgo-residual"])
@pytest.mark.parametrize(
    "prefill_s",
    [lambda tokens: tokens / 11_500, lambda _tokens: ALWAYS, lambda tokens: tokens / 60_000],
    ids=["as the prior says", "always the same", "quicker than the prior"],
)
def test_answers_in_one_piece_are_as_quick_as_under_least_load_where_nothing_shows_the_backlog(
    policy: str, prefill_s: Prefill
) -> None:
    of_policy = Run(policy, prefill_s, streamed=0.0).p95_s(since_s=0.0)
    assert of_policy <= 1.1 * Run("least-load", prefill_s, streamed=0.0).p95_s(since_s=0.0)


@pytest.mark.parametrize("policy", ["gorgo-ms", "gorgo-residual"])
@pytest.mark.parametrize("streamed", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "prefill_s",
    [lambda tokens: tokens / 11_500, lambda _tokens: ALWAYS, lambda tokens: tokens / 60_000],
    ids=["as the prior says", "always the same", "quicker than the prior"],
)
def test_streams_among_answers_in_one_piece_are_as_quick_as_under_least_load(
    policy: str, streamed: float, prefill_s: Prefill
) -> None:
    of_policy = Run(policy, prefill_s, streamed=streamed).p95_s()
    assert of_policy <= 1.1 * Run("least-load", prefill_s, streamed=streamed).p95_s()


def test_mixed_traffic_is_as_quick_as_under_least_load_for_nearly_all_fleets_that_prefill_in_parallel() -> None:
    """Random shares of streams, numbers of replicas and of engines behind each, loads, and lengths of answers."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(30):
        engines, replicas = int(rng.choice([2, 4, 8, 16])), int(rng.integers(1, 5))
        streamed = float(rng.choice([0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]))
        rate = min(20.0, rng.uniform(0.3, 0.7) * replicas * engines / 0.56)
        decode_s = ((0.02, 0.1), (0.3, 0.3), (0.5, 6.0))[int(rng.integers(3))]
        of_policy, least = (
            Run(
                policy,
                lambda tokens: 0.3 + tokens / 20_000,
                engines=engines,
                replicas=replicas,
                rate=rate,
                streamed=streamed,
                decode_s=decode_s,
                lasts_s=15.0,
            )
            for policy in ("gorgo-ms", "least-load")
        )
        ratios.append(of_policy.p95_s() / least.p95_s())
    assert float(np.quantile(ratios, 0.9)) <= 1.1
    assert max(ratios) <= 2.0


@pytest.mark.parametrize(
    ("replicas", "rate", "decode_s"),
    [(1, 1.358, (0.5, 6.0)), (2, 3.4262, (0.02, 0.1)), (3, 3.5313, (0.02, 0.1)), (4, 9.8918, (0.02, 0.1))],
)
def test_few_streams_a_second_are_not_held_back_until_there_is_a_verdict(
    replicas: int, rate: float, decode_s: tuple[float, float]
) -> None:
    """Two engines behind each URL: too few requests overlap by themselves within ten seconds."""
    of_policy, least = (
        Run(
            policy,
            lambda tokens: 0.3 + tokens / 20_000,
            engines=2,
            replicas=replicas,
            rate=rate,
            decode_s=decode_s,
            lasts_s=15.0,
        )
        for policy in ("gorgo-ms", "least-load")
    )
    assert of_policy.p95_s() <= 1.1 * least.p95_s()


@pytest.mark.parametrize(("last_s", "begun"), [(10.5, 2), (10.9, 1)])
def test_a_second_prefill_begins_beside_the_first_while_one_queue_is_doubted(last_s: float, begun: int) -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=5))
    router = make_router(policy="gorgo-ms", replicas=[timed("a")], limits=limits)
    queue = router._fleet.replicas["a"].prefill_queue
    queue.add("alone", arrives_s=0.0, prior_s=1.0, streamed=True)
    queue.on_first_token("alone", engine_s=1.0)
    # The token of the second of two that arrive together comes with the first's, or after another prefill.
    for name in "xy":
        queue.add(name, arrives_s=10.0, prior_s=0.5, streamed=True)
    queue.on_first_token("x", engine_s=10.5)
    queue.on_first_token("y", engine_s=last_s)
    assert queue.speed.parallel.count == 1, "no verdict yet"
    actions = []
    for number in range(3):
        request = a_request(f"r{number}", received_s=20.0, prompt_tokens=20_000, streamed=True)
        actions.append(router.submit(request, now=20.0)[0])
    assert [type(action) for action in actions] == [Dispatch] * begun + [Hold] * (3 - begun)


@pytest.mark.parametrize("streamed", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("tokens_per_s", [6_000, 11_500, 40_000])
def test_mixed_traffic_does_not_make_several_queues_of_one(streamed: float, tokens_per_s: int) -> None:
    def prefill_s(tokens: int) -> float:
        return 0.012 + tokens / tokens_per_s

    run = Run("gorgo-ms", prefill_s, engines=1, rate=1.4 * tokens_per_s / 5_195, streamed=streamed)
    assert (run.at_once("a"), run.at_once("b")) == (1, 1)


def test_a_stream_behind_answers_in_one_piece_shows_how_long_all_of_them_took() -> None:
    queue = PrefillQueue()
    for start_s in range(0, 600, 30):
        for before in range(3):  # they show that there is one queue
            queue.add(f"s{start_s}{before}", arrives_s=float(start_s), prior_s=1.0, streamed=True)
        for before in range(3):
            queue.on_first_token(f"s{start_s}{before}", engine_s=start_s + 2.0 * (before + 1))
        for before in range(3):
            queue.add(f"m{start_s}{before}", arrives_s=start_s + 10.0, prior_s=1.0, streamed=before == 2)
        queue.on_first_token(f"m{start_s}2", engine_s=start_s + 16.0)
        queue.check()
    assert 1.5 < queue.speed.factor < 2.1, "three prefills in six seconds, not one"


def test_answers_in_one_piece_of_a_quicker_engine_with_one_queue_are_not_held_at_the_prior_s_speed() -> None:
    of_policy, least = (
        Run(policy, lambda tokens: tokens / 60_000, engines=1, streamed=0.0).p95_s(since_s=0.0)
        for policy in ("gorgo-ms", "least-load")
    )
    assert of_policy <= 1.1 * least


def test_the_backlog_holds_back_answers_in_one_piece_while_first_tokens_have_shown_one_queue() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=5))
    router = make_router(policy="gorgo-ms", replicas=[timed("a")], limits=limits)

    def submit(name: str, *, now: float, streamed: bool = False) -> Action:
        own, _ = router.submit(a_request(name, received_s=now, prompt_tokens=1000, streamed=streamed), now=now)
        return own

    unknown = [submit(f"v{number}", now=0.0) for number in range(2)]
    assert [type(action) for action in unknown] == [Dispatch] * 2, "nothing is known yet"
    for action in unknown:
        router.on_finish(dispatched([action]).attempt_id, COMPLETED, now=2.0)
    queue = router._fleet.replicas["a"].prefill_queue
    for second in range(10, 40, 10):
        for name in "xyz":
            queue.add(f"{name}{second}", arrives_s=float(second), prior_s=1.0, streamed=True)
        for before, name in enumerate("xyz"):
            queue.on_first_token(f"{name}{second}", engine_s=second + 1.0 + before)
    known_until_s = queue.speed.parallel.confirmed_until_s
    assert known_until_s > 33.0
    assert isinstance(submit("w0", now=33.0), Dispatch)
    assert isinstance(submit("w1", now=33.0), Hold), "a second of prefill is before it"
    due_s = router.next_timer()
    assert due_s is not None
    assert due_s <= known_until_s, "the end of what is known needs no event"
    router.abandon("w1", now=33.0)
    late = 33.0 + LONGEST_AGAIN_S + 1.0
    assert [type(submit(f"x{number}", now=late)) for number in range(6)] == [Dispatch] * 4 + [Hold] * 2


def test_ranks_behind_one_url_are_counted() -> None:
    run = Run("gorgo-ms", lambda tokens: tokens / 11_500, engines=4, rate=7.0)
    assert run.p95_s() <= 1.1 * Run("least-load", lambda tokens: tokens / 11_500, engines=4, rate=7.0).p95_s()
    assert 2 <= max(run.at_once("a"), run.at_once("b")) <= 8


@pytest.mark.parametrize("tokens_per_s", [6_000, 11_500, 20_000])
@pytest.mark.parametrize("rate", [3.0, 6.0])
def test_an_engine_with_one_queue_is_taken_for_one_at_any_load(tokens_per_s: int, rate: float) -> None:
    run = Run("gorgo-ms", lambda tokens: 0.012 + tokens / tokens_per_s, engines=1, rate=rate, tokens=(200, 6_000))
    assert (run.at_once("a"), run.at_once("b")) == (1, 1)


def test_a_request_that_waits_behind_others_shows_that_there_is_one_queue() -> None:
    parallel = ParallelPrefills()
    known = []
    for second in range(0, 100, 10):
        arrivals = [parallel.on_arrival(before) for before in range(3)]
        for before, arrival in enumerate(arrivals):
            parallel.on_first_token(arrival, arrived_s=second, engine_s=second + 1.0 + before, prior_s=1.0)
            known.append(not parallel.needs_evidence(engine_s=second + 1.0 + before))
    assert parallel.count == 1
    assert not all(known[:3]), "nothing is known before two have met"
    assert any(known), "it is known for a while"
    assert parallel.needs_evidence(engine_s=100.0 + 61.0), "and asked again"


def test_engines_that_leave_a_url_are_noticed() -> None:
    parallel = ParallelPrefills()
    for second in range(0, 100, 10):
        arrivals = [parallel.on_arrival(before) for before in range(4)]
        for arrival in arrivals:
            parallel.on_first_token(arrival, arrived_s=second, engine_s=second + 1.0, prior_s=1.0)
    assert parallel.count >= 4
    for second in range(100, 400, 10):
        arrivals = [parallel.on_arrival(before) for before in range(4)]
        for before, arrival in enumerate(arrivals):
            parallel.on_first_token(arrival, arrived_s=second, engine_s=second + 1.0 + before, prior_s=1.0)
    assert parallel.count == 1


def test_one_more_may_begin_while_fewer_go_on_than_the_engine_does_at_once() -> None:
    queue = PrefillQueue()
    queue.speed.parallel.count = 2
    queue.add("first", arrives_s=10.0, prior_s=1.0, streamed=True)
    assert (queue.drained_at_s, queue.backlog_s) == (10.0, 0.5)
    queue.add("second", arrives_s=10.5, prior_s=1.0, streamed=True)
    assert (queue.drained_at_s, queue.backlog_s) == (11.0, 1.0)
    queue.add("third", arrives_s=10.5, prior_s=2.0, streamed=True)
    assert queue.drained_at_s == 11.5, "the third begins at 11, and the second ends before it"
    assert queue.head_due_s == 11.0
    queue.check()


def test_a_queue_without_visible_ends_shows_nothing() -> None:
    queue = PrefillQueue()
    first = queue.speed.parallel.on_arrival(0)
    queue.speed.parallel.on_first_token(first, arrived_s=0.0, engine_s=1.0, prior_s=1.0)
    assert queue.needs_evidence(engine_s=2.0)
    queue.add("whole", arrives_s=2.0, prior_s=1.0, streamed=False)
    assert not queue.needs_evidence(engine_s=2.0)


def test_no_more_are_taken_to_go_on_at_once_than_there_may_be() -> None:
    parallel = ParallelPrefills()
    for second in range(0, 200, 10):
        arrivals = [parallel.on_arrival(before) for before in range(3 * MOST_AT_ONCE)]
        for arrival in arrivals:
            parallel.on_first_token(arrival, arrived_s=second, engine_s=second + 1.0, prior_s=1.0)
    assert parallel.count == MOST_AT_ONCE
    assert not parallel.needs_evidence(engine_s=1e9)


def test_learning_begins_only_when_a_request_has_waited() -> None:
    assert 0.2 < LEARN_AFTER_S < 1.0


# --- One stall of an engine costs it no more than the stall, under the default policy.


#: Four requests a second, each of 0.2 s of prefill on any of three replicas.
EVERY_S, TOKENS, PREFILL_S = 0.25, 200, 0.2
STALL_S = 8.0


class Fleet:
    """Three replicas, each with one queue, of which one stops for a while."""

    def __init__(self) -> None:
        self.router: Router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in ("a", "b", "c")])
        for name in ("a", "b", "c"):
            for _ in range(20):
                self.router.replicas.on_probe(name, 0.01, now=0.0)
        self._rng = np.random.default_rng(0)
        self._free_s = dict.fromkeys("abc", 0.0)
        self._open: list[tuple[float, str]] = []
        self.sent: list[tuple[float, str]] = []
        self.now = 0.0

    def run(self, until_s: float, *, stopped: str | None = None, resumes_s: float = 0.0) -> None:
        while self.now < until_s:
            self.now += self._rng.exponential(EVERY_S)
            self._answer()
            request = a_request(f"r{len(self.sent)}", prompt_tokens=TOKENS, received_s=self.now)
            sent: Dispatch = dispatched(submitted(self.router, request, now=self.now))
            self.sent.append((self.now, sent.replica))
            begins_s = max(self.now, self._free_s[sent.replica])
            if sent.replica == stopped:
                begins_s = max(begins_s, resumes_s)
            self._free_s[sent.replica] = begins_s + PREFILL_S
            self._open.append((self._free_s[sent.replica], sent.attempt_id))

    def share(self, name: str, since_s: float, until_s: float) -> float:
        names = [replica for at_s, replica in self.sent if since_s <= at_s < until_s]
        return names.count(name) / len(names)

    def _answer(self) -> None:
        for at_s, attempt_id in sorted(entry for entry in self._open if entry[0] <= self.now):
            self.router.on_first_token(attempt_id, now=at_s)
            self.router.on_finish(attempt_id, COMPLETED, now=at_s)
        self._open = [entry for entry in self._open if entry[0] > self.now]


@pytest.mark.parametrize("probe_fails", [False, True])
def test_a_replica_has_its_fair_share_within_twenty_seconds_of_a_stall(probe_fails: bool) -> None:
    fleet = Fleet()
    fleet.run(60.0)
    assert fleet.share("a", 20.0, 60.0) > 0.2
    if probe_fails:
        fleet.run(64.0, stopped="a", resumes_s=60.0 + STALL_S)
        fleet.router.replicas.on_probe("a", None, now=fleet.now)
    fleet.run(60.0 + STALL_S, stopped="a", resumes_s=60.0 + STALL_S)
    fleet.run(120.0)
    end_s = 60.0 + STALL_S
    assert fleet.share("a", end_s + 20.0, end_s + 30.0) > 0.25


def test_what_waits_while_a_probe_fails_teaches_no_speed() -> None:
    fleet = Fleet()
    fleet.run(10.0)
    (before,) = [row.prefill_slowdown for row in fleet.router.view.snapshots(now=10.0) if row.name == "a"]
    sent = dispatched(submitted(fleet.router, a_request("stalls", pinned_replica="a", received_s=20.0), now=20.0))
    fleet.router.replicas.on_probe("a", None, now=24.0)
    fleet.router.on_first_token(sent.attempt_id, now=28.0)
    (after,) = [row.prefill_slowdown for row in fleet.router.view.snapshots(now=28.0) if row.name == "a"]
    assert after == before
