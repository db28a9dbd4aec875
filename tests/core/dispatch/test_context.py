"""Replicas whose models have contexts of different lengths: which may serve, and what a refusal for it means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.messages.actions import Dispatch, Forward
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, REFUSED, a_request, dispatched, finished, make_router, submitted

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
