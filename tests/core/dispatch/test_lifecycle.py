"""Which of two attempts answers the request, and attempts that a gateway moved."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gorgo.core.dispatch.lifecycle import REFUSED_ELSEWHERE, SERVED_ELSEWHERE, TRUSTED_ANSWERS
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import ClientLimits, ClientRules, HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Cancel, Dispatch, Forward, Hedge, Hold, Reject
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from gorgo.live.admin.page.snapshot import condition_of
from tests.core.routers import (
    COMPLETED,
    FAILED,
    PROMPT,
    a_request,
    believed,
    dispatched,
    finished,
    load_of,
    make_router,
    rejected,
    specs,
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
        moved, _ = router.on_served_elsewhere(
            first.attempt_id, "b", REFUSED_ELSEWHERE if is_bad else SERVED_ELSEWHERE, now=1.1
        )
        assert moved is not None
        end = Outcome(AttemptResult.UPSTREAM_4XX, status=403, sent=True) if is_bad else COMPLETED
        router.on_finish(moved.attempt_id, end, now=1.2)
        assert router.view.health_states() == {"a": "healthy", "b": "healthy"}
    assert {row.name: row.failures for row in router.view.snapshots(now=2.0)} == {"a": 2, "b": 0}
    last = dispatched(submitted(router, a_request("last"), now=1.3))
    router.on_served_elsewhere(last.attempt_id, "b", now=1.4)
    assert router.view.health_states() == {"a": "ejected", "b": "healthy"}, "refusals between do not reset its failures"


def test_a_gateway_that_says_how_its_tries_failed_is_judged_as_the_proxy_judges_its_own() -> None:
    """Of three replicas one refuses a client's key, one is full, and one answers."""
    router = make_router("a", "b", "c")
    for number in range(6):
        now = 1.0 + number
        asked = replace(a_request(f"r{number}", received_s=now), credential=7, replicas=frozenset("a"))
        first = dispatched(submitted(router, asked, now=now))
        second, _ = router.on_served_elsewhere(first.attempt_id, "b", refusal(401), now=now + 0.1)
        assert second is not None
        busy = Outcome(AttemptResult.BUSY, status=429)
        third, _ = router.on_served_elsewhere(second.attempt_id, "c", busy, now=now + 0.1)
        assert third is not None
        router.on_first_token(third.attempt_id, now=now + 0.2)
        router.on_finish(third.attempt_id, COMPLETED, now=now + 0.3)
        other = dispatched(submitted(router, replace(a_request("s"), replicas=frozenset("a")), now=now + 0.4))
        router.on_finish(other.attempt_id, COMPLETED, now=now + 0.5)
    assert router.view.health_states() == {"a": "healthy", "b": "healthy", "c": "healthy"}
    router.check()


def test_a_queued_request_gets_the_slot_that_a_moved_attempt_frees() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    first = dispatched(submitted(router, replace(a_request("r"), replicas=frozenset("a")), now=0.0))
    assert submitted(router, replace(a_request("next"), replicas=frozenset("a")), now=0.1) == [Hold("next")]
    moved, others = router.on_served_elsewhere(first.attempt_id, "b", now=0.4)
    assert moved is not None
    assert dispatched(others).replica == "a"


def refusal(status: int) -> Outcome:
    return Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True)


def serve(router: Router, number: int, ends: dict[str, Outcome], *, now: float) -> tuple[list[str], object]:
    """Serve a request; return the replicas that had it, and the last action."""
    action: object = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        action = next(iter(finished(router, action.attempt_id, ends.get(action.replica, COMPLETED), now=now)), None)
    return names, action


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_no_request_is_lost_to_a_replica_that_refuses_what_another_answers(status: int) -> None:
    router = make_router("a", "b")
    served = [serve(router, number, {"a": refusal(status)}, now=1.0 + number / 10) for number in range(40)]
    assert all(names[-1] == "b" and end is None for names, end in served)
    assert [names for names, _ in served].count(["a", "b"]) == 3
    (view, _) = router.view.snapshots(now=5.0)
    assert (view.state, view.ejected_by, view.refusal, view.failures) == ("ejected", "refusals", status, 3)
    assert [sample.status for sample in router.samples] == [200] * 40


