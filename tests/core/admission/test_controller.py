"""What counts towards a deadline, who passes whom, and when the proxy looks again. One second is a thousand tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.limits import ClientLimits, ClientRules
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.router import Router
from gorgo.policies.registry import make_policy
from tests.core.admission.test_deadline import HOLDING, asked, held, until
from tests.core.routers import COMPLETED, dispatched, finished, rejected, submitted, timed


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
    assert held(submitted(router, asked("r", 500, slo_s=slo_s, model="m"), now=0.0))
    actions = router.replicas.on_probe("a", 0.3, now=0.5)
    assert [isinstance(action, Reject) for action in actions] == [True] * dropped
    assert router.queued == (not dropped)


def test_time_before_the_arrival_is_missing_at_the_last_chance() -> None:
    """Received at 0, here since 0.4: with half a second of its own it has to go by 1.3, when no place has come."""
    router = at_hand("a", max_concurrency_per_replica=1)
    first = dispatched(submitted(router, asked("before", 100), now=0.0))
    router.on_first_token(first.attempt_id, now=0.105)
    assert held(submitted(router, asked("r", 500, now=0.0, slo_s=1.8), now=0.4))
    ((when, action),) = until(router)
    assert isinstance(action, Reject)
    assert when == pytest.approx(1.3)


def test_a_prompt_too_long_for_its_deadline_counts_its_moment_from_its_receipt() -> None:
    """It may wait 0.3 s at most: received at 0 and here since 0.2, it goes at 0.3."""
    router = at_hand("a")
    dispatched(submitted(router, asked("before", 1000), now=0.0))
    assert held(submitted(router, asked("long", 10_000, now=0.0, slo_s=2.0), now=0.2))
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
    assert held(submitted(router, asked("r", 500), now=0.1))
    ((when, _),) = until(router)
    assert when == pytest.approx(1.3)


def test_queued_and_dispatched_work_is_shared_by_the_healthy_replicas() -> None:
    """3 s there and 2 s here on one of two replicas, the other one idle and full: (3 + 2) / 2; ejected ones do none."""
    router = at_hand("a", "b", queue_max_requests=1, max_concurrency_per_replica=1)
    for number, tokens in enumerate((2000, 3000)):
        dispatched(submitted(router, asked(f"there-{number}", tokens), now=0.0))
    assert held(submitted(router, asked("here", 2000), now=0.0))
    assert rejected(submitted(router, asked("r", 100), now=0.0)).retry_after_s == pytest.approx((2.0 + 3.0 + 2.0) / 2)


def test_queued_work_without_a_replica_counts_by_the_fastest_one() -> None:
    """5 s of prompt, or half a second on the fast one; the two that are there share what waits: 30 s in all."""
    router = at_hand("a", "b", queue_max_requests=60)
    fast = replace(timed("b", max_running_requests=4), prefill_tokens_per_s=10_000.0)
    router.replicas.set_fleet([timed("a", max_running_requests=4), fast], now=0.0)
    for name in "ab":
        router.replicas.drain(name, now=0.0)
    for number in range(60):
        assert held(submitted(router, asked(f"r{number}", 5000), now=0.0))
    assert rejected(submitted(router, asked("more", 5000), now=0.0)).retry_after_s == pytest.approx(60 * 0.5 / 2)


def test_a_queued_request_goes_to_a_replica_that_joins_at_the_next_event() -> None:
    router = at_hand("a")
    router.replicas.drain("a", now=0.0)
    assert held(submitted(router, asked("r", 100), now=0.0))
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
    assert held(submitted(router, asked("r", 100), now=0.2))
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
    assert held(submitted(router, asked("r", 100, model="m"), now=0.2))
    router.replicas.drain("a", False, now=1.0)
    assert router.handle_timer(now=1.0) == []
    router.replicas.drain("a", now=5.0)
    assert [router.handle_timer(now=now) for now in (5.0, 6.9)] == [[], []]
    assert rejected(router.handle_timer(now=7.0)).code == "no_replica"


def test_no_timer_waits_for_the_backlog_of_a_replica_without_a_slot() -> None:
    """A second of prefill would be down to the limit at 0.8; the slot comes with an end, at no known time."""
    router = two_models(max_concurrency_per_replica=1)
    dispatched(submitted(router, asked("before", 1000, model="m"), now=0.0))
    assert held(submitted(router, asked("r", 100, model="m"), now=0.79))
    assert router.next_timer() == pytest.approx(0.84), "the next evaluation of all"


def test_a_better_replica_is_found_at_the_next_evaluation_not_before() -> None:
    """A second of prefill here, five seconds of way there, until a probe finds that it is none."""
    router = at_hand("a", "b")
    router.settings.set_limits(replace(router.settings.limits, rtt_ewma_alpha=1.0), now=0.0)
    router.replicas.on_probe("b", 5.0, now=0.0)
    assert dispatched(submitted(router, asked("before", 1000), now=0.0)).replica == "a"
    assert held(submitted(router, asked("r", 500), now=0.0))
    assert router.replicas.on_probe("b", 0.0, now=0.04) == []
    assert router.next_timer() == pytest.approx(0.09)
    assert dispatched(router.handle_timer(now=0.09)).replica == "b"


def test_queued_requests_for_other_replicas_are_offered_theirs_past_those_for_a_saturated_one() -> None:
    router = two_models()
    dispatched(submitted(router, asked("busy-m", 3000, model="m"), now=0.0))
    dispatched(submitted(router, asked("busy-n", 1000, model="n"), now=0.0))
    for name, model in (("m1", "m"), ("m2", "m"), ("n1", "n"), ("n2", "n")):
        assert held(submitted(router, asked(name, 100 if model == "m" else 500, model=model), now=0.0))
    assert [action.request_id for action in router.handle_timer(now=0.8)] == ["n1"]


def test_the_shortest_of_the_requests_without_a_replica_goes_first() -> None:
    """By the least prefill of any replica: the second one is ten times as fast."""
    router = at_hand("a", "b")
    fast = replace(timed("b", max_running_requests=4), prefill_tokens_per_s=10_000.0)
    router.replicas.set_fleet([timed("a", max_running_requests=4), fast], now=0.0)
    for name in "ab":
        router.replicas.drain(name, now=0.0)
    for name, tokens in (("long", 5000), ("short", 500), ("middle", 3000)):
        assert held(submitted(router, asked(name, tokens), now=0.0))
    router.replicas.drain("b", False, now=1.0)
    assert [action.request_id for action in router.handle_timer(now=1.0)] == ["short", "middle"]


def test_a_drained_replica_holds_up_no_request_for_an_open_one() -> None:
    router = at_hand("a", "b")
    router.replicas.drain("a", now=0.0)
    dispatched(submitted(router, asked("r0", 1000), now=0.0))
    assert held(submitted(router, asked("r1", 1000), now=0.0))
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
    assert held(submitted(router, asked("r", 12_900, now=10.0, blocks=blocks), now=10.0))
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
    assert held(submitted(router, asked("r", 1000, client="c"), now=0.0))
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
        assert held(submitted(router, asked("waits", 500, client="another"), now=0.0))
        rejected(submitted(router, asked("r", 500, client="c"), now=0.0))
        router.abandon("waits", now=0.0)
    else:
        router.replicas.drain("a", now=0.0)
        assert held(submitted(router, asked("r", 500, client="c"), now=0.0))
        rejected(router.handle_timer(now=2.0))
    assert not one_of_a_kind(router, "c", now=2.5)


@pytest.mark.parametrize(
    ("before", "now", "waits"), [(512, 0.312, False), (512, 0.311, True), (200, 0.0, False), (201, 0.0, True)]
)
def test_a_replica_is_open_up_to_its_limit_of_queued_prefill(before: int, now: float, waits: bool) -> None:
    router = at_hand("a")
    dispatched(submitted(router, asked("before", before), now=0.0))
    assert held(submitted(router, asked("r", now=now), now=now)) is waits


@pytest.mark.parametrize(("sent", "waits"), [(3, False), (4, True)])
def test_a_replica_has_as_many_slots_as_its_engine_runs_at_once(sent: int, waits: bool) -> None:
    router = at_hand("a")
    for number in range(sent):
        first = dispatched(submitted(router, asked(f"r{number}", 10, now=float(number)), now=float(number)))
        router.on_first_token(first.attempt_id, now=number + 0.015)
    assert held(submitted(router, asked("last", 10, now=9.0), now=9.0)) is waits


@pytest.mark.parametrize(("now", "waits"), [(0.4, False), (0.499, False), (0.65, True)])
def test_a_replica_whose_first_token_is_late_is_closed_by_its_queue_and_its_delay(now: float, waits: bool) -> None:
    """Due at 0.1 and late from 0.4 on: 100 ms that wait there, and 250 ms late at 0.65."""
    router = at_hand("a")
    dispatched(submitted(router, asked("stuck", 100), now=0.0))
    assert held(submitted(router, asked("r", now=now), now=now)) is waits
    if waits:
        assert router.next_timer() == 90.0, "no time opens it, a first token or an end does"


def test_a_replica_far_away_opens_half_a_round_trip_before_its_queue_is_at_the_limit() -> None:
    """One second of prefill from 0.1 on: at 0.8 the rest of it is 300 ms, of which 100 pass on the way."""
    router = at_hand("a")
    router.settings.set_limits(replace(router.settings.limits, rtt_ewma_alpha=1.0), now=0.0)
    router.replicas.on_probe("a", 0.2, now=0.0)
    dispatched(submitted(router, asked("before", 1000), now=0.0))
    assert held(submitted(router, asked("r"), now=0.0))
    assert router.next_timer() == pytest.approx(0.8)
    assert router.handle_timer(now=0.79) == []
    assert dispatched(router.handle_timer(now=0.8)).request_id == "r"
