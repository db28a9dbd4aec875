from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import required_index
from gorgo.core.router import Router
from gorgo.errors import ConfigError
from gorgo.policies.registry import make_policy
from tests.core.routers import COMPLETED, a_request, dispatched, set_policy, specs, submitted


def make(policy: str, shadow: str | None, *, seed: int = 0) -> Router:
    shadowing = None if shadow is None else make_policy(shadow)
    router = Router(
        specs("a", "b", "c"), make_policy(policy), rng=np.random.default_rng(seed), boot_id="boot", shadow=shadowing
    )
    for rank, name in enumerate("abc"):
        router.replicas.on_probe(name, 0.1 * (rank + 1), now=0.0)
    return router


def asked(number: int) -> RouteRequest:
    return a_request(f"r{number}", prompt_tokens=1000, received_s=float(number))


def test_rank_is_the_place_of_the_chosen_replica_in_the_shadows_order() -> None:
    router = make("round-robin", "nearest")
    decisions = [dispatched(submitted(router, asked(number), now=float(number))).decision for number in range(3)]
    scores = [decision.shadow for decision in decisions]
    assert [(decision.replica, score and score.rank) for decision, score in zip(decisions, scores, strict=True)] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
    ]
    assert [score and score.cost for score in scores] == pytest.approx([100.0, 200.0, 300.0])
    assert decisions[1].as_dict()["shadow"] == {
        "policy": "nearest",
        "rank": 2,
        "cost": pytest.approx(200.0),
        "predicted_ttft_ms": None,
    }


def test_replicas_that_cost_the_same_have_the_least_rank_of_them() -> None:
    router = make("round-robin", "least-request")
    first = dispatched(submitted(router, asked(0), now=0.0)).decision.shadow
    second = dispatched(submitted(router, asked(1), now=1.0)).decision.shadow
    assert first is not None
    assert second is not None
    assert (first.rank, second.rank) == (1, 1)


def test_a_shadow_changes_no_decision_and_draws_nothing() -> None:
    alone, watched = make("random", None, seed=3), make("random", "gorgo-ms", seed=3)
    for number in range(50):
        routes = [
            dispatched(submitted(router, asked(number), now=float(number))).replica for router in (alone, watched)
        ]
        assert routes[0] == routes[1]


def test_a_sample_has_what_the_shadow_predicted_for_the_replica_that_was_chosen() -> None:
    router = make("round-robin", "gorgo-ms")
    for number in range(3):
        attempt = dispatched(submitted(router, asked(number), now=float(number))).attempt_id
        router.on_first_token(attempt, now=number + 0.5)
        router.on_finish(attempt, COMPLETED, now=number + 0.9)
    rows = router.samples.after(0)["samples"]
    assert [row["shadow_policy"] for row in rows] == ["gorgo-ms"] * 3
    assert [row["shadow_rank"] for row in rows] == [1, 2, 3]
    assert rows[2]["shadow_predicted_ttft_ms"] > 300.0
    assert rows[0]["shadow_cost"] < rows[2]["shadow_cost"]


def test_one_candidate_has_no_rank() -> None:
    router = make("random", "nearest")
    router.replicas.drain("a", now=0.0)
    router.replicas.drain("b", now=0.0)
    score = dispatched(submitted(router, asked(0), now=0.0)).decision.shadow
    assert score is not None
    assert score.rank is None
    assert score.cost == pytest.approx(300.0)


def test_a_policy_without_a_cost_is_no_shadow() -> None:
    with pytest.raises(ConfigError, match="'random' has no cost"):
        make("nearest", "random")


def test_the_index_is_the_shadows_where_the_policy_reads_none() -> None:
    assert make("random", "gorgo-ms").index.bounded
    assert not make("random", "gorgo").index.bounded
    assert not make("random", None).index.bounded
    assert make("gorgo-ms", "nearest").index.bounded


def test_two_policies_that_read_different_indexes_are_refused_and_nothing_changes() -> None:
    with pytest.raises(ConfigError, match="'gorgo' the published one, 'gorgo-ms' the events one"):
        make("gorgo", "gorgo-ms")
    router = make("random", "gorgo-ms")
    with pytest.raises(ConfigError):
        set_policy(router, "prefix-cache")
    with pytest.raises(ConfigError):
        make("gorgo", None).settings.set_shadow(make_policy("gorgo-ms"), now=0.0)
    assert (router.settings.policy.name, router.settings.weights.version, router.index.bounded) == ("random", 1, True)


def test_a_shadow_can_be_set_and_taken_away_while_requests_come() -> None:
    router = make("random", None)
    router.settings.set_shadow(make_policy("gorgo-ms"), now=0.0)
    assert dispatched(submitted(router, asked(0), now=0.0)).decision.shadow is not None
    assert (router.settings.shadow and router.settings.shadow.name, router.index.bounded) == ("gorgo-ms", True)
    router.settings.set_shadow(None, now=0.0)
    assert dispatched(submitted(router, asked(1), now=0.0)).decision.shadow is None
    assert (router.settings.shadow, router.index.bounded) == (None, False)


def test_a_policy_that_reads_no_index_goes_with_any() -> None:
    assert required_index(make_policy("gorgo"), make_policy("nearest")) == "published"
    assert required_index(make_policy("nearest"), make_policy("gorgo-ms")) == "events"