@pytest.mark.parametrize(
    "failure",
    [
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected"),
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"),
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="no_content"),
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500),
    ],
)
def test_a_request_that_an_engine_may_have_begun_and_stores_is_not_sent_twice(failure: Outcome) -> None:
    for idempotent, attempts in ((True, 2), (False, 1)):
        router = make_router("a", "b")
        request = replace(a_request("r"), idempotent=idempotent)
        first = dispatched(submitted(router, request, now=1.0))
        (action,) = finished(router, first.attempt_id, failure, now=2.0)
        assert isinstance(action, Dispatch if attempts == 2 else Reject)
        assert router.in_flight == attempts - 1


@pytest.mark.parametrize(
    "failure",
    [
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed"),
        Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_timeout"),
        Outcome(AttemptResult.BUSY, error="connections_exhausted"),
        Outcome(AttemptResult.BUSY, status=503),
        refusal(404),
    ],
)
def test_a_request_that_no_engine_has_begun_goes_to_another_whatever_it_stores(failure: Outcome) -> None:
    router = make_router("a", "b")
    first = dispatched(submitted(router, replace(a_request("r"), idempotent=False), now=1.0))
    assert isinstance(next(iter(finished(router, first.attempt_id, failure, now=2.0))), Dispatch)


def test_three_that_refuse_do_not_hide_the_fourth_which_answers() -> None:
    router = make_router(*"abcd")
    ends = {name: refusal(401) for name in "abc"}
    for number in range(20):
        assert serve(router, number, ends, now=1.0 + number)[0][-1] == "d"


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "name": ({"model": "other"}, 404),
    "route": ({"route": "/v1/responses"}, 405),
    "key": ({"credential": 7}, 401),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_refuses_one_kind_of_requests_serves_all_others(kind: str) -> None:
    router = make_router("a", "b")
    fields, status = KINDS[kind]
    usual = replace(a_request("u"), route="/v1/chat/completions", model="base", credential=1)
    odd: list[str] = []
    for number in range(60):
        now = 1.0 + number / 10
        attempt = dispatched(submitted(router, replace(usual, request_id=f"u{number}"), now=now))
        assert attempt.replica == "a", "the nearest"
        router.on_finish(attempt.attempt_id, COMPLETED, now=now)
        for burst in range(4):
            first = dispatched(submitted(router, replace(usual, request_id=f"o{number}-{burst}", **fields), now=now))
            odd.append(first.replica)
            if first.replica == "a":
                first = dispatched(finished(router, first.attempt_id, refusal(status), now=now))
            router.on_finish(first.attempt_id, COMPLETED, now=now)
    assert set(router.view.health_states().values()) == {"healthy"}
    assert odd.count("a") == 3, "it is spared such requests for a while"


def test_a_replica_that_refuses_what_it_answered_before_is_ejected() -> None:
    router = make_router("a", "b")
    for number, key in enumerate([1, 2]):
        attempt = dispatched(submitted(router, replace(a_request(f"w{number}"), credential=key), now=0.5))
        router.on_finish(attempt.attempt_id, COMPLETED, now=0.6)
    for number in range(8):
        request = replace(a_request(f"r{number}"), credential=1 + number % 2)
        attempt = dispatched(submitted(router, request, now=1.0 + number))
        if attempt.replica == "a":
            attempt = dispatched(finished(router, attempt.attempt_id, refusal(401), now=1.0 + number))
        router.on_finish(attempt.attempt_id, COMPLETED, now=1.0 + number)
    assert router.view.health_states()["a"] == "ejected"


def keyed(router: Router, number: int, *, status: int, now: float, **fields: Any) -> str:
    """Serve a request that `a` refuses and `b` answers; return which had it first."""
    request = replace(a_request(f"k{number}"), route="/v1/chat/completions", model="m", **fields)
    attempt = dispatched(submitted(router, request, now=now))
    first = attempt.replica
    if first == "a":
        attempt = dispatched(finished(router, attempt.attempt_id, refusal(status), now=now))
    router.on_finish(attempt.attempt_id, COMPLETED, now=now)
    return first


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("key", [7, None], ids=["refused", "missing"])
def test_a_client_s_key_that_a_replica_refuses_from_the_start_ejects_it_for_nobody(
    status: int, key: int | None
) -> None:
    router = make_router("a", "b")
    if key is None:  # others bring theirs
        attempt = dispatched(submitted(router, replace(a_request("w"), credential=1, pinned_replica="b"), now=0.5))
        router.on_finish(attempt.attempt_id, COMPLETED, now=0.6)
    had = [keyed(router, n, status=status, now=1.0 + n / 10, credential=key) for n in range(60)]
    assert router.view.health_states()["a"] == "healthy"
    assert had.count("a") == 3, "it is spared requests with this key for a while"
    assert keyed(router, 99, status=status, now=7.0, credential=1) == "a"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("of_client", [{"credential": 7}, {"client": "team"}], ids=["own key", "known client"])
