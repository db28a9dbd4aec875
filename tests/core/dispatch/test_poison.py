"""A prompt under which replicas go down is sent to two of them, and to no third one."""

from __future__ import annotations

from dataclasses import replace

from gorgo.core.dispatch.in_flight import MAX_SUSPECTS, WINDOW_S, PoisonPrompts
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, a_request, dispatched, finished, make_router, rejected, submitted

BROKEN = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected")
CUT = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="disconnected")
REFUSED = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")


def poison(request_id: str, *, tokens: int = 300) -> RouteRequest:
    return a_request(request_id, prompt_tokens=tokens)


def other(request_id: str) -> RouteRequest:
    return replace(a_request(request_id), prefix_hash=2)


def broken_twice(router: Router, *, now: float) -> list[str]:
    """Send the poison, which breaks the replica that has it; the next probe of each such replica fails."""
    action: object = dispatched(submitted(router, poison(f"p{now}"), now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        (action,) = finished(router, action.attempt_id, BROKEN, now=now)
        router.replicas.on_probe(names[-1], None, now=now)
    assert isinstance(action, Reject)
    assert (action.status, action.code) == (502, "poison_prompt")
    return names


def test_a_prompt_that_takes_two_replicas_down_is_sent_to_no_third_one() -> None:
    router = make_router(*"abcdef")
    assert broken_twice(router, now=1.0) == ["a", "b"]
    again = rejected(submitted(router, poison("again"), now=1.5))
    assert (again.status, again.code, again.retry_after_s) == (502, "poison_prompt", None)
    assert "2 replicas went down" in again.message
    (known,) = router.view.poison_prompts(now=2.0)
    assert (known.replicas, known.request_id, known.until_s) == (("a", "b"), "p1.0", 1.0 + WINDOW_S)
    assert [sample.status for sample in router.samples] == [502]
    assert dispatched(submitted(router, other("o"), now=2.0)).replica == "a", "other prompts are served"


def test_the_retries_of_clients_count_for_one_prompt_within_a_minute() -> None:
    router = make_router(*"abc")
    for name, now in (("a", 1.0), ("b", 30.0)):
        attempt = dispatched(submitted(router, poison(f"p{name}"), now=now))
        assert attempt.replica == name
        router.on_finish(attempt.attempt_id, CUT, now=now)
        router.replicas.on_probe(name, None, now=now)
        router.replicas.drain(name, now=now)
    assert rejected(submitted(router, poison("third"), now=31.0)).code == "poison_prompt"
    assert dispatched(submitted(router, poison("longer", tokens=301), now=31.0)).replica == "c"
    assert dispatched(submitted(router, poison("later"), now=1.0 + WINDOW_S)).replica == "c"
    assert router.view.poison_prompts(now=1.0 + WINDOW_S) == []


def test_broken_connections_of_replicas_that_still_listen_are_retried_free() -> None:
    router = make_router(*"abc")
    first = dispatched(submitted(router, poison("p"), now=1.0))
    second = dispatched(finished(router, first.attempt_id, BROKEN, now=1.0))
    assert dispatched(finished(router, second.attempt_id, BROKEN, now=1.1)).replica == "c"
    router.replicas.on_probe("a", 0.01, now=1.2)
    assert router.view.poison_prompts(now=1.2) == []


def test_a_replica_that_was_down_before_the_attempt_proves_nothing() -> None:
    router = make_router(*"abc")
    router.replicas.on_probe("a", None, now=0.5)
    first = dispatched(submitted(router, poison("p"), now=1.0))
    second = dispatched(finished(router, first.attempt_id, BROKEN, now=1.0))
    assert dispatched(finished(router, second.attempt_id, BROKEN, now=1.1)).replica == "c"


def test_a_refused_connection_of_another_request_and_a_restart_prove_it_too() -> None:
    router = make_router(*"abcd")
    router.replicas.on_engine_sample("b", EngineSample(prompt_tokens_total=900.0), now=0.0)
    first = dispatched(submitted(router, poison("p"), now=1.0))
    bystander = dispatched(submitted(router, other("o"), now=1.0))
    assert bystander.replica == "a"
    second = dispatched(finished(router, first.attempt_id, BROKEN, now=1.1))
    finished(router, bystander.attempt_id, REFUSED, now=1.2)
    assert rejected(finished(router, second.attempt_id, BROKEN, now=1.3)).code == "poison_prompt"
    assert router.view.poison_prompts(now=1.4) == [], "b is not proven"
    router.replicas.on_engine_sample("b", EngineSample(prompt_tokens_total=5.0), now=9.0)
    assert [each.replicas for each in router.view.poison_prompts(now=9.0)] == [("a", "b")]


def test_a_prompt_that_is_answered_to_its_end_is_no_suspect() -> None:
    router = make_router(*"abc")
    first = dispatched(submitted(router, poison("p"), now=1.0))
    answered = dispatched(finished(router, first.attempt_id, BROKEN, now=1.0))
    router.replicas.on_probe("a", None, now=1.0)
    router.on_finish(answered.attempt_id, COMPLETED, now=1.5)
    router.replicas.drain("a", now=1.5)
    again = dispatched(submitted(router, poison("q"), now=2.0))
    assert dispatched(finished(router, again.attempt_id, BROKEN, now=2.1)).replica == "c"


def test_a_prompt_of_many_clients_is_served_while_replicas_go_down_under_another_one() -> None:
    router = make_router(*"abcd")
    served = dispatched(submitted(router, other("before"), now=0.5))
    router.on_finish(served.attempt_id, COMPLETED, now=0.6)
    for name, now in (("a", 1.0), ("b", 2.0)):
        attempt = dispatched(submitted(router, other(name), now=now))
        assert attempt.replica == name
        router.on_first_token(attempt.attempt_id, now=now + 0.1)
        router.on_finish(attempt.attempt_id, CUT, now=now + 0.2)
        router.replicas.on_probe(name, None, now=now + 0.2)
        router.replicas.drain(name, now=now + 0.2)
    assert dispatched(submitted(router, other("after"), now=3.0)).replica == "c"


def test_the_memory_of_prompts_is_bounded_and_forgets_replicas_that_left() -> None:
    router = make_router(*"ab")
    suspects, replicas = PoisonPrompts(), list[Replica](router._fleet.replicas.values())
    for tokens in range(MAX_SUSPECTS + 10):
        suspects.on_broken(poison("p", tokens=tokens), replicas[0], dispatched_s=0.5, now=1.0)
    assert len(suspects._suspects) == MAX_SUSPECTS
    suspects._suspects.check()
    suspects.on_down(replicas[0], now=1.5)
    router.replicas.set_fleet([replicas[1].spec], now=2.0)
    suspects.forget_left()
    assert not suspects._down_s
