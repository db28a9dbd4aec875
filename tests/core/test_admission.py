"""What counts towards a deadline, who passes whom, and when the proxy looks again. One second is a thousand tokens."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.admission import MAX_CLIENTS, MAX_RETRY_S, MIN_RETRY_S, FairQueue, QueuedRequest, RetryAfter, ShedTimers
from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Hedge, Hold, Reject
from gorgo.core.messages.request import EngineSample, RouteRequest
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    dispatched,
    fail_on,
    finished,
    make_router,
    rejected,
    submitted,
    timed,
)
from tests.core.test_deadline import HOLDING, asked, until
from tests.core.test_deadline import held as held_test_deadline


def at_hand(*names: str, **overload: object) -> Router:
    """Replicas that prefill 1,000 tokens a second and are no way off, so that times are those of prefills alone."""
    limits = replace(HOLDING, overload=replace(HOLDING.overload, **overload))  # type: ignore[arg-type]
    replicas = [timed(name, max_running_requests=4) for name in names]
    router = Router(replicas, make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="boot", limits=limits)
    for name in names:
        router.replicas.on_probe(name, 0.0, now=0.0)
    return router


@pytest.mark.parametrize(
    ("received_s", "tokens", "before", "slo_s", "served"),
    [
        (3.0, 512, 1024, 1.536, True),  # 1.024 s of work before it and 0.512 s of its own: just in time
        (3.0, 512, 1024, 1.535, False),
        (2.5, 512, 1024, 2.036, True),  # half a second on its way to the proxy counts
        (2.5, 512, 1024, 2.035, False),
        (2.0, 512, 1024, 1.536, False),
        (2.0, 512, 0, 1.512, True),  # idle: the second that it has waited and its own half
        (2.0, 512, 0, 1.511, False),
    ],
)
def test_time_since_it_was_received_counts_towards_a_deadline_on_arrival(
    received_s: float, tokens: int, before: int, slo_s: float, served: bool
) -> None:
    router = at_hand("a")
    if before:
        dispatched(submitted(router, asked("before", before, now=3.0), now=3.0))
    (action,) = submitted(router, asked("r", tokens, now=received_s, slo_s=slo_s + 1e-9), now=3.0)
    assert isinstance(action, Reject) is not served


@pytest.mark.parametrize(("slo_s", "dropped"), [(1.54, True), (1.55, False)])
def test_time_in_the_queue_counts_towards_a_deadline(slo_s: float, dropped: bool) -> None:
    """Half a second waited, half a second of its own, 90 ms of a way that has grown, and 455 ms of work left by then.

    The other replica is idle and serves another model.
    """
    router = at_hand("a", "idle")
    router.replicas.set_fleet([replace(timed("a"), models=("m",)), replace(timed("idle"), models=("n",))], now=0.0)
    dispatched(submitted(router, asked("before", 1000, model="m"), now=0.0))
    assert held_test_deadline(submitted(router, asked("r", 500, slo_s=slo_s, model="m"), now=0.0))
    actions = router.replicas.on_probe("a", 0.3, now=0.5)
    assert [isinstance(action, Reject) for action in actions] == [True] * dropped
    assert router.queued == (not dropped)


def test_time_before_the_arrival_is_missing_at_the_last_chance() -> None:
    """Received at 0, here since 0.4: with half a second of its own it has to go by 1.3, when no place has come."""
    router = at_hand("a", max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("before", 100), now=0.0))
    router.on_first_token(first.attempt_id, now=0.105)
    assert held_test_deadline(submitted(router, asked("r", 500, now=0.0, slo_s=1.8), now=0.4))
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(1.3)


def test_a_prompt_too_long_for_its_deadline_counts_its_moment_from_its_receipt() -> None:
    """It may wait 0.3 s at most: received at 0 and here since 0.2, it goes at 0.3."""
    router = at_hand("a")
    dispatched(submitted(router, asked("before", 1000), now=0.0))
    assert held_test_deadline(submitted(router, asked("long", 10_000, now=0.0, slo_s=2.0), now=0.2))
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(0.3)
    assert (
        rejected(submitted(router, asked("late", 10_000, now=0.0, slo_s=2.0), now=0.31)).code == "deadline_unreachable"
    )


def test_a_default_deadline_counts_for_queued_requests_too() -> None:
    router = at_hand("a", max_concurrency_per_replica=1, slo_ttft_s=1.8)
    first = dispatched(submitted(router, asked("before", 100), now=0.0))
    router.on_first_token(first.attempt_id, now=0.105)
    assert held_test_deadline(submitted(router, asked("r", 500), now=0.1))
    ((when, _),) = until(router)
    assert when == pytest.approx(1.3)


def test_queued_and_dispatched_work_is_shared_by_the_healthy_replicas() -> None:
    """3 s there and 2 s here on one of two replicas, the other one idle and full: (3 + 2) / 2; ejected ones do none."""
    router = at_hand("a", "b", queue_max_requests=1, max_concurrency_per_replica=1)
    for number, tokens in enumerate((2000, 3000)):
        dispatched(submitted(router, asked(f"there-{number}", tokens), now=0.0))
    assert held_test_deadline(submitted(router, asked("here", 2000), now=0.0))
    assert rejected(submitted(router, asked("r", 100), now=0.0)).retry_after_s == pytest.approx((2.0 + 3.0 + 2.0) / 2)


def test_queued_work_without_a_replica_counts_by_the_fastest_one() -> None:
    """5 s of prompt, or half a second on the fast one; the two that are there share what waits: 30 s in all."""
    router = at_hand("a", "b", queue_max_requests=60)
    fast = replace(timed("b", max_running_requests=4), prefill_tokens_per_s=10_000.0)
    router.replicas.set_fleet([timed("a", max_running_requests=4), fast], now=0.0)
    for name in "ab":
        router.replicas.drain(name, now=0.0)
    for number in range(60):
        assert held_test_deadline(submitted(router, asked(f"r{number}", 5000), now=0.0))
    assert rejected(submitted(router, asked("more", 5000), now=0.0)).retry_after_s == pytest.approx(60 * 0.5 / 2)


def test_a_queued_request_goes_to_a_replica_that_joins_at_the_next_event() -> None:
    router = at_hand("a")
    router.replicas.drain("a", now=0.0)
    assert held_test_deadline(submitted(router, asked("r", 100), now=0.0))
    assert router.handle_timer(now=0.1) == []
    router.replicas.set_fleet([timed("a", max_running_requests=4), timed("b", max_running_requests=4)], now=0.11)
    due_s = router.next_timer()
    assert due_s is not None
    assert due_s <= 0.11
    (sent,) = router.handle_timer(now=0.11)
    assert isinstance(sent, Dispatch)
    assert (sent.request_id, sent.replica) == ("r", "b")


def test_a_rejection_without_a_healthy_replica_has_the_shortest_retry_time() -> None:
    router = at_hand("a", queue_max_requests=0)
    router.replicas.drain("a", now=0.0)
    refusal = rejected(submitted(router, asked("r"), now=0.0))
    assert (refusal.code, refusal.retry_after_s) == ("queue_full", 1.0)


def test_a_request_whose_replica_came_back_waits_for_a_slot_beyond_its_patience() -> None:
    """Nobody from 0.2 on, which it bears for 2 s; from 1.7 on a replica that is full, so it waits for that one."""
    router = at_hand("a", max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("before", 100), now=0.0))
    router.on_first_token(first.attempt_id, now=0.105)
    router.replicas.drain("a", now=0.2)
    assert held_test_deadline(submitted(router, asked("r", 100), now=0.2))
    router.replicas.drain("a", False, now=1.7)
    assert [router.handle_timer(now=now) for now in (1.7, 2.2, 3.0)] == [[], [], []]
    assert dispatched(finished(router, first.attempt_id, COMPLETED, now=4.0)).request_id == "r"


def two_models(**overload: object) -> Router:
    """`a` serves the model m; the other replica is idle and serves n, so that not all are saturated."""
    router = at_hand("a", "idle", **overload)
    busy, idle = timed("a", max_running_requests=4), timed("idle", max_running_requests=4)
    router.replicas.set_fleet([replace(busy, models=("m",)), replace(idle, models=("n",))], now=0.0)
    return router


def test_a_request_without_a_replica_again_has_its_whole_patience_again() -> None:
    """None from 0.2 on, one that is full from 1.0 on, none from 5.0 on: it may wait until 7.0."""
    router = two_models(max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("before", 100, model="m"), now=0.0))
    router.on_first_token(first.attempt_id, now=0.105)
    router.replicas.drain("a", now=0.2)
    assert held_test_deadline(submitted(router, asked("r", 100, model="m"), now=0.2))
    router.replicas.drain("a", False, now=1.0)
    assert router.handle_timer(now=1.0) == []
    router.replicas.drain("a", now=5.0)
    assert [router.handle_timer(now=now) for now in (5.0, 6.9)] == [[], []]
    assert rejected(router.handle_timer(now=7.0)).code == "no_replica"


def test_no_timer_waits_for_the_backlog_of_a_replica_without_a_slot() -> None:
    """A second of prefill would be down to the limit at 0.8; the slot comes with an end, at no known time."""
    router = two_models(max_concurrency_per_replica=1)
    dispatched(submitted(router, asked("before", 1000, model="m"), now=0.0))
    assert held_test_deadline(submitted(router, asked("r", 100, model="m"), now=0.79))
    assert router.next_timer() == pytest.approx(0.84), "the next evaluation of all"


def test_a_better_replica_is_found_at_the_next_evaluation_not_before() -> None:
    """A second of prefill here, five seconds of way there, until a probe finds that it is none."""
    router = at_hand("a", "b")
    router.settings.set_limits(replace(router.settings.limits, rtt_ewma_alpha=1.0), now=0.0)
    router.replicas.on_probe("b", 5.0, now=0.0)
    assert dispatched(submitted(router, asked("before", 1000), now=0.0)).replica == "a"
    assert held_test_deadline(submitted(router, asked("r", 500), now=0.0))
    assert router.replicas.on_probe("b", 0.0, now=0.04) == []
    assert router.next_timer() == pytest.approx(0.09)
    assert dispatched(router.handle_timer(now=0.09)).replica == "b"


def test_queued_requests_for_other_replicas_are_offered_theirs_past_those_for_a_saturated_one() -> None:
    router = two_models()
    dispatched(submitted(router, asked("busy-m", 3000, model="m"), now=0.0))
    dispatched(submitted(router, asked("busy-n", 1000, model="n"), now=0.0))
    for name, model in (("m1", "m"), ("m2", "m"), ("n1", "n"), ("n2", "n")):
        assert held_test_deadline(submitted(router, asked(name, 100 if model == "m" else 500, model=model), now=0.0))
    assert [action.request_id for action in router.handle_timer(now=0.8)] == ["n1"]


def test_the_shortest_of_the_requests_without_a_replica_goes_first() -> None:
    """By the least prefill of any replica: the second one is ten times as fast."""
    router = at_hand("a", "b")
    fast = replace(timed("b", max_running_requests=4), prefill_tokens_per_s=10_000.0)
    router.replicas.set_fleet([timed("a", max_running_requests=4), fast], now=0.0)
    for name in "ab":
        router.replicas.drain(name, now=0.0)
    for name, tokens in (("long", 5000), ("short", 500), ("middle", 3000)):
        assert held_test_deadline(submitted(router, asked(name, tokens), now=0.0))
    router.replicas.drain("b", False, now=1.0)
    assert [action.request_id for action in router.handle_timer(now=1.0)] == ["short", "middle"]


def test_a_drained_replica_holds_up_no_request_for_an_open_one() -> None:
    router = at_hand("a", "b")
    router.replicas.drain("a", now=0.0)
    dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held_test_deadline(submitted(router, asked("r1", 1000), now=0.0))
    ((when, action),) = until(router)
    assert isinstance(action, Dispatch)
    assert when == pytest.approx(0.8)
    assert action.replica == "b"


def test_a_waiting_request_is_evaluated_again_after_a_moment() -> None:
    """Its replica is closed: an end elsewhere within 50 ms is no reason, one after that is."""
    router = at_hand("a", "b")
    blocks = b"".join(number.to_bytes(8, "little") for number in range(200))
    warm = dispatched(submitted(router, asked("warm", 12_800, blocks=blocks), now=0.0))
    other = {"a": "b", "b": "a"}[warm.replica]
    assert held_test_deadline(submitted(router, asked("r", 12_900, now=10.0, blocks=blocks), now=10.0))
    assert router.next_timer() == pytest.approx(10.05)
    assert dispatched(submitted(router, asked("next", 100, now=10.01), now=10.01)).replica == other
    assert router.next_timer() == pytest.approx(10.05)


def test_an_empty_queue_asks_for_no_timer() -> None:
    router = at_hand("a")
    assert router.next_timer() == 90.0, "when the probe of the start is stale"
    attempt = dispatched(submitted(router, asked("r"), now=0.0))
    router.on_finish(attempt.attempt_id, COMPLETED, now=1.0)
    assert router.next_timer() == 90.0


def test_limits_without_a_queue_close_no_replica() -> None:
    router = at_hand("a")
    router.settings.set_limits(
        replace(router.settings.limits, overload=replace(router.settings.limits.overload, queue_enabled=False)), now=0.0
    )
    assert all(isinstance(submitted(router, asked(f"r{n}", 5000), now=0.0)[-1], Dispatch) for n in range(5))


def one_of_a_kind(router: Router, client: str, *, now: float) -> bool:
    """Whether one more of `client` is turned away for being the second at a time."""
    action = submitted(router, asked(f"more-{now}", client=client, now=now), now=now)[-1]
    if isinstance(action, Reject):
        return action.code == "client_concurrency"
    router.abandon(f"more-{now}", now=now)
    return False


def test_a_request_that_waited_counts_for_its_client_until_its_answer_has_ended() -> None:
    router = at_hand("a")
    router.settings.set_limits(
        replace(router.settings.limits, clients=ClientRules(ClientLimits(max_in_flight=1))), now=0.0
    )
    dispatched(submitted(router, asked("before", 1000, client="other"), now=0.0))
    assert held_test_deadline(submitted(router, asked("r", 1000, client="c"), now=0.0))
    assert one_of_a_kind(router, "c", now=0.1)
    attempt = dispatched(router.handle_timer(now=0.8)).attempt_id
    assert one_of_a_kind(router, "c", now=0.9)
    router.on_finish(attempt, COMPLETED, now=1.0)
    assert not one_of_a_kind(router, "c", now=1.1)


@pytest.mark.parametrize("how", ["deadline", "queue", "patience"])
def test_a_request_that_was_turned_away_counts_for_its_client_no_more(how: str) -> None:
    router = at_hand("a", queue_max_requests=1)
    router.settings.set_limits(
        replace(router.settings.limits, clients=ClientRules(ClientLimits(max_in_flight=1))), now=0.0
    )
    dispatched(submitted(router, asked("before", 3000, client="other"), now=0.0))
    if how == "deadline":
        rejected(submitted(router, asked("r", 500, client="c", slo_s=2.0), now=0.0))
    elif how == "queue":
        assert held_test_deadline(submitted(router, asked("waits", 500, client="another"), now=0.0))
        rejected(submitted(router, asked("r", 500, client="c"), now=0.0))
        router.abandon("waits", now=0.0)
    else:
        router.replicas.drain("a", now=0.0)
        assert held_test_deadline(submitted(router, asked("r", 500, client="c"), now=0.0))
        rejected(router.handle_timer(now=2.0))
    assert not one_of_a_kind(router, "c", now=2.5)


@pytest.mark.parametrize(
    ("before", "now", "waits"), [(512, 0.312, False), (512, 0.311, True), (200, 0.0, False), (201, 0.0, True)]
)
def test_a_replica_is_open_up_to_its_limit_of_queued_prefill(before: int, now: float, waits: bool) -> None:
    router = at_hand("a")
    dispatched(submitted(router, asked("before", before), now=0.0))
    assert held_test_deadline(submitted(router, asked("r", now=now), now=now)) is waits


@pytest.mark.parametrize(("sent", "waits"), [(3, False), (4, True)])
def test_a_replica_has_as_many_slots_as_its_engine_runs_at_once(sent: int, waits: bool) -> None:
    router = at_hand("a")
    for number in range(sent):
        first = dispatched(submitted(router, asked(f"r{number}", 10, now=float(number)), now=float(number)))
        router.on_first_token(first.attempt_id, now=number + 0.015)
    assert held_test_deadline(submitted(router, asked("last", 10, now=9.0), now=9.0)) is waits


@pytest.mark.parametrize(("now", "waits"), [(0.4, False), (0.499, False), (0.65, True)])
def test_a_replica_whose_first_token_is_late_is_closed_by_its_queue_and_its_delay(now: float, waits: bool) -> None:
    """Due at 0.1 and late from 0.4 on: 100 ms that wait there, and 250 ms late at 0.65."""
    router = at_hand("a")
    dispatched(submitted(router, asked("stuck", 100), now=0.0))
    assert held_test_deadline(submitted(router, asked("r", now=now), now=now)) is waits
    if waits:
        assert router.next_timer() == 90.0, "no time opens it, a first token or an end does"


@given(
    st.lists(st.tuples(st.integers(1, 900), st.floats(0.0, 0.2), st.integers(0, 1)), min_size=30, max_size=60),
    st.sampled_from([1, 9]),
    st.booleans(),
    st.sampled_from([1500.0, 1e6]),
)
def test_the_columns_of_many_replicas_say_of_their_capacity_what_each_one_says(
    steps: list[tuple[int, float, int]], used: int, streamed: bool, kv_tokens: float
) -> None:
    router = at_hand(*[f"replica-{number}" for number in range(9)], queue_enabled=False)
    now, waiting, running = 0.0, list[str](), list[str]()
    saturation, replicas = router._admission.saturation, router._fleet.replicas.values()
    for number, replica in enumerate(replicas):
        router._fleet.columns.rtt_s[replica.slot] = 0.01 * number if number else nan
        router.replicas.on_engine_sample(replica.spec.name, EngineSample(kv_capacity_tokens=kv_tokens), now=0.0)
        replica.kv_demand.on_answer(0.1, prompt_tokens=1000, output_tokens=10)  # else nobody waits for memory
    for number, (tokens, pause_s, first_tokens) in enumerate(steps):
        request = asked(f"r{number}", tokens, now=now)
        request = replace(request, streamed=streamed or number > 0, pinned_replica=f"replica-{number % used}")
        waiting.append(dispatched(submitted(router, request, now=now)).attempt_id)
        now += pause_s
        for attempt in waiting[:first_tokens]:
            router.on_first_token(attempt, now=now)
        running, waiting = running + waiting[:first_tokens], waiting[first_tokens:]
        if len(running) > 3 * used:
            router.on_finish(running.pop(0), COMPLETED, now=now)
        others = set(replicas) - set(saturation.busy(now=now))
        assert all(saturation.has_capacity(each, now=now) for each in others)
        assert not any(saturation.free_at_s(each, now=now) for each in others)
        free_s = [at_s for each in replicas if (at_s := saturation.free_at_s(each, now=now)) is not None]
        assert saturation.next_free_s(now=now) == min(free_s, default=inf)
        assert saturation.any_has_capacity(now=now) == any(saturation.has_capacity(each, now=now) for each in replicas)


def test_a_replica_far_away_opens_half_a_round_trip_before_its_queue_is_at_the_limit() -> None:
    """One second of prefill from 0.1 on: at 0.8 the rest of it is 300 ms, of which 100 pass on the way."""
    router = at_hand("a")
    router.settings.set_limits(replace(router.settings.limits, rtt_ewma_alpha=1.0), now=0.0)
    router.replicas.on_probe("a", 0.2, now=0.0)
    dispatched(submitted(router, asked("before", 1000), now=0.0))
    assert held_test_deadline(submitted(router, asked("r"), now=0.0))
    assert router.next_timer() == pytest.approx(0.8)
    assert router.handle_timer(now=0.79) == []
    assert dispatched(router.handle_timer(now=0.8)).request_id == "r"


def only(*names: str, request_id: str = "r", **options: object) -> RouteRequest:
    return replace(a_request(request_id, **options), replicas=frozenset(names))  # type: ignore[arg-type]


def test_a_request_goes_to_the_best_replica_of_its_subset() -> None:
    router = make_router("a", "b", "c")
    sent = dispatched(submitted(router, only("c", "b", "unknown"), now=1.0))
    assert sent.replica == "b"
    assert sent.decision.candidates == ("b", "c")
    assert sent.decision.excluded == {"a": "subset"}


def test_a_retry_stays_in_the_subset() -> None:
    router = make_router("a", "b", "c")
    first = dispatched(submitted(router, only("b", "c"), now=1.0))
    again = dispatched(finished(router, first.attempt_id, FAILED, now=1.1))
    assert (first.replica, again.replica) == ("b", "c")
    assert rejected(finished(router, again.attempt_id, FAILED, now=1.2)).code == "upstream_failed"


def test_a_queued_request_waits_for_its_subset_while_others_are_free() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    first = dispatched(submitted(router, only("b"), now=0.0))
    assert submitted(router, only("b", request_id="next"), now=0.1) == [Hold("next")]
    assert router.on_first_token(first.attempt_id, now=0.3) == []
    assert dispatched(finished(router, first.attempt_id, COMPLETED, now=1.0)).replica == "b"


def test_a_late_request_is_hedged_within_its_subset_or_not_at_all() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, window_s=1000.0))
    for subset, second in (("ac", "c"), ("a", None)):
        router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b"), timed("c")], limits=limits)
        for number in range(2):
            before = dispatched(submitted(router, a_request(f"before-{number}", received_s=-9.0), now=-9.0)).attempt_id
            router.on_first_token(before, now=-8.9)
            router.on_finish(before, COMPLETED, now=-8.9)
        assert dispatched(submitted(router, only(*subset), now=0.0)).replica == "a"
        due_s = router.next_timer()
        assert due_s is not None
        hedges = router.handle_timer(now=due_s)
        assert [each.dispatch.replica for each in hedges if isinstance(each, Hedge)] == ([second] if second else [])


def test_ejection_for_failed_attempts_is_ignored_where_the_whole_subset_failed() -> None:
    router = make_router("a", "b", "c")
    fail_on(router, FAILED, 3)
    assert dispatched(submitted(router, a_request(), now=2.0)).replica == "b"
    sent = dispatched(submitted(router, only("a", request_id="s"), now=2.0))
    assert sent.replica == "a"
    assert sent.decision.excluded == {"b": "subset", "c": "subset"}


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ((), "no replica of the gateway's subset (0 names) is in the fleet"),
        (("x", "y"), "no replica of the gateway's subset (2 names) serves the request"),
        (("other",), "no replica of the gateway's subset (1 names) serves the request"),
    ],
)
def test_a_subset_without_a_replica_of_the_model_is_refused_at_once(subset: tuple[str, ...], message: str) -> None:
    replicas = [ReplicaSpec("a", "here", models=("m",)), ReplicaSpec("other", "here", models=("n",))]
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, no_replica_wait_s=5.0))
    router = make_router(replicas=replicas, limits=limits)
    refused = rejected(submitted(router, only(*subset, model="m"), now=1.0))
    assert (refused.status, refused.code, refused.message, refused.retry_after_s) == (503, "no_replica", message, 1.0)
    assert (router.in_flight, router.queued) == (0, 0)


def test_a_subset_of_draining_replicas_is_refused_or_waits_as_the_limits_say() -> None:
    for wait_s in (0.0, 5.0):
        limits = RouterLimits(overload=OverloadLimits(no_replica_wait_s=wait_s))
        router = make_router("a", "b", limits=limits)
        router.replicas.drain("b", now=1.0)
        answered = submitted(router, only("b"), now=1.0)
        if wait_s:
            assert answered == [Hold("r")]
            router.replicas.drain("b", False, now=2.0)
            answered = router.handle_timer(now=2.0)
            assert dispatched(answered).replica == "b"
        else:
            message = "none of the 1 replicas in the gateway's subset can take the request now"
            assert (rejected(answered).status, rejected(answered).message) == (503, message)


def test_a_stored_response_outside_the_subset_is_refused() -> None:
    router = make_router("a", "b")
    assert dispatched(submitted(router, only("a", "b", pinned_replica="a"), now=1.0)).replica == "a"
    assert rejected(submitted(router, only("b", request_id="s", pinned_replica="a"), now=1.0)).status == 503


def held(name: str, prefill_s: float = 1.0, *, client: str | None = None, priority: int = 0) -> QueuedRequest:
    request = RouteRequest(name, 0.0, 1, b"", 64.0, 0, client=client, priority=priority)
    return QueuedRequest(RequestState(request), prefill_s, enqueued_s=0.0)


def order(room: FairQueue) -> list[str]:
    return [waiting.request_id for waiting in room]


def filled(*waiting: QueuedRequest) -> FairQueue:
    room = FairQueue()
    for one in waiting:
        room.add(one)
    return room


def test_shortest_goes_first_and_equals_by_arrival() -> None:
    room = filled(held("long", 3.0), held("short", 1.0), held("later", 1.0))
    assert order(room) == ["short", "later", "long"]


def test_priority_goes_before_everything_else() -> None:
    room = filled(held("low", 0.1, priority=-1), held("normal", 9.0), held("high", 99.0, priority=1))
    assert order(room) == ["high", "normal", "low"]


def test_a_client_with_many_does_not_delay_one_with_a_single_request() -> None:
    many = [held(f"many-{number}", 1.0, client="many") for number in range(10)]
    room = filled(*many, held("single", 1.0, client="single"))
    assert order(room).index("single") <= 1


def test_who_has_been_served_goes_behind() -> None:
    first, second = held("a1", 1.0, client="a"), held("a2", 1.0, client="a")
    room = filled(first, second, held("b1", 1.5, client="b"))
    room.pop(first)
    assert order(room) == ["b1", "a2"]


def test_nobody_saves_up_by_staying_away() -> None:
    """`b` comes when `a` has been served for long: it does not get all of that time first."""
    room = filled(*(held(f"a{number}", 1.0, client="a") for number in range(20)))
    for _ in range(10):
        room.pop(next(iter(room)))
    for number in range(10):
        room.add(held(f"b{number}", 1.0, client="b"))
    assert sum(name.startswith("b") for name in order(room)[:10]) <= 6


def test_turns_are_by_prefill_not_by_requests() -> None:
    long = [held(f"long-{number}", 4.0, client="long") for number in range(4)]
    short = [held(f"short-{number}", 1.0, client="short") for number in range(16)]
    room, served = filled(*long, *short), {"long": 0.0, "short": 0.0}
    for _ in range(10):
        one = next(iter(room))
        served[one.state.request.client or ""] += one.prefill_s
        room.pop(one)
    assert abs(served["long"] - served["short"]) <= 4.0


def test_a_client_that_was_served_is_behind_until_the_others_have_caught_up() -> None:
    """`a` has had 3 s while `b` waited: its next one is behind the three of `b`, and the fourth came before it."""
    served = held("a1", 3.0, client="a")
    room = filled(served, *(held(f"b{number}", 1.0, client="b") for number in range(5)))
    room.pop(served)
    room.add(held("a2", 0.5, client="a"))
    assert order(room) == ["b0", "b1", "b2", "b3", "a2", "b4"]


def test_a_removed_request_is_not_charged() -> None:
    gone = held("a1", 3.0, client="a")
    room = filled(gone, held("a2", 0.5, client="a"), held("b1", 0.25, client="b"), held("b2", 1.0, client="b"))
    room.remove(gone)
    assert order(room) == ["a2", "b1", "b2"]
    assert room.prefill_s == 1.75


def test_an_empty_queue_has_no_debts() -> None:
    one = held("a1", 9.0, client="a")
    room = filled(one, held("b1", 1.0, client="b"))
    room.pop(one)
    room.pop(next(iter(room)))
    assert (len(room), room.prefill_s) == (0, 0.0)
    room.add(held("b2", 1.0, client="b"))
    room.add(held("a2", 1.0, client="a"))
    room.pop(next(iter(room)))
    assert order(room) == ["a2"]


def test_a_queue_finds_its_requests_by_id() -> None:
    one, other = held("one"), held("other")
    room = filled(one, other)
    assert ("one" in room, "gone" in room, len(room)) == (True, False, 2)
    assert (room.get("one"), room.get("gone")) == (one, None)
    room.remove(one)
    assert ("one" in room, room.get("one"), order(room)) == (False, None, ["other"])


def test_turns_are_taken_within_each_priority_and_charged_over_all() -> None:
    """2 s at the high priority leave `a` behind at the normal one."""
    high = held("a-high", 2.0, client="a", priority=1)
    room = filled(high, held("a1", 1.0, client="a"), held("b1", 1.0, client="b"), held("b2", 1.5, client="b"))
    room.pop(high)
    assert order(room) == ["b1", "b2", "a1"]


def test_clients_that_came_and_went_are_forgotten_while_another_waits() -> None:
    room = filled(held("waits", client="waits", priority=-1))
    for number in range(MAX_CLIENTS + 100):
        one = held(str(number), client=f"client-{number}")
        room.add(one)
        room.pop(one)
    assert len(room._virtual_s) <= MAX_CLIENTS + 1
    for number in range(100):
        one = held(str(number), client=f"new-{number}")
        room.add(one)
        room.remove(one)
    assert len(room._virtual_s) <= MAX_CLIENTS + 1


moves = st.lists(
    st.tuples(
        st.sampled_from(["add", "serve", "remove"]),
        st.integers(-1, 1),
        st.sampled_from(["a", "b", None]),
        st.floats(0.01, 5),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(moves=moves)
def test_every_walk_sees_each_once_by_priority_and_within_a_client_shortest_first(
    moves: list[tuple[str, int, str | None, float, int]],
) -> None:
    room, twin = FairQueue(), []
    for number, (move, priority, client, prefill_s, place) in enumerate(moves):
        if move == "add":
            twin.append(held(str(number), prefill_s, client=client, priority=priority))
            room.add(twin[-1])
        elif twin:
            one = twin.pop(place % len(twin))
            (room.pop if move == "serve" else room.remove)(one)
        room.check()
        walk = list(room)
        assert sorted(map(id, walk)) == sorted(map(id, twin))
        assert [-one.state.request.priority for one in walk] == sorted(-one.state.request.priority for one in walk)
        for line in {(one.state.request.priority, one.state.request.client) for one in walk}:
            mine = [one for one in walk if (one.state.request.priority, one.state.request.client) == line]
            assert mine == sorted(mine, key=lambda one: (one.prefill_s, one.number))


def told(times: list[float], *, work_s: float = 2.0) -> list[float]:
    away = RetryAfter()
    return [away.seconds(work_s, now=now) for now in times]


def test_the_first_is_told_how_long_what_is_there_takes() -> None:
    assert told([50.0]) == [2.0]
    assert told([50.0], work_s=0.01) == [MIN_RETRY_S]
    assert told([50.0], work_s=1e4) == [MAX_RETRY_S]


def test_an_overload_that_lasts_is_told_to_last_as_long_again() -> None:
    assert told([float(second) for second in range(100, 110)])[-1] == 9.0
    assert told([float(second) for second in range(100, 500)])[-1] == MAX_RETRY_S


def test_who_is_turned_away_after_the_time_that_was_told_begins_anew() -> None:
    assert told([100.0, 101.0, 102.0, 103.0, 105.5]) == [2.0, 2.0, 2.0, 3.0, 5.5]
    assert told([100.0, 101.0, 102.0, 103.0, 106.1])[-1] == 2.0


def test_an_overload_is_over_after_the_retry_time_not_at_it() -> None:
    assert told([100.0, 102.0, 104.0, 108.0]) == [2.0, 2.0, 4.0, 8.0]
    assert told([100.0, 102.0, 104.0, 108.01]) == [2.0, 2.0, 4.0, 2.0]


def test_more_work_than_the_overload_has_lasted_is_the_retry_time() -> None:
    away = RetryAfter()
    assert [away.seconds(work_s, now=now) for work_s, now in ((5.0, 0.0), (1.5, 4.0), (7.0, 4.5))] == [5.0, 4.0, 7.0]
    assert away.seconds(1.5, now=11.4) == 11.4, "it was told to last until 11.5"


def test_one_now_and_then_is_no_overload() -> None:
    assert set(told([10.0 * turn for turn in range(100)])) == {2.0}


def test_obeying_clients_come_back_ever_less_often_while_it_lasts() -> None:
    away, now, tries = RetryAfter(), 0.0, 0
    while now < 100.0:
        now += away.seconds(1.0, now=now)
        tries += 1
    assert tries < 10


def enqueue(queue: FairQueue, timers: ShedTimers, request_id: str, shed_at_s: float) -> QueuedRequest:
    queued = QueuedRequest(RequestState(a_request(request_id)), 1.0, enqueued_s=0.0, shed_at_s=shed_at_s)
    queue.add(queued)
    timers.arm(queued)
    return queued


def test_requests_are_due_in_the_order_of_their_times_and_once() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    for request_id, shed_at_s in (("b", 2.0), ("a", 1.0), ("never", inf), ("c", 3.0)):
        enqueue(queue, timers, request_id, shed_at_s)
    assert timers.next_s() == 1.0
    assert [queued.request_id for queued in timers.due(now=2.0)] == ["a", "b"]
    assert timers.next_s() == 3.0
    assert list(timers.due(now=2.9)) == []


def test_request_that_left_the_queue_is_skipped() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    first = enqueue(queue, timers, "a", 1.0)
    enqueue(queue, timers, "b", 2.0)
    queue.remove(first)
    assert timers.next_s() == 2.0
    assert [queued.request_id for queued in timers.due(now=5.0)] == ["b"]


def test_timer_that_is_moved_later_is_not_due_at_its_old_time() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    queued = enqueue(queue, timers, "a", 1.0)
    timers.reset(queued, 4.0)
    assert list(timers.due(now=3.0)) == []
    assert [one.request_id for one in timers.due(now=4.0)] == ["a"]


def test_moving_a_timer_often_does_not_fill_memory() -> None:
    queue = FairQueue()
    timers = ShedTimers(queue)
    queued = enqueue(queue, timers, "a", 1.0)
    for step in range(1000):
        timers.reset(queued, 2.0 + step)
    assert len(timers) <= 4 * len(queue) + 64
    assert {one.request_id for one in timers.due(now=2000.0)} == {"a"}