def test_a_replica_is_ejected_for_the_key_that_its_own_configuration_gives_or_lacks(
    status: int, of_client: dict[str, Any]
) -> None:
    own_key = "credential" in of_client  # a known client's key stays here, so that without one of its own none is sent
    router = make_router(replicas=[ReplicaSpec("a", "east", own_key=own_key), ReplicaSpec("b", "east")])
    for number in range(6):
        keyed(router, number, status=status, now=1.0 + number / 10, **of_client)
    assert router.view.health_states()["a"] == "ejected"


def test_a_replica_that_refuses_the_keys_of_every_client_is_ejected() -> None:
    router = make_router("a", "b")
    had = [keyed(router, n, status=401, now=1.0 + n / 10, credential=n) for n in range(40)]
    assert router.view.health_states()["a"] == "ejected"
    assert had.count("a") == 5, "three keys, and of them three in a row"


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_what_every_replica_refuses_is_forwarded_and_ejects_none_however_often(status: int) -> None:
    router = make_router("a", "b")
    ends = {name: refusal(status) for name in "ab"}
    for number in range(500):
        names, end = serve(router, number, ends, now=1.0 + number / 100)
        assert end == Forward(f"r{number}")
        assert len(names) == len(set(names))
    assert set(router.view.health_states().values()) == {"healthy"}
    assert all((view.failures, view.refusal) == (0, None) for view in router.view.snapshots(now=9.0))
    assert {sample.status for sample in router.samples} == {status}


def test_refused_requests_have_a_retry_budget_of_their_own() -> None:
    limits = RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=5)
    router = make_router("a", "b", limits=limits)
    ends = {name: refusal(404) for name in "ab"}
    tried = sum(len(serve(router, number, ends, now=1.0)[0]) for number in range(50))
    assert tried == 55, "five retries"
    failing = [serve(router, number, {"a": FAILED}, now=1.0) for number in range(3)]
    assert all(end is None for _, end in failing), "failed requests have theirs"


def test_a_proven_refusal_makes_the_next_retries_free() -> None:
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=1))
    sent = [dispatched(submitted(router, a_request(f"r{n}"), now=1.0)) for n in range(30)]
    again = dispatched(finished(router, sent[0].attempt_id, refusal(401), now=1.1))
    finished(router, again.attempt_id, COMPLETED, now=1.2)
    for attempt in sent[1:]:
        assert dispatched(finished(router, attempt.attempt_id, refusal(401), now=1.3)).replica == "b"


def test_an_answer_of_its_own_clears_a_replica() -> None:
    router = make_router("a", "b")
    for number in range(30):
        serve(router, 2 * number, {"a": refusal(404)}, now=1.0 + number)
        assert serve(router, 2 * number + 1, {}, now=1.5 + number)[0] == ["a"]
    assert router.view.health_states()["a"] == "healthy"
    assert router.view.snapshots(now=40.0)[0].refusal is None


def test_any_other_4xx_is_the_client_s_until_a_replica_answers_nothing_else() -> None:
    router = make_router("a", "b")
    served = [serve(router, number, {"a": refusal(400)}, now=1.0 + number / 10) for number in range(20)]
    assert [names for names, _ in served[:3]] == [["a"]] * 3
    assert all(end == Forward(f"r{number}") for number, (_, end) in enumerate(served[:3]))
    assert all(end is None for _, end in served[3:]), "lost to the first three only"
    assert router.view.snapshots(now=3.0)[0].ejected_by == "refusals"


