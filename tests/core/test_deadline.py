"""Holding and shedding: who goes, who waits, who is turned away, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.admission import meets_deadline, misses_deadline, shed_at_s
from gorgo.core.limits import ClientLimits, ClientRules, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Action, Dispatch, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Choice, Prediction
from gorgo.core.router import Router
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    dispatched,
    finished,
    make_router,
    rejected,
    submitted,
    timed,
)

#: 1.0 s alone and 2.0 s of work before it on the one, 2.5 s alone and none on the other.
FORECAST = Prediction(idle_s=np.array([1.0, 2.5]), backlog_s=np.array([2.0, 0.0]), prefill_s=np.array([0.5, 0.5]))
HOLDING = RouterLimits(overload=OverloadLimits(queue_enabled=True, no_replica_wait_s=2.0))


def holding(*names: str, policy: str = "gorgo-ms", **overload: object) -> Router:
    limits = replace(HOLDING, overload=replace(HOLDING.overload, **overload))  # type: ignore[arg-type]
    replicas = [timed(name, max_running_requests=4) for name in names]
    router = make_router(policy=policy, replicas=replicas, limits=limits)
    for name in names:
        router.replicas.on_probe(name, 0.0, now=0.0)
        router.replicas.on_probe(name, 0.0, now=0.0)
    return router


def asked(
    name: str, tokens: int = 1000, *, now: float = 0.0, slo_s: float | None = None, **more: object
) -> RouteRequest:
    request = a_request(name, prompt_tokens=tokens, received_s=now)
    return replace(request, slo_ttft_s=slo_s, **more)  # type: ignore[arg-type]


def held(actions: list[Action]) -> bool:
    (action,) = actions
    return isinstance(action, Hold)


def until(router: Router, limit_s: float = 100.0) -> list[tuple[float, Action]]:
    """Let time pass as a shell does, until nothing is due."""
    seen: list[tuple[float, Action]] = []
    now = 0.0
    while (due_s := router.next_timer()) is not None and due_s < limit_s:
        now = max(now, due_s)
        seen += [(now, action) for action in router.handle_timer(now=now)]
    return seen


@pytest.mark.parametrize(
    ("waited_s", "deadline_s", "hopeless"),
    [
        (0.0, 2.5, False),  # the second one is just in time
        (0.25, 2.75, False),
        (0.25, 2.74, True),
        (0.0, 2.0, True),  # alone the first one could
        (0.0, 1.0, True),
        (0.0, 0.99, False),  # not even alone: it waits for a moment
        (0.3, 0.99, False),
        (0.31, 0.99, True),
    ],
)
def test_a_request_is_hopeless_once_it_misses_a_deadline_that_it_could_meet_alone(
    waited_s: float, deadline_s: float, hopeless: bool
) -> None:
    assert misses_deadline(FORECAST, waited_s=waited_s, deadline_s=deadline_s, limits=OverloadLimits()) is hopeless


@pytest.mark.parametrize(("ttft_s", "meets"), [(2.4, True), (2.5, False), (2.6, False), (None, False)])
def test_a_choice_that_clearly_meets_the_deadline_needs_no_prediction_of_all(ttft_s: float | None, meets: bool) -> None:
    assert meets_deadline(Choice(0, predicted_ttft_s=ttft_s), deadline_s=2.5) is meets


@pytest.mark.parametrize(("deadline_s", "at_s"), [(2.5, 11.5), (1.0, 10.0), (0.99, 10.3)])
def test_the_last_chance_leaves_the_time_that_the_request_takes_alone(deadline_s: float, at_s: float) -> None:
    limits = OverloadLimits()
    assert shed_at_s(FORECAST, received_s=10.0, deadline_s=deadline_s, limits=limits) == pytest.approx(at_s)


def test_a_request_goes_at_once_to_a_replica_with_room() -> None:
    router = holding("a")
    assert dispatched(submitted(router, asked("r1", 150), now=0.0)).replica == "a"
    assert dispatched(submitted(router, asked("r2", 1000), now=0.0)).replica == "a"  # 150 ms before it: still open


def test_a_request_waits_until_the_clock_of_its_replica_has_run_down() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r1"), now=0.0))
    assert held(submitted(router, asked("r2"), now=0.0))
    assert router.queued == 1
    assert router.next_timer() == pytest.approx(0.8)
    assert router.handle_timer(now=0.79) == []
    assert dispatched(router.handle_timer(now=0.8)).request_id == "r2"
    assert router.queued == 0


def test_a_first_token_that_comes_early_opens_the_door() -> None:
    router = holding("a")
    first = dispatched(submitted(router, asked("r1"), now=0.0))
    assert held(submitted(router, asked("r2"), now=0.0))
    assert dispatched(router.on_first_token(first.attempt_id, now=0.3)).request_id == "r2"


def test_an_end_that_makes_a_place_opens_the_door() -> None:
    router = holding("a", max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("r1", 100), now=0.0))
    assert held(submitted(router, asked("r2", 100), now=0.0))
    assert router.on_first_token(first.attempt_id, now=0.1) == []
    assert dispatched(finished(router, first.attempt_id, COMPLETED, now=3.0)).request_id == "r2"


def one_place_each() -> tuple[Router, bytes]:
    """Two replicas with a place for one each: one stays two seconds there, as a rule, and the better one is taken."""
    router = holding("near", "far", max_concurrency_per_replica=1)
    for _ in range(20):
        router.replicas.on_probe("far", 0.3, now=0.0)
    blocks = b"".join(number.to_bytes(8, "little") for number in range(100))
    for n in range(4):
        name = f"before-{n}"
        attempt = dispatched(submitted(router, asked(name, 100, now=10.0 * n), now=10.0 * n))
        assert attempt.replica == "near"
        router.on_first_token(attempt.attempt_id, now=10.0 * n + 0.1)
        router.on_finish(attempt.attempt_id, COMPLETED, now=10.0 * n + 2.0)
    return router, blocks


def test_who_finds_no_place_goes_where_one_is_if_as_much_of_its_prompt_is_there() -> None:
    router, blocks = one_place_each()
    first = dispatched(submitted(router, asked("r1", 100, now=50.0), now=50.0))
    assert first.replica == "near"
    router.on_first_token(first.attempt_id, now=50.1)
    found = dispatched(submitted(router, asked("r2", 100, now=51.0, blocks=blocks[:8]), now=51.0))
    assert found.replica == "far", "three tenths of a second further, where the next place here may take two seconds"
    assert found.decision.excluded["near"] == "full"


def test_a_slot_elsewhere_is_taken_by_the_difference_in_cost_not_by_the_cost() -> None:
    """A second of prefill on either, 1.9 s of way over there, two seconds for a place here: 1.65 s more in all."""
    router, _ = one_place_each()
    for _ in range(60):
        router.replicas.on_probe("far", 1.9, now=45.0)
    first = dispatched(submitted(router, asked("r1", 100, now=50.0), now=50.0))
    router.on_first_token(first.attempt_id, now=50.1)
    found = dispatched(submitted(router, asked("r2", 1000, now=51.0), now=51.0))
    assert (found.replica, found.decision.excluded) == ("far", {"near": "full"})


def test_a_request_waits_when_no_replica_has_a_slot() -> None:
    router, _ = one_place_each()
    for name in ("r1", "r2"):
        dispatched(submitted(router, asked(name, 100, now=50.0), now=50.0))
    assert held(submitted(router, asked("r3", 100, now=51.0), now=51.0))


def test_who_finds_no_place_waits_for_one_where_its_prompt_is() -> None:
    router, blocks = one_place_each()
    warm = dispatched(submitted(router, asked("r1", 640, now=50.0, blocks=blocks), now=50.0))
    assert warm.replica == "near"
    router.on_first_token(warm.attempt_id, now=50.7)
    assert held(submitted(router, asked("r2", 700, now=51.0, blocks=blocks), now=51.0)), "its prefix is not there"
    assert dispatched(finished(router, warm.attempt_id, COMPLETED, now=52.7)).replica == "near"


def test_who_finds_no_place_waits_for_one_that_is_sooner_than_another_is_near() -> None:
    router, _ = one_place_each()
    for _ in range(20):
        router.replicas.on_probe("far", 60.0, now=45.0)
    first = dispatched(submitted(router, asked("r1", 100, now=50.0), now=50.0))
    router.on_first_token(first.attempt_id, now=50.1)
    assert held(submitted(router, asked("r2", 100, now=51.0), now=51.0))


def test_a_request_waits_for_the_best_replica_and_later_ones_pass() -> None:
    router = holding("near", "far")
    blocks = b"".join(number.to_bytes(8, "little") for number in range(200))
    first = asked("r1", 12_800, blocks=blocks)
    warm = dispatched(submitted(router, first, now=0.0)).replica
    cold = {"near": "far", "far": "near"}[warm]
    assert held(submitted(router, asked("r2", 12_900, now=6.0, blocks=blocks), now=6.0)), (
        "its prefix is worth waiting for"
    )
    assert dispatched(submitted(router, asked("r3", 1000, now=6.0), now=6.0)).replica == cold


def test_the_shortest_goes_first() -> None:
    router = holding("a")
    attempt = dispatched(submitted(router, asked("r0"), now=0.0))
    for name, tokens in (("long", 3000), ("short", 500), ("middle", 1000)):
        assert held(submitted(router, asked(name, tokens), now=0.6))
    went = []
    for now in (1.0, 1.5, 2.5):
        actions = router.on_first_token(attempt.attempt_id, now=now) or router.handle_timer(now=now)
        sent = [action for action in actions if isinstance(action, Dispatch)]
        went += [each.request_id for each in sent]
        attempt = sent[0] if sent else attempt
    assert went == ["short", "middle", "long"]


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    router = holding("a", queue_max_requests=2)
    dispatched(submitted(router, asked("r0", 4000), now=0.0))
    assert all(held(submitted(router, asked(f"r{number}", 3000), now=0.0)) for number in (1, 2))
    refusal = rejected(submitted(router, asked("r3"), now=0.0))
    assert (refusal.status, refusal.code) == (429, "queue_full")
    assert refusal.retry_after_s == pytest.approx(10.0)  # 4 s there, twice 3 s here


def test_without_a_deadline_nobody_is_turned_away_by_time() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 50_000), now=0.0))
    assert held(submitted(router, asked("r1"), now=0.0))
    assert [type(action) for _, action in until(router)] == [Dispatch]


def test_a_request_that_can_no_longer_meet_its_deadline_is_dropped_at_once() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 3000), now=0.0))
    refusal = rejected(submitted(router, asked("r1", 500, slo_s=2.0), now=0.0))
    assert (refusal.status, refusal.code) == (429, "deadline_unreachable")
    assert refusal.retry_after_s == pytest.approx(3.0)


def test_a_request_that_waits_goes_while_it_can_still_meet_its_deadline() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held(submitted(router, asked("r1", 500, slo_s=1.6), now=0.0))
    ((when, action),) = until(router)
    assert isinstance(action, Dispatch)
    assert when == pytest.approx(0.8, abs=0.01)


def test_a_request_for_which_no_place_comes_is_dropped_when_its_last_chance_is_over() -> None:
    router = holding("a", max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("r0", 100), now=0.0))
    router.on_first_token(first.attempt_id, now=0.1)  # and from here on it generates
    assert held(submitted(router, asked("r1", 500, slo_s=1.8), now=0.1))
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(1.3, abs=0.01)


def test_who_has_nobody_to_go_to_waits_no_longer_than_its_deadline() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held(submitted(router, asked("r1", 500, slo_s=1.8), now=0.0))
    router.replicas.drain("a", now=0.1)
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(1.8)


def test_a_prompt_too_long_for_its_deadline_is_served_if_there_is_room() -> None:
    router = holding("a")
    assert dispatched(submitted(router, asked("long", 10_000, slo_s=2.0), now=0.0)).replica == "a"


def test_a_prompt_too_long_for_its_deadline_waits_a_moment_only() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held(submitted(router, asked("long", 10_000, slo_s=2.0), now=0.0))
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(0.3)


def test_a_prompt_too_long_gets_the_room_that_comes_within_that_moment() -> None:
    router = holding("a")
    first = dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held(submitted(router, asked("long", 10_000, slo_s=2.0), now=0.0))
    assert dispatched(router.on_first_token(first.attempt_id, now=0.25)).request_id == "long"


def test_deadlines_come_from_the_limits_where_a_request_has_none() -> None:
    router = holding("a", slo_ttft_s=1.0)
    dispatched(submitted(router, asked("r0", 900), now=0.0))
    assert rejected(submitted(router, asked("r1", 500), now=0.0)).code == "deadline_unreachable"
    assert held(submitted(router, asked("r2", 500, slo_s=5.0), now=0.0))


@pytest.mark.parametrize(
    ("policy", "overload", "priority", "sheds"),
    [
        ("gorgo-ms", {}, 0, True),
        ("predicted-latency", {}, 0, False),
        ("predicted-latency", {}, -1, True),
        ("predicted-latency", {"shed_on_objective": True}, 0, True),
        ("predicted-latency", {"slo_ttft_s": 1.0}, 0, True),
    ],
)
def test_an_objective_steers_and_a_deadline_sheds(
    policy: str, overload: dict[str, object], priority: int, sheds: bool
) -> None:
    router = holding("a", policy=policy, **overload)
    dispatched(submitted(router, asked("r0", 900), now=0.0))
    actions = submitted(router, asked("r1", 500, slo_s=1.0, priority=priority), now=0.0)
    if sheds:
        assert rejected(actions).code == "deadline_unreachable"
    else:
        assert held(actions)
        assert not [action for _, action in until(router, 20.0) if isinstance(action, Reject)]


def test_who_left_while_waiting_is_never_sent() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0"), now=0.0))
    assert held(submitted(router, asked("r1"), now=0.0))
    assert router.abandon("r1", now=0.1) == router.abandon("never", now=0.1) == []
    assert router.queued == 0
    assert until(router) == []


def test_the_end_of_a_request_from_before_there_were_bounds_makes_no_room() -> None:
    router = make_router("a", limits=RouterLimits())
    before = dispatched(submitted(router, replace(a_request("r0"), client="c"), now=0.0))
    router.settings.set_limits(RouterLimits(clients=ClientRules(ClientLimits(max_in_flight=1))), now=1.0)
    dispatched(submitted(router, replace(a_request("r1"), client="c"), now=1.0))
    router.on_finish(before.attempt_id, COMPLETED, now=2.0)
    assert rejected(submitted(router, replace(a_request("r2"), client="c"), now=2.0)).code == "client_concurrency"


def test_a_client_that_left_while_waiting_may_come_again() -> None:
    limits = replace(HOLDING, clients=ClientRules(ClientLimits(max_in_flight=1)))
    router = holding("a")
    router.settings.set_limits(limits, now=0.0)
    dispatched(submitted(router, asked("r0", client="other"), now=0.0))
    assert held(submitted(router, asked("r1", client="c"), now=0.0))
    assert rejected(submitted(router, asked("r2", client="c"), now=0.0)).code == "client_concurrency"
    router.abandon("r1", now=0.1)
    assert held(submitted(router, asked("r3", client="c"), now=0.2))


def test_a_request_that_nobody_may_take_waits_a_little_under_any_policy() -> None:
    router = make_router("a", limits=RouterLimits(overload=OverloadLimits(no_replica_wait_s=2.0)))
    router.replicas.drain("a", now=0.0)
    assert held(submitted(router, asked("r1"), now=0.0))
    assert router.next_timer() == 2.0
    router.replicas.drain("a", False, now=1.0)
    assert [action.request_id for action in router.handle_timer(now=1.0)] == ["r1"]


@pytest.mark.parametrize("stranded", [False, True])
def test_who_waits_behind_many_that_cannot_go_is_looked_at_in_turn(stranded: bool) -> None:
    """More than one walk looks at, all before it in order, for a replica that is closed or away."""
    router = holding("busy", "free", no_replica_wait_s=100.0)
    large, small = timed("busy", max_running_requests=4), timed("free", max_running_requests=1)
    router.replicas.set_fleet([replace(large, models=("large",)), replace(small, models=("small",))], now=0.0)
    if stranded:
        router.replicas.drain("busy", now=0.0)
    for number in range(300):
        router.submit(asked(f"large-{number}", 1000, model="large"), now=0.0)
    first = dispatched(submitted(router, asked("first", 2000, model="small"), now=0.0))
    assert held(submitted(router, asked("waits", 2000, model="small"), now=0.0))
    actions, now = finished(router, first.attempt_id, COMPLETED, now=0.1), 0.1
    while not any(action.request_id == "waits" for action in actions):
        due_s = router.next_timer()
        assert due_s is not None
        now = due_s
        assert now < 0.1 + 300 / 64 * 0.06, "each walk begins with the same ones"
        actions = router.handle_timer(now=now)


def test_clients_take_turns_also_after_nobody_could_take_them() -> None:
    router = holding("a")
    router.replicas.drain("a", now=0.0)
    for number in range(20):
        assert held(submitted(router, asked(f"many-{number}", client="many"), now=0.0))
    assert held(submitted(router, asked("one", client="one"), now=0.1))
    router.replicas.drain("a", False, now=0.2)
    served = [action.request_id for _, action in until(router) if isinstance(action, Dispatch)]
    assert served.index("one") <= 1


def test_a_request_that_nobody_takes_in_time_is_a_503() -> None:
    router = make_router("a", limits=HOLDING)
    router.replicas.drain("a", now=0.0)
    assert held(submitted(router, asked("r1"), now=0.0))
    refusal = rejected(router.handle_timer(now=2.0))
    assert (refusal.status, refusal.code) == (503, "no_replica")
    assert refusal.retry_after_s is not None


def test_a_retry_does_not_wait() -> None:
    router = holding("a", "b")
    first = dispatched(submitted(router, asked("r1"), now=0.0))
    other = dispatched(submitted(router, asked("r2"), now=0.0))
    assert first.replica != other.replica
    assert dispatched(finished(router, first.attempt_id, FAILED, now=0.1)).replica == other.replica


def test_policies_without_predictions_send_at_once() -> None:
    router = make_router("a", policy="gorgo", limits=HOLDING)
    assert all(isinstance(submitted(router, asked(f"r{n}"), now=0.0)[-1], Dispatch) for n in range(10))


def test_turned_off_everything_is_sent_at_once_and_who_waited_goes() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0"), now=0.0))
    assert held(submitted(router, asked("r1"), now=0.0))
    router.settings.set_limits(RouterLimits(), now=0.1)
    assert [action.request_id for action in router.handle_timer(now=0.1)] == ["r1"]
    assert isinstance(submitted(router, asked("r2"), now=0.1)[-1], Dispatch)


def test_a_lost_pinned_replica_ends_the_wait() -> None:
    router = holding("a", "b")
    dispatched(submitted(router, asked("r0", pinned_replica="a"), now=0.0))
    assert held(submitted(router, asked("r1", pinned_replica="a"), now=0.0))
    router.replicas.set_fleet([timed("b")], now=0.1)
    ((_, action),) = until(router)
    assert isinstance(action, Reject)


def test_the_timer_is_never_in_the_past_after_it_was_handled() -> None:
    router = holding("a")
    dispatched(submitted(router, asked("r0", 500), now=1e9))
    assert held(submitted(router, asked("r1"), now=1e9))
    now = 1e9
    for _ in range(100):
        due_s = router.next_timer()
        assert due_s is not None
        assert due_s > now or router.queued == 0
        now = due_s
        if router.handle_timer(now=now):
            break
    assert router.queued == 0
