"""Where short answers cannot be withheld, a replica that gives them while others do not gets few requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.short_answers import LONGEST_PAUSE_S
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import a_request, dispatched, finished, make_router, specs, submitted

LONG = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=50, sent=True)
SHORT = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=1, sent=True, short=True)


def serve(router: Router, number: int, ends: dict[str, Outcome], *, now: float) -> str:
    """Serve a request of a gateway's client; return the replica that had it."""
    action = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    assert not finished(router, action.attempt_id, ends.get(action.replica, LONG), now=now + 0.01)
    return action.replica


def test_a_replica_of_short_answers_gets_trials_ever_more_rarely_and_all_its_requests_after_a_longer_one() -> None:
    router = make_router("a", "b", "c")
    served = [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(600)]
    assert served[:4] == ["a"] * 4, "three that make it doubtful, and one that should have been withheld"
    trials = [number for number, name in enumerate(served) if name == "a"][4:]
    assert [later - earlier for earlier, later in pairwise(trials)] == [41, 81, 161]
    assert router.health_states() == {"a": "healthy", "b": "healthy", "c": "healthy"}, "nothing is proven"
    now = 61.0 + LONGEST_PAUSE_S
    while serve(router, int(1000 * now), {}, now=now) != "a":
        now += 0.1
    for number in range(10):
        now += 0.1
        decision = dispatched(submitted(router, a_request(f"then{number}"), now=now)).decision
        assert "a" in decision.candidates


def test_a_longer_answer_to_a_request_before_the_first_short_one_changes_nothing() -> None:
    router = make_router("a", "b", "c")
    early = dispatched(submitted(router, a_request("early"), now=0.5))
    assert early.replica == "a"
    served = [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(2)]
    finished(router, early.attempt_id, LONG, now=1.2)
    served += [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(3, 20)]
    assert served.count("a") == 4, "three that make it doubtful, and one that should have been withheld"


def test_a_short_answer_of_another_replica_is_not_the_requests_being_like_that() -> None:
    router = make_router("a", "b", "c")
    early = dispatched(submitted(router, replace(a_request("early"), pinned_replica="b"), now=0.5))
    served = [serve(router, 0, {"a": SHORT}, now=1.0)]
    finished(router, early.attempt_id, SHORT, now=1.05)
    served += [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(1, 20)]
    assert served.count("a") == 4


def test_requests_that_get_short_answers_everywhere_pause_nobody() -> None:
    router = make_router(*"abcd")
    ends = dict.fromkeys("abcd", SHORT)
    served = [serve(router, number, ends, now=1.0 + number / 100) for number in range(100)]
    assert served[-50:] == ["a"] * 50, "each has had its turn, and the best is chosen again"


def test_an_answer_of_one_token_to_a_request_for_one_says_nothing() -> None:
    router = make_router("a", "b")
    one = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=1, sent=True, short=None)
    assert {serve(router, number, {"a": one}, now=1.0 + number / 10) for number in range(50)} == {"a"}


def test_a_replica_that_leaves_is_forgotten() -> None:
    router = make_router("a", "b", "c")
    for number in range(10):
        serve(router, number, {"a": SHORT}, now=1.0 + number / 100)
    router.set_fleet(specs("b", "c"), now=2.0)
    router.set_fleet(specs("a", "b", "c"), now=2.1)
    decision = dispatched(submitted(router, a_request("r10"), now=2.2)).decision
    assert "a" in decision.candidates, "a new one of that name"


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=200), st.integers(1, 5))
def test_no_client_keeps_more_than_half_of_the_replicas_from_others(
    answers: list[tuple[bool, float]], count: int
) -> None:
    """Whatever a client sends, at least half of the replicas stay candidates, and none is ejected."""
    names = [f"r{number}" for number in range(count)]
    router, now = make_router(*names), 1.0
    for number, (short, pause_s) in enumerate(answers):
        now += pause_s
        serve(router, number, dict.fromkeys(names, SHORT) if short else {}, now=now)
        decision = dispatched(submitted(router, a_request(f"other{number}", received_s=now), now=now)).decision
        finished(router, f"other{number}/1", Outcome(AttemptResult.CLIENT_DISCONNECTED, sent=True), now=now)
        assert 2 * len(decision.candidates) >= count
    assert set(router.health_states().values()) == {"healthy"}