def test_an_answer_to_an_earlier_request_says_nothing_of_a_replica_that_began_to_refuse() -> None:
    router = make_router("a", "b")
    earlier = [dispatched(submitted(router, a_request(f"e{number}"), now=0.5)) for number in range(10)]
    for number in range(3):
        assert serve(router, number, {"a": refusal(400)}, now=1.0 + number)[0] == ["a"]
        router.on_first_token(earlier[number].attempt_id, now=1.5 + number)
    assert serve(router, 3, {"a": refusal(400)}, now=5.0)[0] == ["a", "b"]


def test_a_bad_request_among_good_ones_is_forwarded_at_once() -> None:
    router = make_router("a", "b")
    for number in range(30):
        names, end = serve(router, 2 * number, {"a": refusal(400)}, now=1.0 + number)
        assert (names, end) == (["a"], Forward(f"r{2 * number}"))
        serve(router, 2 * number + 1, {}, now=1.5 + number)


def test_a_refusal_that_has_been_sent_ends_the_request() -> None:
    router = make_router("a", "b")
    sent = dispatched(submitted(router, a_request(), now=1.0))
    assert finished(router, sent.attempt_id, Outcome(AttemptResult.UPSTREAM_4XX, status=404), now=1.0) == []
    assert [sample.status for sample in router.samples] == [404]


def test_a_replica_without_a_route_gets_none_of_its_requests_and_all_others() -> None:
    """Its failures are never three in a row, and retries of so many requests would be over any budget."""
    limits = RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=3)
    router = make_router("a", "b", limits=limits)
    for number in range(200):
        now = 1.0 + number / 100
        request = replace(a_request(f"m{number}", received_s=now), route="/v1/messages")
        action: object = dispatched(submitted(router, request, now=now))
        names = []
        while isinstance(action, Dispatch):
            names.append(action.replica)
            end = refusal(404) if action.replica == "a" else COMPLETED
            action = next(iter(finished(router, action.attempt_id, end, now=now)), None)
        assert names == (["a", "b"] if number < 3 else ["b"])
        assert serve(router, number, {}, now=now)[0] == ["a"], "other routes go there as before"
    assert router.view.health_states()["a"] == "healthy"
    later = replace(a_request("later", received_s=20.0), route="/v1/messages")
    assert dispatched(submitted(router, later, now=20.0)).replica == "a", "tried again after a while"


def test_a_replica_that_refuses_a_kind_is_tried_again_when_it_is_alone_or_has_joined_anew() -> None:
    router = make_router("a", "b")
    for number in range(3):
        serve(router, 2 * number, {"a": refusal(404)}, now=1.0)
        other = replace(a_request(f"other{number}"), route="/generate")
        finished(router, dispatched(submitted(router, other, now=1.0)).attempt_id, COMPLETED, now=1.0)
    assert serve(router, 10, {}, now=2.0)[0] == ["b"]
    router.replicas.drain("b", now=2.0)
    assert serve(router, 11, {"a": refusal(404)}, now=2.0)[0] == ["a"]
    router.replicas.drain("b", False, now=2.0)
    router.replicas.set_fleet(specs("b"), now=3.0)
    router.replicas.set_fleet(specs("a", "b"), now=3.0)
    router.replicas.on_probe("a", 0.001, now=3.0)
    assert serve(router, 12, {}, now=3.0)[0] == ["a"]


def test_a_pinned_request_is_refused_by_its_only_replica() -> None:
    router = make_router("a", "b")
    for number in range(9):
        sent = dispatched(submitted(router, a_request(f"r{number}", pinned_replica="a"), now=1.0))
        assert finished(router, sent.attempt_id, refusal(404), now=1.0) == [Forward(f"r{number}")]
    assert router.view.health_states()["a"] == "healthy"


# -- short answers


