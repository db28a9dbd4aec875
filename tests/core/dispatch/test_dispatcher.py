"""What a dispatch writes down at the replica, and the replicas it names behind it."""

from __future__ import annotations

import pytest

from gorgo.core.limits import RouterLimits
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


def fallbacks(policy: str, count: int, *busy: str) -> tuple[str, tuple[str, ...]]:
    """Return the replica and its fallbacks of a request while `busy` replicas each have another."""
    router = make_router("a", "b", "c", "d", policy=policy, limits=RouterLimits(fallbacks=count))
    for number, name in enumerate(busy):
        submitted(router, a_request(f"busy-{number}", pinned_replica=name, prompt_tokens=10_000), now=0.0)
    router.replicas.drain("d", now=0.5)
    sent = dispatched(submitted(router, a_request(), now=1.0))
    return sent.replica, sent.fallbacks


@pytest.mark.parametrize(
    ("policy", "busy", "replica", "expected"),
    [
        ("nearest", (), "a", ("b", "c")),  # the farther the dearer
        ("gorgo-ms", ("a", "b"), "c", ("a", "b")),  # a is nearer, with as much work
        ("least-request-in-flight", ("a", "a", "b"), "c", ("b", "a")),
        ("round-robin", ("a", "a", "c"), "a", ("b", "c")),  # without a cost, by requests in flight
    ],
)
def test_the_next_best_candidates_are_the_fallbacks(
    policy: str, busy: tuple[str, ...], replica: str, expected: tuple[str, ...]
) -> None:
    assert fallbacks(policy, 2, *busy) == (replica, expected)
    assert fallbacks(policy, 1, *busy) == (replica, expected[:1])
    assert fallbacks(policy, 9, *busy) == (replica, expected), "the draining one is none"


def test_there_are_no_fallbacks_where_the_router_retries_by_itself() -> None:
    assert fallbacks("gorgo-ms", 0) == ("a", ())
    assert RouterLimits().fallbacks == 0


def test_the_number_of_fallbacks_changes_with_the_limits() -> None:
    router = make_router("a", "b", "c")
    router.settings.set_limits(RouterLimits(fallbacks=1), now=0.0)
    assert dispatched(submitted(router, a_request(), now=1.0)).fallbacks == ("b",)
