"""Policies against the authors' package: the replicas that each may choose, state by state."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.fingerprint import head_of, prefix_hash
from gorgo.core.prompt.parse import Prompt
from gorgo.policies.registry import make_policy
from tests.policies.table import choose, request, table
from tests.system.released.differences import AFFINITY, DECISIONS
from tests.system.released.process import Released
from tests.system.released.states import State, states

STATES = 3000
#: Their names of the policies; `gorgo-2d` is what the paper calls GORGO.
RELEASED = {
    "gorgo": "gorgo-2d",
    "least-load": "least-load",
    "least-request": "least-request",
    "prefix-cache": "prefix-cache",
    "power-of-two": "power-of-two",
}


class EveryDraw:
    """In place of a generator: each draw takes the number that the caller wants to see taken."""

    def __init__(self, *picks: int) -> None:
        self._picks = list(picks)
        self.bounds: list[int] = []

    def integers(self, bound: int) -> int:
        self.bounds.append(bound)
        return self._picks.pop(0) if self._picks else 0


def chosen_by(policy: str, state: State) -> tuple[set[str], Any]:
    """Every replica that some draw gives, and the choice of the first."""
    made = make_policy(policy)
    weights = Weights.of(
        made.weight_specs, {"w_rtt": state.w_rtt, "w_queue": state.w_queue} if policy == "gorgo" else {}
    )
    candidates, asked = state.candidates(), RouteRequest("r", 0.0, state.prompt_tokens, b"", 64.0, 0)

    def choice(*picks: int) -> Any:
        draws: Any = EveryDraw(*picks)
        return made.choose(asked, candidates, weights, draws), draws.bounds

    first, bounds = choice()
    picks: list[tuple[int, ...]] = [(one,) for one in range(bounds[0])] if bounds else [()]
    if len(bounds) > 1:
        picks = [(one, other) for one in range(bounds[0]) for other in range(bounds[1])]
    return {candidates.names[choice(*pick)[0].row] for pick in picks}, first


def explained(policy: str, state: State, cost: np.ndarray | None) -> str | None:
    """The known difference that a state shows, by its inputs alone."""
    if policy == "prefix-cache" and state.prompt_tokens == 0:
        return "no tokens"
    if None in state.running:
        return "no report"
    if policy == "gorgo" and None in state.rtt_s:
        return "no probe"
    if policy == "gorgo" and cost is not None and np.count_nonzero(cost <= cost.min() * (1 + 1e-12) + 1e-9) > 1:
        return "tie"
    if policy == "power-of-two" and not _same_order(state):
        return "load of power-of-two"
    return None


def _same_order(state: State) -> bool:
    theirs = [used + tokens for used, tokens in zip(state.used, state.in_flight_tokens, strict=True)]
    ranks = [np.unique(loads, return_inverse=True)[1].tolist() for loads in (theirs, state.in_flight_requests)]
    return bool(ranks[0] == ranks[1])


#: Which differences a policy has; each must be seen.
EXPECTED = {
    "gorgo": {"no report", "no probe", "tie"},
    "least-load": {"no report"},
    "least-request": {"no report"},
    "prefix-cache": {"no report", "no tokens"},
    "power-of-two": {"no report", "load of power-of-two"},
}


@pytest.mark.parametrize("policy", RELEASED)
def test_decisions_differ_only_for_listed_reasons(policy: str, authors: Released) -> None:
    drawn = states(STATES, seed=17)
    theirs = authors("policies", [state.case(RELEASED[policy]) for state in drawn])
    seen: Counter[str] = Counter()
    for state, answer in zip(drawn, theirs, strict=True):
        ours, choice = chosen_by(policy, state)
        if ours != set(answer["targets"]):
            reason = explained(policy, state, choice.cost)
            assert reason is not None, (state, answer, ours)
            seen[reason] += 1
        elif policy == "gorgo" and None not in state.running and None not in state.rtt_s:
            costs = dict(zip(state.names, choice.cost.tolist(), strict=True))
            assert costs == pytest.approx(answer["scores"], rel=1e-14)
    assert set(seen) == EXPECTED[policy]
    assert set().union(*EXPECTED.values()) == set(DECISIONS)
    assert seen.total() < STATES / 2 or policy == "power-of-two", "most states compare"


# -- affinity


def _homes(replicas: int, *, prompts: int) -> list[str]:
    """The replica of each prompt here."""
    policy, candidates, homes = make_policy("simple-session-affinity"), table(replicas), []
    for number in range(prompts):
        head = prefix_hash(*head_of(Prompt(b"%6d" % number * 200, ((0, "system"),))))
        homes.append(candidates.names[choose(policy, candidates, asked=request(head=head)).row])
    return homes


def test_affinity_moves_fewer_sessions_than_theirs_and_both_go_by_the_first_256_tokens(authors: Released) -> None:
    (state,) = states(1, seed=3)

    def theirs(replicas: int, *, end: int = 0) -> list[str]:
        names = [f"replica-{row}" for row in range(replicas)]
        heads = [[number] * 256 + [end] * 9 for number in range(300)]
        cases = [state.case("simple-session-affinity", token_ids=head) | {"urls": names} for head in heads]
        return [answer["targets"][0] for answer in authors("policies", cases)]

    before, after = theirs(5), theirs(4)
    assert theirs(5, end=1) == before, "what follows the first 256 tokens does not count"
    moved = sum(one != other for one, other in zip(before, after, strict=True))
    mine, then = _homes(5, prompts=300), _homes(4, prompts=300)
    assert all(one == other for one, other in zip(mine, then, strict=True) if one != "replica-4")
    assert moved > 200 > 2 * mine.count("replica-4")
    assert set(AFFINITY) == {"rendezvous"}
