from __future__ import annotations

from gorgo.policies.mooncake import Mooncake
from tests.core.routers import a_request, dispatched, make_router, submitted
from tests.policies.table import choose, table


def test_a_longer_queue_is_worth_a_longer_prefix_token_by_token() -> None:
    assert choose(Mooncake(), table(2, cached=[900, 0], uncached_prefill_tokens=[800, 0])).row == 0
    assert choose(Mooncake(), table(2, cached=[900, 0], uncached_prefill_tokens=[1000, 0])).row == 1


def test_the_terms_are_times_at_the_throughput() -> None:
    candidates = table(2, cached=[500, 0], uncached_prefill_tokens=[2000, 0])
    choice = choose(Mooncake(), candidates, tokens_per_s=1000.0)
    assert list(choice.terms["queue"]) == [2000.0, 0.0]
    assert list(choice.terms["prefill"]) == [500.0, 1000.0]


def test_the_throughput_changes_no_choice() -> None:
    candidates = table(3, cached=[500, 100, 0], uncached_prefill_tokens=[2000, 1500, 1600])
    rows = {choose(Mooncake(), candidates, tokens_per_s=speed).row for speed in (100.0, 16_000.0, 1e6)}
    assert rows == {1}


def test_a_router_counts_what_waits_for_it_without_a_policy_that_learns() -> None:
    router = make_router("a", "b", policy="mooncake")
    requests = [a_request(f"r{number}", prompt_tokens=tokens) for number, tokens in enumerate((1000, 10, 10, 10))]
    first, *others = [dispatched(submitted(router, request, now=0.0)) for request in requests]
    assert {action.replica for action in others} == {"a", "b"} - {first.replica}
    assert others[-1].decision.terms["queue"].max() > 0.0
