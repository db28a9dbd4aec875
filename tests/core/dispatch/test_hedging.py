"""A second attempt: on evidence, within the budget, never after content, and one answer in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.dispatch.hedging import RatioBudget
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Action, Cancel, Dispatch, Hedge, Reject
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from tests.core.routers import (
    COMPLETED,
    FAILED,
    GONE,
    REFUSED,
    a_request,
    dispatched,
    finished,
    make_router,
    submitted,
    timed,
)

LIMITS = RouterLimits(hedging=HedgeLimits(budget_ratio=0.5, window_s=1000.0))
SUPERSEDED = Outcome(AttemptResult.SUPERSEDED)


def asked(name: str, tokens: int = 100, *, now: float = 0.0, **more: object) -> RouteRequest:
    return replace(a_request(name, prompt_tokens=tokens, received_s=now), **more)  # type: ignore[arg-type]


def hedging(*names: str, limits: RouterLimits = LIMITS) -> Router:
    """Two requests have been served, so that the budget has room for one more attempt."""
    router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in names], limits=limits)
    for number in range(2):
        attempt = dispatched(submitted(router, asked(f"before-{number}", now=-9.0), now=-9.0)).attempt_id
        router.on_first_token(attempt, now=-8.9)
        router.on_finish(attempt, COMPLETED, now=-8.9)
    return router


def late(router: Router, **more: object) -> tuple[Dispatch, Hedge]:
    first = dispatched(submitted(router, asked("r", **more), now=0.0))  # type: ignore[arg-type]
    due_s = router.next_timer()
    assert due_s is not None
    (hedge,) = router.handle_timer(now=due_s)
    assert isinstance(hedge, Hedge)
    return first, hedge


def only(actions: list[Action]) -> Action:
    (action,) = actions
    return action


def test_a_request_much_later_than_predicted_is_sent_to_another_replica() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    predicted_s = first.decision.predicted_ttft_s
    assert predicted_s is not None
    assert router.next_timer() == pytest.approx(predicted_s + 0.5)
    hedge = only(router.handle_timer(now=predicted_s + 0.5))
    assert isinstance(hedge, Hedge)
    assert hedge.dispatch.replica != first.replica
    assert (hedge.dispatch.attempt, router.in_flight) == (2, 2)


def test_a_long_prompt_is_late_when_it_takes_twice_what_was_predicted() -> None:
    router = hedging("a", "b")
    predicted_s = dispatched(submitted(router, asked("r", 4000), now=0.0)).decision.predicted_ttft_s
    assert predicted_s is not None
    assert router.next_timer() == pytest.approx(2 * predicted_s)


def test_an_overtaken_request_is_sent_again_without_waiting_for_more() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r", pinned_replica=None), now=0.0))
    later = dispatched(submitted(router, asked("later", now=0.1, pinned_replica=first.replica), now=0.1))
    router.on_first_token(later.attempt_id, now=0.4)
    assert router.next_timer() == pytest.approx(0.5)
    assert isinstance(only(router.handle_timer(now=0.5)), Hedge)


def test_tokens_of_one_step_in_another_order_are_no_evidence() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    later = dispatched(submitted(router, asked("later", now=0.1, pinned_replica=first.replica), now=0.1))
    router.on_first_token(later.attempt_id, now=0.4)
    router.on_first_token(first.attempt_id, now=0.401)
    router.on_finish(later.attempt_id, COMPLETED, now=0.45)
    router.on_finish(first.attempt_id, COMPLETED, now=0.45)
    assert router.handle_timer(now=5.0) == []


def test_the_first_content_wins_and_the_other_is_cancelled() -> None:
    router = hedging("a", "b")
    first, hedge = late(router)
    second = hedge.dispatch
    assert router.on_first_token(second.attempt_id, now=2.0) == [Cancel("r", first.attempt_id)]
    assert finished(router, first.attempt_id, SUPERSEDED, now=2.0) == []
    assert finished(router, second.attempt_id, COMPLETED, now=3.0) == []
    assert router.in_flight == 0
    *_, sample = router.samples
    assert (sample.hedged, sample.replica, sample.status, sample.retries) == (True, second.replica, 200, 0)
    assert len(router.samples) == 3


def test_a_loser_s_late_word_changes_nothing() -> None:
    router = hedging("a", "b")
    first, hedge = late(router)
    router.on_first_token(hedge.dispatch.attempt_id, now=2.0)
    assert router.on_first_token(first.attempt_id, now=2.0) == []
    assert finished(router, hedge.dispatch.attempt_id, COMPLETED, now=3.0) == [Cancel("r", first.attempt_id)]
    assert finished(router, first.attempt_id, COMPLETED, now=3.0) == []
    assert len(router.samples) == 3


def test_a_failure_leaves_the_request_to_the_other_attempt() -> None:
    router = hedging("a", "b", "c")
    first, hedge = late(router)
    assert finished(router, first.attempt_id, FAILED, now=1.0) == []
    third = dispatched(finished(router, hedge.dispatch.attempt_id, FAILED, now=1.1))
    assert third.replica not in (first.replica, hedge.dispatch.replica)
    assert finished(router, third.attempt_id, COMPLETED, now=2.0) == []
    *_, sample = router.samples
    assert (sample.retries, sample.hedged) == (1, True)


def test_two_attempts_whose_time_is_over_leave_one_refusal() -> None:
    router = hedging("a", "b", "c")
    first, hedge = late(router)
    over = Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout")
    assert finished(router, first.attempt_id, over, now=1.0) == []
    refusal = only(finished(router, hedge.dispatch.attempt_id, over, now=1.0))
    assert isinstance(refusal, Reject)
    assert refusal.code == "total_timeout"
    assert (router.in_flight, len(router.samples)) == (0, 3)


def test_a_client_that_leaves_ends_both() -> None:
    router = hedging("a", "b")
    first, hedge = late(router)
    assert finished(router, first.attempt_id, GONE, now=1.0) == [Cancel("r", hedge.dispatch.attempt_id)]
    assert finished(router, hedge.dispatch.attempt_id, GONE, now=1.0) == []
    assert router.in_flight == 0
    assert [sample.status for sample in router.samples][2:] == [499]


def test_another_4xx_is_the_answer_too() -> None:
    router = hedging("a", "b")
    first, hedge = late(router)
    assert finished(router, first.attempt_id, REFUSED, now=1.0) == [Cancel("r", hedge.dispatch.attempt_id)]


@pytest.mark.parametrize("more", [{"idempotent": False}, {"streamed": False}, {"pinned_replica": "a"}])
def test_what_may_not_or_cannot_be_repeated_is_not(more: dict[str, object]) -> None:
    router = hedging("a", "b")
    router.submit(asked("r", **more), now=0.0)  # type: ignore[arg-type]
    assert router.handle_timer(now=30.0) == []


def test_there_is_one_extra_attempt_at_most() -> None:
    router = hedging("a", "b", "c")
    late(router)
    assert router.handle_timer(now=50.0) == []


def test_a_second_attempt_is_one_of_those_that_a_request_may_have() -> None:
    alone = hedging("a", "b", limits=replace(LIMITS, max_attempts=1))
    dispatched(submitted(alone, asked("r"), now=0.0))
    assert alone.handle_timer(now=100.0) == []
    for most, kinds in ((2, []), (3, [Hedge])):
        retried = hedging("a", "b", "c", limits=replace(LIMITS, max_attempts=most))
        first = dispatched(submitted(retried, asked("r"), now=0.0))
        dispatched(finished(retried, first.attempt_id, FAILED, now=0.1))
        assert [type(action) for action in retried.handle_timer(now=100.0)] == kinds


def test_nothing_is_sent_again_after_content() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    router.on_first_token(first.attempt_id, now=0.2)
    assert router.handle_timer(now=50.0) == []


def test_the_budget_is_kept() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=0.03, window_s=1e6), stale_after_s=1e9)
    router = hedging("a", "b", limits=limits)
    hedges = 0
    for number in range(200):
        now = 100.0 * number
        attempt = dispatched(submitted(router, asked(f"r{number}", now=now), now=now)).attempt_id
        found = [action for action in router.handle_timer(now=now + 50.0) if isinstance(action, Hedge)]
        hedges += len(found)
        for hedge in found:
            router.on_finish(hedge.dispatch.attempt_id, SUPERSEDED, now=now + 51.0)
        router.on_first_token(attempt, now=now + 51.0)
        router.on_finish(attempt, COMPLETED, now=now + 51.0)
    assert hedges == int(0.03 * 202)


def test_no_hedge_goes_to_a_replica_that_has_enough_to_do() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    other = {"a": "b", "b": "a"}[first.replica]
    busy = dispatched(submitted(router, asked("busy", 9000, pinned_replica=other), now=0.0))
    assert router.handle_timer(now=1.0) == []
    router.on_first_token(busy.attempt_id, now=1.5)
    assert isinstance(only(router.handle_timer(now=1.6)), Hedge)


def test_the_first_request_alone_has_no_budget() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=LIMITS)
    dispatched(submitted(router, asked("r"), now=0.0))
    assert router.handle_timer(now=30.0) == []


def test_a_budget_is_of_the_requests_in_its_window_alone() -> None:
    """Two requests a thousand seconds before are of another window."""
    router = hedging("a", "b")
    dispatched(submitted(router, asked("r", now=995.0), now=995.0))
    assert router.handle_timer(now=1040.0) == []


def test_requests_late_together_are_hedged_in_their_order_of_dispatch() -> None:
    """Three replicas equally far away have one each, all due at one time."""
    hedged = HedgeLimits(budget_ratio=1.0, window_s=1000.0)
    limits = replace(LIMITS, hedging=hedged, rtt_ewma_alpha=1.0)
    router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in "abcd"], limits=limits)
    for name in "abcd":
        router.replicas.on_probe(name, 0.1, now=-1.0)
    names = [f"r{number}" for number in range(3)]
    for name in names:
        dispatched(submitted(router, asked(name, pinned_replica=None), now=0.0))
    hedges = router.handle_timer(now=30.0)
    assert [hedge.request_id for hedge in hedges] == names


def test_a_hedge_without_an_open_replica_is_tried_again_after_a_quarter_of_a_second() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    other = {"a": "b", "b": "a"}[first.replica]
    busy = dispatched(submitted(router, asked("busy", 9000, pinned_replica=other), now=0.0))
    assert router.handle_timer(now=5.0) == []
    assert router.next_timer() == pytest.approx(5.25)
    router.on_first_token(busy.attempt_id, now=5.1)
    router.on_finish(busy.attempt_id, COMPLETED, now=5.1)
    assert router.handle_timer(now=5.24) == []
    assert isinstance(only(router.handle_timer(now=5.25)), Hedge)


def test_a_request_overtaken_before_it_is_due_is_hedged_a_moment_after_it_is_due() -> None:
    """4 s of prefill: overtaken at 0.5, due at 4 s; a tenth of a second later it is sent again."""
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r", 4000), now=0.0))
    later = dispatched(submitted(router, asked("later", now=0.1, pinned_replica=first.replica), now=0.1))
    router.on_first_token(later.attempt_id, now=0.5)
    predicted_s = first.decision.predicted_ttft_s
    assert predicted_s is not None
    assert router.next_timer() == pytest.approx(predicted_s + 0.1)


def test_a_first_token_overtakes_only_requests_before_its_own() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    dispatched(submitted(router, asked("behind", now=0.1, pinned_replica=first.replica), now=0.1))
    router.on_first_token(first.attempt_id, now=5.0)
    router.on_finish(first.attempt_id, COMPLETED, now=5.0)
    assert router.handle_timer(now=60.0) == [], "a pinned request has no other replica"


def test_other_limits_of_hedging_count_from_the_next_event_on() -> None:
    router = hedging("a", "b")
    dispatched(submitted(router, asked("r"), now=0.0))
    router.settings.set_limits(replace(LIMITS, hedging=HedgeLimits(budget_ratio=0.0)), now=0.1)
    assert router.handle_timer(now=30.0) == [], "without a share there is no budget"
    router.settings.set_limits(replace(LIMITS, hedging=HedgeLimits(budget_ratio=1.0, delay_s=3.0)), now=31.0)
    first = dispatched(submitted(router, asked("late", now=40.0), now=40.0))
    predicted_s = first.decision.predicted_ttft_s
    assert predicted_s is not None
    assert router.next_timer() == pytest.approx(40.0 + predicted_s + 3.0)


def test_without_a_share_nothing_is_watched() -> None:
    router = hedging("a", "b", limits=RouterLimits())
    dispatched(submitted(router, asked("r"), now=0.0))
    assert router.handle_timer(now=50.0) == []


def test_a_request_that_waited_is_watched_from_when_it_was_sent() -> None:
    limits = replace(LIMITS, overload=OverloadLimits(queue_enabled=True))
    router = hedging("a", limits=limits)
    first = dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert not isinstance(only(submitted(router, asked("r1"), now=0.0)), Dispatch)
    second = dispatched(router.on_first_token(first.attempt_id, now=0.5))
    assert second.decision.predicted_ttft_s == pytest.approx(0.5 + 0.1, abs=0.05)
    due_s = router.next_timer()
    assert due_s == pytest.approx(1.1, abs=0.05)


def test_a_spent_retry_comes_back_as_soon_as_the_window_has_passed() -> None:
    budget = RatioBudget(share=0.1, minimum=1, window_s=10.0)
    assert budget.try_spend(now=0.0)
    assert not budget.try_spend(now=9.99)
    assert budget.try_spend(now=10.0)


def test_requests_count_for_one_window_and_no_longer() -> None:
    budget = RatioBudget(share=0.5, minimum=0, window_s=10.0)
    budget.record(now=0.0)
    assert not budget.available(now=0.0), "half of one request is none"
    budget.record(now=5.0)
    assert budget.available(now=9.99)
    assert not budget.available(now=10.0)
    assert not budget.try_spend(now=10.0)


def test_a_clock_that_goes_back_a_little_changes_no_account() -> None:
    budget = RatioBudget(share=0.1, minimum=1, window_s=10.0)
    assert budget.try_spend(now=100.0)
    assert not budget.try_spend(now=80.0)
    assert budget.try_spend(now=110.0)


def test_a_minimum_of_zero_allows_nothing_without_requests() -> None:
    assert not RatioBudget(share=1.0, minimum=0, window_s=10.0).try_spend(now=0.0)


@given(steps=st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=200), share=st.floats(0, 1))
def test_share_is_kept_in_every_window(steps: list[tuple[float, bool]], share: float) -> None:
    budget, now = RatioBudget(share=share, minimum=2, window_s=10.0), 0.0
    asked: list[float] = []
    spent: list[float] = []
    for step_s, ask in steps:
        now += step_s
        if ask:
            budget.record(now=now)
            asked.append(now)
        elif budget.try_spend(now=now):
            spent.append(now)
            within = sum(at > now - 9.0 for at in spent)
            assert within <= max(2, share * sum(at > now - 11.0 for at in asked))


def test_a_budget_has_a_floor_at_little_traffic() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=0.03, budget_minimum=1))
    router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in "ab"], limits=limits)
    late(router)


def test_a_late_request_is_hedged_as_soon_as_there_is_a_budget() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=0.5))
    router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in "ab"], limits=limits)
    first = dispatched(submitted(router, asked("r"), now=0.0))
    assert router.handle_timer(now=1.0) == [], "half of one request is none"
    other = {"a": "b", "b": "a"}[first.replica]
    dispatched(submitted(router, asked("another", now=1.5, pinned_replica=other), now=1.5))
    hedge = only(router.handle_timer(now=2.0))
    assert isinstance(hedge, Hedge)
    assert (hedge.request_id, hedge.dispatch.replica) == ("r", other)


def test_a_late_request_is_hedged_as_soon_as_another_replica_is_healthy() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    other = {"a": "b", "b": "a"}[first.replica]
    router.replicas.drain(other, now=0.1)
    assert router.handle_timer(now=5.0) == []
    router.replicas.drain(other, draining=False, now=5.5)
    assert isinstance(only(router.handle_timer(now=6.0)), Hedge)


def silent(router: Router, replica: str, *, now: float) -> list[Action]:
    """Three probes fail; what the shell has to do by then."""
    actions = []
    for number in range(3):
        actions += router.replicas.on_probe(replica, None, now=now + number)
    due_s = router.next_timer()
    assert due_s is not None
    assert due_s <= now + 2
    return actions + router.handle_timer(now=now + 2)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_a_replica_has_not_begun_to_answer_goes_elsewhere_when_probes_eject_it(streamed: bool) -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=0.01))
    router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in "ab"], limits=limits)
    first = [dispatched(submitted(router, asked(f"r{n}", streamed=streamed), now=0.0)) for n in range(4)]
    hung = first[0].replica
    stuck = [each.request_id for each in first if each.replica == hung]
    for each in first if streamed else ():
        if each.replica != hung:
            router.on_first_token(each.attempt_id, now=0.2)
    hedges = silent(router, hung, now=0.2)
    hedges += router.handle_timer(now=4.0) + router.handle_timer(now=5.0)
    assert {hedge.request_id for hedge in hedges} == set(stuck), "without a budget"
    assert all(isinstance(hedge, Hedge) and hedge.dispatch.replica != hung for hedge in hedges)


def test_a_stream_that_has_begun_stays_on_a_replica_that_probes_eject() -> None:
    router = hedging("a", "b")
    first = dispatched(submitted(router, asked("r"), now=0.0))
    router.on_first_token(first.attempt_id, now=0.2)
    for number in range(3):
        assert router.replicas.on_probe(first.replica, None, now=1.0 + number) == []
    assert router.handle_timer(now=4.0) == []


def test_an_ejection_for_failures_of_others_moves_nothing() -> None:
    """An engine that fails some requests may well work at others."""
    router = hedging("a", "b")
    plain = dispatched(submitted(router, asked("plain", streamed=False, pinned_replica=None), now=0.0))
    for number in range(3):
        other = asked(f"fails-{number}", now=1.0, pinned_replica=plain.replica)
        attempt = dispatched(submitted(router, other, now=1.0))
        router.on_finish(attempt.attempt_id, Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="reset"), now=1.1)
    assert router.view.health_states()[plain.replica] == "ejected"
    assert router.handle_timer(now=30.0) == []


@pytest.mark.parametrize(("streamed", "patience_s"), [(True, 5.0), (False, 30.0)])
def test_requests_without_an_answer_in_time_are_named(streamed: bool, patience_s: float) -> None:
    router = make_router("a", policy="gorgo-ms", replicas=[timed("a")], limits=RouterLimits())
    attempt = dispatched(submitted(router, asked("r", streamed=streamed), now=0.0)).attempt_id
    expected_s = 0.11
    (row,) = router.view.snapshots(now=expected_s + patience_s - 0.1)
    assert (row.overdue_requests, row.overdue_for_s, row.overdue) == (0, None, ())
    assert router.view.overdue_replicas(now=expected_s + patience_s - 0.1) == []
    (row,) = router.view.snapshots(now=expected_s + patience_s + 1.0)
    assert (row.overdue_requests, row.overdue) == (1, ("r",))
    assert row.overdue_for_s == pytest.approx(patience_s + 1.0)
    assert router.view.overdue_replicas(now=expected_s + patience_s + 1.0) == ["a"]
    router.on_finish(attempt, GONE, now=50.0)
    assert router.view.overdue_replicas(now=60.0) == []
