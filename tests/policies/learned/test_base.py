from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Hedge, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.learning import Learner
from gorgo.policies.learned.base import near_best, predict_ttft_s, rows_in_range, sample_rows
from gorgo.policies.registry import make_policy
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted, timed
from tests.policies.learned.models import LinearFake

LOW, HIGH = np.array([0.0, 100.0], np.float32), np.array([10.0, 100.0], np.float32)


def inside(*rows: tuple[float, float], margin: float = 0.1) -> list[bool]:
    return [bool(row) for row in rows_in_range(np.array(rows, np.float32), LOW, HIGH, margin=margin)]


def test_every_row_is_checked_with_a_margin_of_the_range() -> None:
    assert inside((5, 100), (11, 100), (11.1, 100), (-1, 100), (-1.1, 100)) == [True, True, False, True, False]


def test_without_a_margin_the_bounds_themselves_are_in_range() -> None:
    assert inside((0, 100), (10, 100), (10.001, 100), margin=0.0) == [True, True, False]


def test_a_feature_that_was_constant_admits_no_other_value() -> None:
    assert inside((5, 100), (5, 101), (5, 99)) == [True, False, False]


class Answers:
    """A model with a fixed answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def ttft_s(self, table: np.ndarray) -> np.ndarray:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.array(self.answer)


def test_a_prediction_is_at_least_zero() -> None:
    predicted = predict_ttft_s(Answers([0.5, -0.1]), np.zeros((2, 1), np.float32))
    assert predicted is not None
    assert predicted.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("answer", [ValueError("no"), [1.0, np.nan], [np.inf, 1.0], [1.0], [[1.0, 2.0]], ["a", "b"]])
def test_a_model_that_raises_or_answers_no_number_per_row_predicts_nothing(answer: object) -> None:
    assert predict_ttft_s(Answers(answer), np.zeros((2, 1), np.float32)) is None


def test_near_best_never_lies_below_the_best_whatever_the_sign() -> None:
    assert near_best(np.array([1.0, 1.1, 1.11]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([-1.0, -0.9, -0.89]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([2.0, 1.0, 1.0]), share=0.0).tolist() == [1, 2]


def test_a_sample_has_its_size_and_the_included_row() -> None:
    rows = np.arange(300)
    drawn = sample_rows(rows, 16, np.random.default_rng(0), include=299)
    assert 299 in drawn
    assert len(drawn) in (16, 17)
    assert sorted(set(drawn.tolist())) == drawn.tolist()
    assert sample_rows(rows, 300, np.random.default_rng(0), include=0) is rows


# Queueing, deadlines and hedging by the predictions of learned policies, through a Router.


LIMITS = RouterLimits(
    overload=OverloadLimits(queue_enabled=True, shed_on_objective=True),
    hedging=HedgeLimits(budget_ratio=0.5, window_s=1000.0),
)
LEARNED = ("lodestar", "predicted-latency", "gorgo-residual")
#: No decision by chance.
CERTAIN = {"epsilon": 0.0}


def router_of(name: str, *, ttft_s: float | None, replicas: tuple[str, ...] = ("a", "b")) -> Router:
    """Idle replicas that prefill 1,000 tokens a second, and a model by which every first token takes `ttft_s`."""
    router = make_router(replicas=[timed(replica, max_running_requests=4) for replica in replicas], limits=LIMITS)
    policy = make_policy(name)
    certain = {weight: value for weight, value in CERTAIN.items() if weight in {s.name for s in policy.weight_specs}}
    router.settings.set_policy(policy, Weights.of(policy.weight_specs, certain), now=0.0)
    if ttft_s is not None:
        learner = router.learning.learner
        assert isinstance(learner, Learner)
        router.learning.adopt(LinearFake(learner.feature_names, {}, constant=ttft_s))
    return router


def request(name: str = "r", *, slo_s: float | None = None, tokens: int = 100) -> RouteRequest:
    return replace(a_request(name, prompt_tokens=tokens), slo_ttft_s=slo_s)


@pytest.mark.parametrize("name", LEARNED)
def test_the_model_decides_whether_a_deadline_can_be_met(name: str) -> None:
    (early,) = submitted(router_of(name, ttft_s=0.5), request(slo_s=1.0), now=0.0)
    (late,) = submitted(router_of(name, ttft_s=3.0), request(slo_s=1.0), now=0.0)
    assert isinstance(early, Dispatch)
    assert isinstance(late, Reject)


@pytest.mark.parametrize("name", LEARNED)
def test_before_a_model_the_priors_decide(name: str) -> None:
    """The only replica has two seconds of prefill before this request, or 0.1 s."""
    for waiting, expected in ((2000, Reject), (100, Dispatch)):
        router = router_of(name, ttft_s=None, replicas=("a",))
        dispatched(submitted(router, request("before", tokens=waiting), now=0.0))
        (action,) = submitted(router, request(slo_s=1.0), now=0.0)
        assert isinstance(action, expected)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("ttft_s", [0.2, None], ids=["model", "cold"])
def test_requests_are_queued_while_the_replicas_are_saturated(name: str, ttft_s: float | None) -> None:
    router = router_of(name, ttft_s=ttft_s)
    actions = [submitted(router, request(f"r{number}"), now=0.0)[0] for number in range(40)]
    assert isinstance(actions[0], Dispatch)
    assert isinstance(actions[-1], Hold)


@pytest.mark.parametrize("name", LEARNED)
def test_a_request_later_than_the_model_predicted_is_hedged(name: str) -> None:
    router = router_of(name, ttft_s=0.2)
    for number in range(2):
        before = dispatched(submitted(router, request(f"before-{number}"), now=-9.0)).attempt_id
        router.on_first_token(before, now=-8.8)
        router.on_finish(before, COMPLETED, now=-8.8)
    dispatched(submitted(router, request(), now=0.0))
    due_s = router.next_timer()
    assert due_s is not None
    assert due_s == pytest.approx(0.2 + 0.5, abs=0.2)
    hedges = [action for at in (due_s, due_s + 0.2, due_s + 0.4) for action in router.handle_timer(now=at)]
    assert [type(action) for action in hedges] == [Hedge]


@pytest.mark.parametrize("name", LEARNED)
def test_the_features_of_each_attempt_are_those_of_its_replica(name: str) -> None:
    router = router_of(name, ttft_s=None)
    action = dispatched(submitted(router, request(), now=0.0))
    router.on_first_token(action.attempt_id, now=0.1)
    router.on_finish(action.attempt_id, COMPLETED, now=0.5)
    assert router.learning.outcomes is not None
    rows = router.learning.outcomes.since(0)
    assert len(rows) == 1
    assert rows.ttft_s.tolist() == pytest.approx([0.1])
    assert rows.features[0, rows.names.index("prompt_tokens")] == 100