def serve_short(
    router: Router, number: int, short: str, *, now: float, streamed: bool = True
) -> tuple[list[str], object]:
    """Serve a request; the replicas named in `short` answer with one token, withheld where the Router says so."""
    request = a_request(f"r{number}", received_s=now, streamed=streamed)
    action: object = dispatched(submitted(router, request, now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        end = Outcome(AttemptResult.COMPLETED, status=200)
        if action.replica in short:
            end = Outcome(AttemptResult.COMPLETED, status=200, short=True, unsent=action.withhold)
        if not (end.short and end.unsent):
            router.on_first_token(action.attempt_id, now=now)
        action = next(iter(finished(router, action.attempt_id, end, now=now)), None)
    return names, action


def test_a_replica_of_short_answers_loses_three_requests_and_is_ejected_for_what_others_answer() -> None:
    router = make_router("a", "b")
    served = [serve_short(router, number, "a", now=1.0 + number / 10) for number in range(40)]
    assert [names for names, _ in served[:7]] == [["a"]] * 3 + [["a", "b"]] * 3 + [["b"]]
    assert all(names[-1] == "b" for names, _ in served[3:])
    (view, _) = router.view.snapshots(now=4.0)
    assert (view.state, view.ejected_by, view.refusal) == ("ejected", "answers", None)


def test_short_answers_of_both_kinds_lose_no_more_than_five_requests() -> None:
    for kinds in product((True, False), repeat=8):
        router = make_router("a", "b")
        lost = 0
        for number, streamed in enumerate(kinds):
            names, _ = serve_short(router, number, "a", now=1.0 + number / 10, streamed=streamed)
            lost += names == ["a"]
        assert 3 <= lost <= 5, kinds


def test_an_answer_of_one_token_to_a_request_for_no_more_says_nothing_of_the_replica() -> None:
    router = make_router("a", "b")
    for number in range(3):
        serve_short(router, number, "a", now=1.0)
    first = dispatched(submitted(router, a_request("r-wanted"), now=1.5))
    assert (first.replica, first.withhold) == ("a", True)
    router.on_first_token(first.attempt_id, now=1.6)
    router.on_finish(first.attempt_id, Outcome(AttemptResult.COMPLETED, status=200, short=None), now=1.7)
    assert dispatched(submitted(router, a_request("r-next"), now=1.8)).withhold, "and it is suspect as before"


def test_answers_as_short_everywhere_are_the_client_s_wish_and_eject_none() -> None:
    router = make_router("a", "b")
    served = [serve_short(router, number, "ab", now=1.0 + number) for number in range(200)]
    assert set(router.view.health_states().values()) == {"healthy"}
    assert all(view.failures == 0 for view in router.view.snapshots(now=300.0))
    twice = sum(len(names) > 1 for names, _ in served)
    assert 1 <= twice <= 200 // TRUSTED_ANSWERS


def test_a_short_answer_is_better_than_the_failure_of_another_replica() -> None:
    router = make_router("a", "b")
    for number in range(3):
        serve_short(router, number, "a", now=1.0)
    first = dispatched(submitted(router, a_request("r9", received_s=2.0), now=2.0))
    assert first.withhold
    short = Outcome(AttemptResult.COMPLETED, status=200, short=True, unsent=True)
    second = dispatched(finished(router, first.attempt_id, short, now=2.0))
    assert finished(router, second.attempt_id, FAILED, now=2.0) == [Forward("r9")]
    assert [sample.status for sample in router.samples][-1] == 200


def test_a_long_answer_ends_the_doubt() -> None:
    router = make_router("a", "b")
    for number in range(30):
        short = "" if number % 3 == 2 else "a"
        assert serve_short(router, number, short, now=1.0 + number)[0] == ["a"]


def test_a_replica_that_breaks_answers_off_is_withheld_after_the_second() -> None:
    router = make_router("a", "b")
    broken = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="truncated")
    for number in range(2):
        sent = dispatched(submitted(router, a_request(f"r{number}"), now=1.0 + number))
        assert not sent.withhold
        router.on_first_token(sent.attempt_id, now=1.0 + number)
        assert finished(router, sent.attempt_id, broken, now=1.0 + number) == []
    sent = dispatched(submitted(router, a_request("third"), now=3.0))
    assert (sent.replica, sent.withhold) == ("a", True)
    again = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=200, error="truncated")
    sent = dispatched(finished(router, sent.attempt_id, again, now=3.0))
    assert (sent.replica, sent.withhold) == ("b", False)
    finished(router, sent.attempt_id, COMPLETED, now=3.0)
    assert router.view.snapshots(now=6.0)[0].ejected_by == "answers"


