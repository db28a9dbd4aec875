from __future__ import annotations

from typing import Any

import pytest

from gorgo.core.policy.interface import Candidates
from gorgo.policies import preble_e2
from gorgo.policies.preble_e2 import ANSWER_TOKENS, LoadWindow, PrebleE2
from tests.policies.table import choose, table


def engines(rows: int = 2, *, now: float = 0.0, **given: Any) -> Candidates:
    """Engines that prefill a token in a millisecond."""
    speed = {"prefill_token_s": [1e-3] * rows, "slowdown": [1.0] * rows, "token_gap_s": [0.0] * rows}
    candidates = table(rows, **speed | given)
    candidates.now = now
    return candidates


def loaded(**costs_ms: float) -> PrebleE2:
    """A policy that remembers a request of such a cost per replica, at 0 s."""
    policy = PrebleE2()
    for name, cost_ms in costs_ms.items():
        policy._window.add(f"on {name}", name.replace("_", "-"), cost_ms, now=0.0)
    return policy


@pytest.mark.parametrize(("cached", "fallback"), [(501, None), (500, "explore"), (0, "explore")])
def test_a_cache_is_exploited_where_more_of_the_prompt_is_shared_than_computed(
    cached: int, fallback: str | None
) -> None:
    policy = loaded(replica_0=300.0, replica_1=300.0, replica_2=290.0)
    choice = choose(policy, engines(3, cached=[0, cached, 0]))
    assert choice.fallback == fallback
    if fallback is None:
        assert choice.row == 1


def test_exploration_takes_the_least_load_with_the_prefill_of_the_prompt() -> None:
    choice = choose(loaded(replica_0=100.0, replica_1=450.0), engines(cached=[0, 400]))
    assert choice.terms["load"].tolist() == [100.0, 450.0]
    assert choice.terms["prefill"].tolist() == [1000.0, 600.0]
    assert choice.row == 1
    assert choose(loaded(replica_0=100.0, replica_1=550.0), engines(cached=[0, 400])).row == 0


def test_of_several_replicas_with_the_longest_match_the_least_costly_is_exploited() -> None:
    policy = loaded(replica_0=900.0, replica_1=800.0, replica_2=500.0)
    choice = choose(policy, engines(3, cached=[600, 600, 599]))
    assert (choice.row, choice.fallback) == (1, None)


@pytest.mark.parametrize(("load_ms", "row", "fallback"), [(1700.0, 1, None), (1900.0, 0, "rebalanced")])
def test_load_is_shifted_where_exploitation_costs_more_than_the_threshold(
    load_ms: float, row: int, fallback: str | None
) -> None:
    """The idle replica would take 1,000 ms for the whole prompt, the other one 200 ms behind its load."""
    choice = choose(loaded(replica_1=load_ms), engines(cached=[0, 800]))
    assert (choice.row, choice.fallback) == (row, fallback)
    assert choose(loaded(replica_1=load_ms), engines(cached=[0, 800]), balance=3.0).row == 1


def test_a_request_is_load_for_the_window_with_its_prefill_and_decoding() -> None:
    policy = PrebleE2()
    begun = engines(cached=[0, 900], token_gap_s=[0.01, 0.01])
    assert choose(policy, begun).row == 1
    for now, load_ms in ((180.0, 100.0 + 10.0 * ANSWER_TOKENS), (180.1, 0.0)):
        policy._window.drop_before(now - 180.0)
        assert policy._window.loads_ms(["replica-0", "replica-1"]).tolist() == [0.0, load_ms]


def test_a_window_and_a_threshold_set_live_act_on_the_next_choice() -> None:
    policy, late = loaded(replica_1=1900.0), engines(cached=[0, 800], now=60.0)
    assert choose(policy, late, balance=2.0).row == 0
    assert choose(policy, late, balance=3.0).row == 1
    assert choose(policy, late, window_s=60.0).terms["load"].tolist() == [0.0, 1900.0]
    assert choose(policy, late, window_s=59.0).terms["load"].tolist() == [0.0, 0.0]


def test_a_request_that_is_evaluated_again_counts_once() -> None:
    policy = PrebleE2()
    for _ in range(3):
        choice = choose(policy, engines(cached=[0, 900]))
        assert choice.terms["load"].tolist() == [0.0, 0.0], "its own load is not before it"
    assert policy._window.loads_ms(["replica-0", "replica-1"]).tolist() == [0.0, 100.0]


def test_an_unknown_time_per_token_counts_as_the_worst_known_one() -> None:
    policy = PrebleE2()
    choose(policy, engines(cached=[0, 900], token_gap_s=[0.02, float("nan")]))
    assert policy._window.loads_ms(["replica-1"]).tolist() == [100.0 + 20.0 * ANSWER_TOKENS]


def test_the_window_forgets_the_oldest_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preble_e2, "MAX_REMEMBERED", 3)
    window = LoadWindow()
    for number in range(5):
        window.add(f"r{number}", f"replica-{number}", 1.0, now=float(number))
    assert window.loads_ms([f"replica-{number}" for number in range(5)]).tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    window.drop_before(10.0)
    assert not window._loads, "a replica without a request has no entry"
