"""Which of two attempts answers the request, and attempts that a gateway moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Cancel, Hedge, Hold
from gorgo.core.messages.request import AttemptResult, Outcome
from tests.core.routers import (
    COMPLETED,
    PROMPT,
    a_request,
    believed,
    dispatched,
    load_of,
    make_router,
    rejected,
    submitted,
    timed,
)


def test_the_first_first_token_wins_and_cancels_the_other_attempt_and_a_later_one_changes_nothing() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, window_s=1000.0))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    for number in range(2):
        served = dispatched(submitted(router, a_request(f"before-{number}", received_s=-9.0), now=-9.0)).attempt_id
        assert router.on_first_token(served, now=-8.9) == [], "it is alone"
        router.on_finish(served, COMPLETED, now=-8.9)
    first = dispatched(submitted(router, a_request("r"), now=0.0))
    due_s = router.next_timer()
    assert due_s is not None
    (hedge,) = router.handle_timer(now=due_s)
    assert isinstance(hedge, Hedge)
    assert router.on_first_token(hedge.dispatch.attempt_id, now=due_s + 0.1) == [Cancel("r", first.attempt_id)]
    assert router.on_first_token(first.attempt_id, now=due_s + 0.2) == []


def test_an_attempt_served_elsewhere_fails_where_it_was_and_completes_where_its_gateway_sent_it() -> None:
    router = make_router("a", "b", policy="gorgo-ms")
    first = dispatched(submitted(router, a_request("r", blocks=PROMPT, received_s=0.5), now=1.0))
    assert first.replica == "a"
    moved, others = router.on_served_elsewhere(first.attempt_id, "b", now=1.2)
    assert moved is not None
    assert (moved.replica, moved.attempt_id, moved.attempt, others) == ("b", "r/2", 2, [])
    assert (load_of(router, "a"), load_of(router, "b")) == ((0, 0, 0), (1, 256, 256))
    assert router.on_first_token(first.attempt_id, now=1.3) == [], "it has ended"
    router.on_first_token("r/2", now=1.3)
    assert router.on_finish("r/2", COMPLETED, now=2.0) == (None, [])
    (sample,) = router.samples
    assert (sample.replica, sample.status, sample.retries) == ("b", 200, 1)
    assert sample.ttft_ms == pytest.approx(800.0)
    assert sample.predicted_ttft_ms is None, "a prediction from the report on is of another time"
    assert [(each.attempt, each.replica, each.fallback) for each in router.view.decisions("r")] == [
        (1, "a", None),
        (2, "b", "served_elsewhere"),
    ]
    assert {row.name: (row.attempts, row.failures) for row in router.view.snapshots(now=2.0)} == {
        "a": (1, 1),
        "b": (1, 0),
    }
    assert believed(router)[:2] == [0.0, 4.0]
    assert (load_of(router, "a"), load_of(router, "b"), router.in_flight) == ((0, 0, 0), (0, 0, 0), 0)


def test_a_replica_learns_no_prefill_speed_from_an_attempt_that_was_moved_there() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")])
    first = dispatched(submitted(router, a_request("r", prompt_tokens=5000), now=1.0))
    router.on_served_elsewhere(first.attempt_id, "b", now=3.0)
    router.on_first_token("r/2", now=3.001)
    router.on_finish("r/2", COMPLETED, now=4.0)
    assert [row.prefill_slowdown for row in router.view.snapshots(now=5.0)] == [1.0, 1.0]
    assert [row.backlog_s for row in router.view.snapshots(now=5.0)] == [0.0, 0.0]


def test_a_first_token_reported_before_the_move_counts_for_the_replica_that_serves() -> None:
    router = make_router("a", "b", policy="lodestar")
    first = dispatched(submitted(router, a_request("r", received_s=1.0), now=1.0))
    router.on_first_token(first.attempt_id, now=1.5)
    moved, _ = router.on_served_elsewhere(first.attempt_id, "b", now=1.6)
    assert moved is not None
    assert (load_of(router, "a"), load_of(router, "b")) == ((0, 0, 0), (1, 256, 0))
    router.check()
    router.on_finish(moved.attempt_id, COMPLETED, now=3.0)
    (sample,) = router.samples
    assert sample.replica == "b"
    assert sample.ttft_ms == pytest.approx(500.0)
    router.check()


def test_a_request_served_by_an_unknown_replica_is_closed_and_its_client_may_send_another() -> None:
    limits = RouterLimits(clients=ClientRules(ClientLimits(max_in_flight=1)))
    router = make_router("a", "b", limits=limits)
    first = dispatched(submitted(router, a_request("r", client="c"), now=1.0))
    assert rejected(submitted(router, a_request("s", client="c"), now=1.0)).code == "client_concurrency"
    assert router.on_served_elsewhere(first.attempt_id, "gone", now=1.2) == (None, [])
    assert router.on_served_elsewhere(first.attempt_id, "b", now=1.3) == (None, []), "it has ended"
    (sample,) = router.samples
    assert (sample.replica, sample.status, router.in_flight) == ("a", 502, 0)
    assert dispatched(submitted(router, a_request("s", client="c"), now=2.0)).replica == "a"


def test_the_replica_that_gateways_give_up_is_ejected_after_three() -> None:
    router = make_router("a", "b")
    for number in range(3):
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        assert first.replica == "a"
        moved, _ = router.on_served_elsewhere(first.attempt_id, "b", now=1.1)
        assert moved is not None
        router.on_finish(moved.attempt_id, COMPLETED, now=1.2)
    assert router.view.health_states() == {"a": "ejected", "b": "healthy"}


def test_a_client_whose_requests_all_refuse_ejects_nobody_and_readmits_nobody() -> None:
    router = make_router("a", "b")
    for number in range(6):
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        is_bad = number % 3 < 2
        moved, _ = router.on_served_elsewhere(first.attempt_id, "b", now=1.1, refused=is_bad)
        assert moved is not None
        end = Outcome(AttemptResult.UPSTREAM_4XX, status=403, sent=True) if is_bad else COMPLETED
        router.on_finish(moved.attempt_id, end, now=1.2)
        assert router.view.health_states() == {"a": "healthy", "b": "healthy"}
    assert {row.name: row.failures for row in router.view.snapshots(now=2.0)} == {"a": 2, "b": 0}
    last = dispatched(submitted(router, a_request("last"), now=1.3))
    router.on_served_elsewhere(last.attempt_id, "b", now=1.4)
    assert router.view.health_states() == {"a": "ejected", "b": "healthy"}, "refusals between do not reset its failures"


def test_a_queued_request_gets_the_slot_that_a_moved_attempt_frees() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    first = dispatched(submitted(router, replace(a_request("r"), replicas=frozenset("a")), now=0.0))
    assert submitted(router, replace(a_request("next"), replicas=frozenset("a")), now=0.1) == [Hold("next")]
    moved, others = router.on_served_elsewhere(first.attempt_id, "b", now=0.4)
    assert moved is not None
    assert dispatched(others).replica == "a"
