"""An answer that is asked for at another replica while it is still open at its own: which of the two has it, and what
each of them leaves in the ledgers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.limits import ClientLimits, ClientRules, RouterLimits
from gorgo.core.messages.actions import Cancel, Continue, Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome, Sample
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, FAILED, a_request, dispatched, finished, load_of, make_router, submitted

ALL = frozenset("abc")
SUPERSEDED = Outcome(AttemptResult.SUPERSEDED)
STALLED = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200, error="stalled")
MOVED = Outcome(AttemptResult.SUPERSEDED, status=200, error="moved")
ENDED = replace(COMPLETED, prompt_tokens=296, output_tokens=60)


def running(router: Router, *, client: str | None = None) -> Dispatch:
    """Return a dispatch that has its first token at 1 s."""
    first = dispatched(submitted(router, a_request("r", client=client), now=0.0))
    router.on_first_token(first.attempt_id, now=1.0)
    return first


def opened(router: Router, attempt: Dispatch, tokens: int = 40, *, now: float = 6.0) -> Dispatch:
    found = router.continue_beside(attempt.attempt_id, ALL, tokens, now=now)
    assert isinstance(found, Continue), found
    router.check()
    return found.dispatch


def only_sample(router: Router) -> Sample:
    assert router.in_flight == 0
    router.check()
    (sample,) = router.samples
    return sample


def failures_of(router: Router, name: str) -> int:
    view = next(row for row in router.view.snapshots(now=9.0) if row.name == name)
    return view.failures


def test_both_are_open_each_with_what_it_was_asked() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    assert (first.replica, rest.replica, router.in_flight) == ("a", "b", 2)
    assert load_of(router, "a") == (1, 256, 0)
    assert load_of(router, "b") == (1, 296, 296)


@pytest.mark.parametrize("ended", [STALLED, MOVED])
def test_the_first_content_of_the_rest_makes_it_the_answer_and_the_old_one_ends(ended: Outcome) -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    assert router.on_first_token(rest.attempt_id, now=7.0) == [Cancel("r", first.attempt_id)]
    assert finished(router, first.attempt_id, ended, now=7.0) == []
    assert finished(router, rest.attempt_id, ENDED, now=8.0) == []
    sample = only_sample(router)
    assert (sample.replica, sample.status, sample.continued, sample.retries) == ("b", 200, 1, 0)
    assert (sample.input_tokens, sample.output_tokens, sample.ttft_ms) == (256, 100, 1000.0)
    assert failures_of(router, "a") == (ended is STALLED)


def test_an_answer_that_goes_on_where_it_was_cancels_the_rest_and_blames_nobody() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    assert router.on_resumed(first.attempt_id, now=7.0) == [Cancel("r", rest.attempt_id)]
    assert finished(router, rest.attempt_id, SUPERSEDED, now=7.0) == []
    assert finished(router, first.attempt_id, replace(ENDED, prompt_tokens=256), now=8.0) == []
    sample = only_sample(router)
    assert (sample.replica, sample.continued, sample.retries) == ("a", 0, 0)
    assert (sample.input_tokens, sample.output_tokens) == (256, 60)
    assert [failures_of(router, name) for name in "ab"] == [0, 0]


def test_a_rest_that_was_cancelled_is_no_continuation_and_its_replica_may_be_asked_again() -> None:
    router = make_router("a", "b", limits=RouterLimits(continuations=1))
    first = running(router)
    for now in (6.0, 16.0):
        rest = opened(router, first, now=now)
        assert rest.replica == "b"
        router.on_resumed(first.attempt_id, now=now + 1)
        router.on_finish(rest.attempt_id, SUPERSEDED, now=now + 1)
    broken = replace(STALLED, continue_on=ALL, partial_tokens=50)
    own, _ = router.on_finish(first.attempt_id, broken, now=20.0)
    assert isinstance(own, Continue)
    assert (own.dispatch.replica, own.dispatch.decision.prompt_tokens) == ("b", 306)
    assert router.on_finish(own.dispatch.attempt_id, replace(broken, partial_tokens=60), now=21.0) == (None, [])
    assert (only_sample(router).continued, only_sample(router).retries) == (1, 0)


def test_a_rest_that_fails_before_it_begins_leaves_the_answer_where_it_is() -> None:
    router = make_router("a", "b", "c", limits=RouterLimits(continuations=1))
    first = running(router)
    rest = opened(router, first)
    assert finished(router, rest.attempt_id, FAILED, now=7.0) == []
    assert opened(router, first, now=8.0).replica == "c", "b has failed it"
    assert finished(router, first.attempt_id, replace(ENDED, prompt_tokens=256), now=9.0) == [Cancel("r", "r/3")]
    router.on_finish("r/3", SUPERSEDED, now=9.0)
    assert (only_sample(router).continued, only_sample(router).output_tokens) == (0, 60)


def test_a_refused_rest_leaves_the_answer_where_it_is() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    refused = Outcome(
        AttemptResult.UPSTREAM_4XX, status=400, error="not_continued", sent=True, continue_on=ALL, partial_tokens=40
    )
    assert finished(router, rest.attempt_id, refused, now=7.0) == []
    assert finished(router, first.attempt_id, replace(ENDED, prompt_tokens=256), now=8.0) == []
    assert (only_sample(router).status, only_sample(router).continued) == (200, 0)


def test_an_answer_that_breaks_off_is_left_to_the_rest_that_is_open_and_that_may_be_tried_elsewhere() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    broken = replace(STALLED, error="disconnected", continue_on=ALL, partial_tokens=40)
    assert finished(router, first.attempt_id, broken, now=7.0) == []
    again = dispatched(finished(router, rest.attempt_id, FAILED, now=7.5))
    assert (again.replica, again.decision.prompt_tokens) == ("c", 296)
    router.on_first_token(again.attempt_id, now=8.0)
    router.on_finish(again.attempt_id, ENDED, now=9.0)
    sample = only_sample(router)
    assert (sample.continued, sample.retries, sample.output_tokens) == (1, 1, 100)


def test_a_rest_that_breaks_off_before_the_end_of_the_old_attempt_is_known_goes_on_elsewhere() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    rest = opened(router, first)
    router.on_first_token(rest.attempt_id, now=7.0)
    own, _ = router.on_finish(rest.attempt_id, replace(STALLED, continue_on=ALL, partial_tokens=44), now=7.0)
    assert isinstance(own, Continue)
    assert (own.dispatch.replica, own.dispatch.decision.prompt_tokens) == ("c", 300)
    router.on_finish(first.attempt_id, STALLED, now=7.0)
    router.on_finish(own.dispatch.attempt_id, ENDED, now=9.0)
    assert only_sample(router).continued == 2


def test_a_client_that_leaves_releases_both_and_its_quota_once() -> None:
    rules = ClientRules(ClientLimits(max_in_flight=1))
    router = make_router("a", "b", "c", limits=RouterLimits(clients=rules))
    first = running(router, client="who")
    rest = opened(router, first)
    left = Outcome(AttemptResult.CLIENT_DISCONNECTED, prompt_tokens=256)
    assert finished(router, first.attempt_id, left, now=7.0) == [Cancel("r", rest.attempt_id)]
    assert finished(router, rest.attempt_id, left, now=7.0) == []
    sample = only_sample(router)
    assert (sample.status, sample.continued, sample.retries) == (499, 0, 0)
    assert router.quotas.check("who") is None


def test_there_is_one_rest_at_a_time_and_none_for_a_client_without_quota() -> None:
    router = make_router("a", "b", "c")
    first = running(router)
    opened(router, first)
    assert router.continue_beside(first.attempt_id, ALL, 41, now=7.0) is None
    assert not router.can_continue(first.attempt_id, ALL, now=7.0)
    router = make_router("a", "b", limits=RouterLimits(continuations=0))
    assert router.continue_beside(running(router).attempt_id, ALL, 40, now=6.0) is None
    assert router.continue_beside("unknown", ALL, 40, now=6.0) is None
