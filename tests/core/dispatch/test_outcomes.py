"""How a request ends for its client, and whose fault a failure is: the replica's, the prompt's or the length's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.dispatch.in_flight import (
    MAX_SUSPECTS,
    WINDOW_S,
    PoisonPrompts,
    RequestState,
    deadline_exceeded,
    model_not_found,
    no_replica,
    queue_full,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    status_of,
    too_many_in_flight,
    upstream_error,
)
from gorgo.core.fleet.replica import Replica
from gorgo.core.limits import QuotaExceeded, RouterLimits
from gorgo.core.messages.actions import Dispatch, Forward, Reject
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest, Sample
from gorgo.core.router import Router
from tests.core.routers import (
    COMPLETED,
    REFUSED,
    a_request,
    dispatched,
    finished,
    make_router,
    rejected,
    submitted,
    timed,
)

# --- How a request ends for its client: status, word, when to come back.


REQUEST = a_request("r", model="m", pinned_replica="p")


@pytest.mark.parametrize(
    ("reject", "status", "code", "message", "retry_after_s"),
    [
        (model_not_found(REQUEST), 404, "model_not_found", "no replica serves the model 'm'", None),
        (too_many_in_flight(REQUEST, 9), 429, "too_many_in_flight", "9 requests are in flight", 1.0),
        (replica_not_found(REQUEST), 404, "replica_not_found", "the replica 'p' with the stored response", None),
        (quota_exceeded(REQUEST, QuotaExceeded("why", "too much", 2.5)), 429, "why", "too much", 2.5),
        (no_replica(REQUEST, 3.5), 503, "no_replica", "no replica can take the request now", 3.5),
        (queue_full(REQUEST, 7, 4.5), 429, "queue_full", "7 requests are queued", 4.5),
        (
            deadline_exceeded(REQUEST, 5.5),
            429,
            "deadline_unreachable",
            "the TTFT deadline cannot be met",
            5.5,
        ),
        (
            region_not_allowed(replace(REQUEST, regions=frozenset({"west", "east"}))),
            *(403, "region_not_allowed", "may be served in east, west only, and its stored response is elsewhere"),
            None,
        ),
        (
            region_not_allowed(replace(REQUEST, regions=frozenset(), pinned_replica=None)),
            *(403, "region_not_allowed", "may be served in no region only, and no replica there serves it"),
            None,
        ),
    ],
)
def test_each_refusal_has_its_status_its_word_and_its_time(
    reject: Reject, status: int, code: str, message: str, retry_after_s: float | None
) -> None:
    assert (reject.request_id, reject.status, reject.code, reject.retry_after_s) == ("r", status, code, retry_after_s)
    assert message in reject.message


@pytest.mark.parametrize(
    ("outcome", "tried", "status", "code", "message", "retry_after_s"),
    [
        (
            Outcome(AttemptResult.BUSY, status=429),
            "a",
            429,
            "replicas_busy",
            "every replica is busy (tried 1 replica)",
            1.0,
        ),
        (Outcome(AttemptResult.BUSY, status=503), "ab", 503, "replicas_busy", "(tried 2 replicas)", 1.0),
        (Outcome(AttemptResult.BUSY), "a", 503, "replicas_busy", "busy", 1.0),
        (
            Outcome(AttemptResult.DEADLINE_EXCEEDED, status=504),
            "a",
            504,
            "total_timeout",
            "longer than its total timeout",
            None,
        ),
        (
            Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=504),
            "a",
            504,
            "upstream_timeout",
            "in time (tried 1",
            None,
        ),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"), "a", 504, "upstream_timeout", "in time", None),
        (
            Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected"),
            "ab",
            502,
            "upstream_failed",
            "replicas)",
            None,
        ),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500), "a", 502, "upstream_failed", "could answer", None),
    ],
)
def test_the_last_failure_has_the_status_that_a_client_would_expect(
    outcome: Outcome, tried: str, status: int, code: str, message: str, retry_after_s: float | None
) -> None:
    reject = upstream_error(RequestState(REQUEST, tried_replicas=set(tried)), outcome)
    assert (reject.request_id, reject.status, reject.code, reject.retry_after_s) == ("r", status, code, retry_after_s)
    assert message in reject.message


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(AttemptResult.COMPLETED, status=201), 201),
        (Outcome(AttemptResult.COMPLETED), 200),
        (Outcome(AttemptResult.UPSTREAM_4XX, status=422), 422),
        (Outcome(AttemptResult.CLIENT_DISCONNECTED, status=200), 499),
        (Outcome(AttemptResult.SUPERSEDED, status=200), 499),
        (Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200), 502),
        (Outcome(AttemptResult.DEADLINE_EXCEEDED, status=200), 504),
    ],
)
def test_a_sample_has_the_status_that_the_client_saw(outcome: Outcome, status: int) -> None:
    assert status_of(outcome) == status


def test_a_sample_has_the_decision_of_its_attempt_and_what_came_of_it() -> None:
    """100 tokens at a thousand a second, 10 ms away; received half a second before."""
    router = make_router(policy="gorgo-ms", replicas=[timed("a", "near")])
    sent = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=-0.5), now=0.0))
    decision = sent.decision
    assert decision.predicted_ttft_s is not None
    router.on_first_token(sent.attempt_id, now=0.25)
    outcome = Outcome(
        AttemptResult.COMPLETED, status=200, prompt_tokens=90, cached_tokens=16, output_tokens=7, itl_s_p95=0.02
    )
    router.on_finish(sent.attempt_id, outcome, now=1.0)
    (sample,) = router.samples
    assert sample == Sample(
        seq=1,
        request_id="r",
        finished_s=1.0,
        replica="a",
        region="near",
        policy="gorgo-ms",
        weights_version=router.settings.weights.version,
        input_tokens=90,
        cached_tokens=16,
        estimated_cached_tokens=decision.estimated_cached_tokens,
        output_tokens=7,
        rtt_ms=10.0,
        predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
        ttft_ms=750.0,
        e2e_s=1.5,
        itl_ms_p95=20.0,
        status=200,
        retries=0,
        hedged=False,
        terms={name: float(column[0]) for name, column in decision.terms.items()},
        best_cached_tokens=decision.best_cached_tokens,
        ttft_parts_ms=decision.estimate.attribute(0.75).as_ms(),
    )
    assert sample.terms


# --- A prompt under which replicas go down is sent to two of them, and to no third one.


BROKEN = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected")
CUT = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="disconnected")
REFUSED_POISON = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")


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
    finished(router, bystander.attempt_id, REFUSED_POISON, now=1.2)
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


# --- A 5xx or a timeout is the request's fault if several replicas fail it alike, and the replica's in any other case.


FAILURES = {
    "500": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500, error="status_500", unsent=True),
    "502": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=502, error="status_502", unsent=True),
    "timeout": Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"),
}
#: Enough for retries of all.
LIMITS = RouterLimits(retry_budget_minimum=1000)


def serve(router: Router, number: int, ends: dict[str, Outcome], *, now: float) -> tuple[list[str], object]:
    """Serve a request; return the replicas that had it, and the last action."""
    action: object = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        action = next(iter(finished(router, action.attempt_id, ends.get(action.replica, COMPLETED), now=now)), None)
    return names, action


@pytest.mark.parametrize("kind", FAILURES)
def test_what_every_replica_fails_alike_ejects_none_however_often(kind: str) -> None:
    router = make_router(*"abcd", limits=LIMITS)
    for number in range(50):
        names, end = serve(router, number, dict.fromkeys("abcd", FAILURES[kind]), now=1.0 + number / 10)
        assert len(names) == 3
        if kind == "timeout":
            assert isinstance(end, Reject)
            assert end.code == "upstream_timeout"
        else:
            assert end == Forward(f"r{number}"), "the client gets the engine's own answer"
    assert set(router.view.health_states().values()) == {"healthy"}
    assert {sample.status for sample in router.samples} == {504 if kind == "timeout" else int(kind)}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_replica_that_fails_what_another_answers_is_ejected_after_three(kind: str) -> None:
    router = make_router(*"ab", limits=LIMITS)
    served = [serve(router, number, {"a": FAILURES[kind]}, now=1.0 + number / 10)[0] for number in range(6)]
    assert served == [["a", "b"]] * 3 + [["b"]] * 3


def test_failures_that_differ_are_each_replica_s_own_and_a_failure_without_an_answer_is_a_reject() -> None:
    router = make_router(*"ab", limits=LIMITS)
    for number in range(3):
        _, end = serve(router, number, {"a": FAILURES["500"], "b": FAILURES["timeout"]}, now=1.0 + number / 10)
        assert isinstance(end, Reject)
    assert set(router.view.health_states().values()) == {"ejected"}


def test_a_replica_with_failures_of_open_requests_pauses_until_one_of_them_has_ended() -> None:
    router = make_router(*"ab", limits=LIMITS)
    retried = []
    for number in range(3):
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        assert first.replica == "a"
        retried.append(dispatched(finished(router, first.attempt_id, FAILURES["500"], now=1.0)))
    assert dispatched(submitted(router, a_request("next"), now=1.1)).replica == "b"
    finished(router, retried[0].attempt_id, FAILURES["500"], now=1.2)
    assert dispatched(submitted(router, a_request("after"), now=1.3)).replica == "a", "that one was the request's fault"
    for other in retried[1:]:
        router.on_first_token(other.attempt_id, now=1.4)
    assert router.view.health_states()["a"] == "healthy", "two failures of its own"


def test_a_refusal_by_another_replica_says_that_the_request_is_at_fault() -> None:
    router = make_router(*"ab", limits=LIMITS)
    refused = Outcome(AttemptResult.UPSTREAM_4XX, status=400, unsent=True)
    for number in range(3):
        serve(router, number, {"a": FAILURES["500"], "b": refused}, now=1.0 + number)
    assert router.view.health_states()["a"] == "healthy"


# --- Replicas whose models have contexts of different lengths: which may serve, and what a refusal for it means.


TOO_LONG = Outcome(AttemptResult.UPSTREAM_4XX, status=400, unsent=True, too_long=True)


def router_of(**contexts: int | None) -> Router:
    """Replicas of one model, the nearest first."""
    router = make_router(*contexts)
    for name, tokens in contexts.items():
        known = {} if tokens is None else {"m": tokens}
        router.replicas.on_models(name, ("m",), contexts=known, now=0.0)
    return router


def asked(tokens: int, output: int | None = None, number: int = 0) -> RouteRequest:
    return replace(a_request(f"r{number}", prompt_tokens=tokens, model="m"), most_output_tokens=output)


@pytest.mark.parametrize(
    ("tokens", "output", "replica"),
    [
        (8000, None, "short"),
        (8191, None, "short"),
        (8192, None, "long"),  # there is no token left for the answer
        (8000, 192, "short"),
        (8000, 193, "long"),  # vLLM and SGLang refuse what the answer may not fit
        (20_000, None, "long"),
        (20_000, 100_000, "long"),  # fits nowhere with its answer, which llama.cpp cuts off: where the prompt fits
        (200_000, None, "short"),  # fits nowhere: an engine says so best
    ],
)
def test_request_goes_where_its_context_is_long_enough(tokens: int, output: int | None, replica: str) -> None:
    router = router_of(short=8192, long=32768)
    assert dispatched(submitted(router, asked(tokens, output), now=1.0)).replica == replica


def test_reason_is_the_context_and_an_unknown_one_may_be_long_enough() -> None:
    router = router_of(short=8192, unknown=None)
    dispatch = dispatched(submitted(router, asked(20_000), now=1.0))
    assert (dispatch.replica, dict(dispatch.decision.excluded)) == ("unknown", {"short": "context"})


def test_no_prompt_of_a_mixed_fleet_is_refused_though_a_replica_fits() -> None:
    """Prompts whose estimate is a third too low, as of a language with long tokens."""
    router = router_of(short=8192, long=32768)
    served = refused_first = 0
    for number in range(120):
        true_tokens = 200 * (number + 1)
        action: object = dispatched(submitted(router, asked(true_tokens * 2 // 3, number=number), now=1.0 + number))
        while isinstance(action, Dispatch):
            fits = true_tokens < {"short": 8192, "long": 32768}[action.replica]
            served += fits
            refused_first += not fits
            (action, *_) = [
                *finished(router, action.attempt_id, COMPLETED if fits else TOO_LONG, now=1.0 + number),
                None,
            ]
        assert action is None
    assert (served, refused_first) == (120, 21)
    assert set(router.view.health_states().values()) == {"healthy"}
    assert [view.failures for view in router.view.snapshots(now=200.0)] == [0, 0]


def test_prompt_that_is_too_long_is_tried_once_more_and_then_refused_for_good() -> None:
    router = router_of(short=8192, middle=16384, long=32768)
    first = dispatched(submitted(router, asked(8000), now=1.0))
    second = dispatched(finished(router, first.attempt_id, TOO_LONG, now=1.0))
    assert (first.replica, second.replica) == ("short", "middle")
    assert finished(router, second.attempt_id, TOO_LONG, now=1.0) == [Forward("r0")]
    assert [sample.status for sample in router.samples] == [400]


def test_prompt_that_is_too_long_is_not_tried_where_the_context_is_as_short() -> None:
    router = router_of(one=8192, other=8192)
    first = dispatched(submitted(router, asked(8000), now=1.0))
    assert finished(router, first.attempt_id, TOO_LONG, now=1.0) == [Forward("r0")]


def test_prompt_that_is_too_long_never_ejects_and_other_refusals_stay_what_they_are() -> None:
    router = router_of(one=8192, other=32768)
    for number in range(50):
        first = dispatched(submitted(router, asked(8000, number=number), now=1.0 + number))
        second = dispatched(finished(router, first.attempt_id, TOO_LONG, now=1.0 + number))
        router.on_finish(second.attempt_id, COMPLETED, now=1.0 + number)
    assert set(router.view.health_states().values()) == {"healthy"}
    assert {view.refusal for view in router.view.snapshots(now=60.0)} == {None}
    (action,) = finished(
        router, dispatched(submitted(router, asked(10, number=99), now=70.0)).attempt_id,
        replace(REFUSED, unsent=True), now=70.0,
    )  # fmt: skip
    assert action == Forward("r99")


def test_adapter_and_base_have_contexts_of_their_own() -> None:
    router = make_router("a", "b")
    router.replicas.on_models("a", ("m", "sql"), contexts={"m": 32768, "sql": 4096}, now=0.0)
    router.replicas.on_models("b", ("m", "sql"), contexts={"m": 32768, "sql": 32768}, now=0.0)
    assert dispatched(submitted(router, asked(8000), now=1.0)).replica == "a"
    assert dispatched(submitted(router, replace(asked(8000, number=1), model="sql"), now=1.0)).replica == "b"