def test_a_replica_whose_streams_stall_is_ejected_however_well_it_answers_in_one_piece() -> None:
    router = make_router("a", "b")
    stalled = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="timeout")
    for number in range(3):
        plain = a_request(f"plain-{number}", streamed=False)
        finished(router, dispatched(submitted(router, plain, now=0.5 + number)).attempt_id, COMPLETED, now=0.9 + number)
        sent = dispatched(submitted(router, a_request(f"r{number}"), now=1.0 + number))
        assert sent.replica == "a"
        router.on_first_token(sent.attempt_id, now=1.0 + number)
        finished(router, sent.attempt_id, stalled, now=1.0 + number)
    (row, _) = router.view.snapshots(now=4.0)
    assert (row.state, row.ejected_by) == ("ejected", "answers")


#: What a faulty replica makes of a stream: whether it has a first token, and its end.
CUT = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="truncated")
EMPTY = Outcome(AttemptResult.COMPLETED, status=200, short=True)


@pytest.mark.parametrize(("bad_streams", "end"), [(True, CUT), (True, EMPTY), (False, EMPTY)])
def test_few_clients_see_the_bad_answers_of_one_kind_while_the_other_kind_goes_well(
    bad_streams: bool, end: Outcome
) -> None:
    """300 requests, half of them streams; one kind is bad on one of two replicas."""
    router = make_router("bad", "good")
    seen = 0
    for number in range(300):
        now, streamed = 1.0 + 0.2 * number, number % 2 == 0
        if number % 150 == 149:
            router.replicas.on_probe("bad", 0.01, now=now)
        sent = dispatched(submitted(router, a_request(f"r{number}", streamed=streamed, received_s=now), now=now))
        while True:
            bad = sent.replica == "bad" and streamed is bad_streams
            result = end if bad else COMPLETED
            if bad and sent.withhold:
                failed = replace(end, result=AttemptResult.FAILED_BEFORE_CONTENT)
                result = failed if end is CUT else replace(end, unsent=True)
            else:
                seen += bad
                if streamed and (not bad or end is CUT):
                    router.on_first_token(sent.attempt_id, now=now)
            own, _ = router.on_finish(sent.attempt_id, result, now=now + 0.05)
            if not isinstance(own, Dispatch):
                break
            sent = own
    assert seen <= 3


def test_a_replica_that_decodes_ten_times_slower_than_those_alike_is_named() -> None:
    router = make_router("a", "b", "slow", policy="round-robin")
    for number in range(30):
        sent = dispatched(submitted(router, a_request(f"r{number}", received_s=float(number)), now=float(number)))
        router.on_first_token(sent.attempt_id, now=number + 0.1)
        token_s = 0.1 if sent.replica == "slow" else 0.01
        end = replace(COMPLETED, output_tokens=51, itl_s_p95=2.0 * token_s)
        finished(router, sent.attempt_id, end, now=number + 0.1 + 50 * token_s)
    rows = {row.name: row for row in router.view.snapshots(now=60.0)}
    assert rows["slow"].tpot_ms == pytest.approx(100.0)
    assert rows["slow"].itl_ms_p95 == pytest.approx(200.0)
    assert rows["slow"].decode_slowdown == pytest.approx(10.0)
    assert rows["a"].decode_slowdown < 1.0  # type: ignore[operator]
    assert condition_of(rows["slow"]).why == "decodes 10.0 times slower than the others: 100 ms a token"
    assert condition_of(rows["a"]).word == "ready"


def test_answers_in_one_piece_and_replicas_of_another_model_are_not_compared() -> None:
    router = make_router(replicas=[ReplicaSpec("a", "here", models=("m",)), ReplicaSpec("b", "here", models=("n",))])
    for number in range(20):
        for model, token_s in (("m", 0.01), ("n", 0.1)):
            for streamed in (True, False):
                request = a_request(f"{model}{number}{streamed}", model=model, streamed=streamed)
                sent = dispatched(submitted(router, request, now=float(number)))
                if streamed:
                    router.on_first_token(sent.attempt_id, now=float(number))
                end = replace(COMPLETED, output_tokens=11)
                finished(router, sent.attempt_id, end, now=number + (10 * token_s if streamed else 30.0))
    rows = router.view.snapshots(now=99.0)
    assert [row.tpot_ms for row in rows] == pytest.approx([10.0, 100.0])
    assert [row.decode_slowdown for row in rows] == [None, None]
