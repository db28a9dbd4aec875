from __future__ import annotations

from gorgo.policies.mooncake import Mooncake
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
