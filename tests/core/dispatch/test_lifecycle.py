"""Which of two attempts answers the request."""

from __future__ import annotations

from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.core.messages.actions import Cancel, Hedge
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted, timed


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
