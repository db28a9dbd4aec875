"""Exploration: which requests go to any replica, with what chance, and what a log has of the candidates."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from gorgo.core.dispatch.dispatcher import EXPLORED
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.policy.interface import Candidates, Choice, choice_chances
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.candidate_table import CandidateTable
from gorgo.core.training.learning import RecordedOutcome
from gorgo.lab.decisions import candidates_of, decision_of
from gorgo.live.telemetry.outcome_log import OutcomeLine
from gorgo.policies.registry import make_policy
from tests.core.routers import COMPLETED, FAILED, a_request, dispatched, make_router, specs, submitted


class Recorder:
    def __init__(self) -> None:
        self.outcomes: list[RecordedOutcome] = []

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        self.outcomes.append(outcome)


def exploring(share: float, *, policy: str = "gorgo", shadow: str | None = None, seed: int = 0) -> Router:
    """A router whose policy would send all requests to the near one of three replicas."""
    router = Router(
        specs("near", "far", "farther"),
        make_policy(policy),
        rng=np.random.default_rng(seed),
        boot_id="b",
        limits=RouterLimits(explore=share),
        shadow=None if shadow is None else make_policy(shadow),
    )
    for name, rtt_s in (("near", 0.001), ("far", 0.1), ("farther", 0.2)):
        router.replicas.on_probe(name, rtt_s, now=0.0)
    return router


def serve(router: Router, count: int) -> list[str]:
    """Serve requests one after another; return the replicas."""
    replicas = []
    for number in range(count):
        now = number / 100  # a round trip is known for ninety seconds
        sent = dispatched(submitted(router, a_request(f"{number}", received_s=now), now=now))
        router.on_first_token(sent.attempt_id, now=now + 0.002)
        router.on_finish(sent.attempt_id, COMPLETED, now=now + 0.005)
        replicas.append(sent.replica)
    return replicas


def test_without_exploration_nothing_is_drawn_and_all_go_where_the_policy_says() -> None:
    router = exploring(0.0)
    before = router._dispatcher._rng.bit_generator.state
    assert set(serve(router, 50)) == {"near"}
    assert router._dispatcher._rng.bit_generator.state == before


def test_a_share_of_requests_goes_to_any_replica_and_each_has_the_chance_that_is_recorded() -> None:
    router, recorder = exploring(0.3), Recorder()
    router.settings.record_outcomes(recorder)
    counts = Counter(serve(router, 2000))
    chances = {outcome.decision.replica: outcome.probability for outcome in recorder.outcomes}
    assert chances == {"near": pytest.approx(0.8), "far": pytest.approx(0.1), "farther": pytest.approx(0.1)}
    for name, chance in chances.items():
        assert chance is not None
        assert counts[name] == pytest.approx(2000 * chance, rel=0.15)
    assert {outcome.decision.fallback for outcome in recorder.outcomes} == {None, EXPLORED}


def test_equal_costs_share_the_chance_of_the_policy() -> None:
    router, recorder = make_router("a", "b", "c", "d", policy="least-request"), Recorder()
    router.settings.record_outcomes(recorder)
    serve(router, 1)
    assert recorder.outcomes[0].probability == 0.25
    choice = Choice(1, cost=np.array([1.0, 1.0, 1.0]))
    chances = choice_chances(choice, np.array([2.0, 1.0, 1.0]))
    assert chances is not None
    assert chances.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(("policy", "chance"), [("random", 1 / 3), ("round-robin", None), ("lodestar", None)])
def test_a_policy_that_draws_or_remembers_has_a_chance_only_if_it_is_known(policy: str, chance: float | None) -> None:
    router, recorder = exploring(0.0, policy=policy), Recorder()
    router.settings.record_outcomes(recorder)
    serve(router, 3)
    assert [outcome.probability for outcome in recorder.outcomes] == [chance and pytest.approx(chance)] * 3


def test_retries_go_by_the_policy_alone() -> None:
    router, recorder = exploring(1.0), Recorder()
    router.settings.record_outcomes(recorder)
    for number in range(40):
        first = dispatched(submitted(router, a_request(f"{number}", blocks=b""), now=float(number)))
        if first.replica == "near":
            router.on_finish(first.attempt_id, COMPLETED, now=number + 0.1)
            continue
        again, _ = router.on_finish(first.attempt_id, FAILED, now=number + 0.1)
        if isinstance(again, Dispatch):
            assert again.replica == "near"
            router.on_finish(again.attempt_id, COMPLETED, now=number + 0.2)
    seconds = [outcome.probability for outcome in recorder.outcomes if outcome.decision.attempt == 2]
    assert seconds
    assert set(seconds) == {1.0}


def test_a_shadow_scores_the_replica_that_was_explored() -> None:
    router = exploring(1.0, shadow="gorgo")
    ranks = {}
    for number in range(30):
        sent = dispatched(submitted(router, a_request(f"{number}", blocks=b""), now=float(number)))
        assert sent.decision.shadow is not None
        ranks[sent.replica] = sent.decision.shadow.rank
        router.on_finish(sent.attempt_id, COMPLETED, now=number + 0.1)
    assert ranks == {"near": 1, "far": 2, "farther": 3}


@pytest.mark.parametrize("policy", ["gorgo", "gorgo-ms", "least-load", "lmetric", "mooncake", "load-prefix"])
def test_a_policy_chooses_from_a_line_of_the_log_as_it_did(policy: str) -> None:
    """Over a fleet with prompts in caches, requests in flight, and replicas of which little is known."""
    router, recorder = exploring(0.0, policy=policy), Recorder()
    router.settings.record_outcomes(recorder)
    rng = np.random.default_rng(3)
    now = 1000.0
    for number in range(120):
        now += float(rng.exponential(0.2))
        blocks = b"".join(int(block).to_bytes(8, "big") for block in range(int(rng.integers(1, 12))))
        request = a_request(
            f"{number}", received_s=now - 0.01, prompt_tokens=int(rng.integers(100, 4000)), blocks=blocks
        )
        sent = dispatched(submitted(router, request, now=now))
        if rng.random() < 0.7:
            router.on_first_token(sent.attempt_id, now=now + 0.05)
            now += 0.05
        if rng.random() < 0.5:
            router.on_finish(sent.attempt_id, COMPLETED, now=now + 0.01)
            now += 0.01
    made, seen = make_policy(policy), 0
    weights = Weights.of(made.weight_specs)
    for outcome in recorder.outcomes:
        names, table = candidates_of(json.loads(OutcomeLine(outcome).as_line()), "a line")
        choice = made.choose(table.request(""), table.candidates(names), weights, np.random.default_rng(0))
        assert choice.cost is not None
        assert outcome.decision.cost is not None
        assert choice.cost == pytest.approx(outcome.decision.cost, rel=1e-6, abs=1e-3)
        assert choice.cost[outcome.decision.row] == pytest.approx(choice.cost.min(), abs=1e-3)
        seen += 1
    assert seen > 30
    assert decision_of(recorder.outcomes[0]) is not None


def test_a_table_is_a_copy_that_the_fleet_does_not_change() -> None:
    router, recorder = exploring(0.0), Recorder()
    router.settings.record_outcomes(recorder)
    first = dispatched(submitted(router, a_request("1", blocks=b""), now=1.0))
    submitted(router, a_request("2", blocks=b""), now=1.0)
    router.on_first_token(first.attempt_id, now=1.5)
    router.on_finish(first.attempt_id, COMPLETED, now=2.0)
    table = recorder.outcomes[0].candidates
    assert isinstance(table, CandidateTable)
    found: Candidates = table.candidates(("near", "far", "farther"))
    assert found.in_flight_requests.tolist() == [0.0, 0.0, 0.0]
