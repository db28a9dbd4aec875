"""What a dispatch writes down at the replica."""

from __future__ import annotations

from tests.core.routers import FAILED, GONE, a_request, dispatched, fail_on, make_router, submitted


def test_a_dispatch_to_a_half_open_replica_is_its_one_trial_until_that_attempt_ends() -> None:
    router = make_router("a", "b")
    fail_on(router, FAILED, 5)
    router.handle_timer(now=6.0)
    trial = dispatched(submitted(router, a_request("trial"), now=6.0))
    assert [
        trial.replica,
        *(dispatched(submitted(router, a_request(f"beside-{n}"), now=6.0)).replica for n in range(3)),
    ] == ["a", "b", "b", "b"]
    router.on_finish(trial.attempt_id, GONE, now=6.5)
    assert dispatched(submitted(router, a_request("next"), now=6.5)).replica == "a"
