from __future__ import annotations

import pytest

from gorgo.policies.lmetric import LMetric
from tests.policies.table import choose, request, rows_chosen, table


def test_the_cost_is_the_product_of_uncached_tokens_and_batch_size() -> None:
    choice = choose(LMetric(), table(3, cached=[900, 500, 0], in_flight_requests=[5, 1, 0]))
    assert choice.cost is not None
    assert choice.cost.tolist() == [100 * 6, 500 * 2, 1000 * 1]
    assert choice.row == 0


@pytest.mark.parametrize(("batch", "row"), [(8, 0), (10, 1)])
def test_a_tenth_of_the_prefill_is_worth_a_batch_ten_times_as_large(batch: int, row: int) -> None:
    assert choose(LMetric(), table(2, cached=[900, 0], in_flight_requests=[batch, 0])).row == row


def test_factors_on_either_part_change_no_choice() -> None:
    """Ten times the tokens of the same prompt shares, or an engine whose every batch is as much larger."""
    small = table(3, cached=[900, 500, 100], in_flight_requests=[8, 2, 1], prompt_tokens=1000)
    large = table(3, cached=[9000, 5000, 1000], in_flight_requests=[17, 5, 3], prompt_tokens=10_000)
    assert choose(LMetric(), small).row == choose(LMetric(), large).row == 0


def test_an_idle_replica_without_the_prefix_is_not_free() -> None:
    assert choose(LMetric(), table(2, cached=[990, 0], in_flight_requests=[3, 0])).row == 0


def test_a_prompt_that_is_cached_whole_goes_to_the_smaller_batch() -> None:
    candidates = table(3, cached=[1000, 1000, 0], in_flight_requests=[3, 2, 0])
    assert choose(LMetric(), candidates).row == 1
    empty = table(2, prompt_tokens=0, in_flight_requests=[3, 2])
    assert choose(LMetric(), empty, asked=request(prompt_tokens=0)).row == 1


def test_equal_products_go_to_the_fewest_in_flight_and_then_to_chance() -> None:
    assert choose(LMetric(), table(2, cached=[500, 0], in_flight_requests=[1, 0])).row == 1
    assert rows_chosen(LMetric(), table(2)) == {0, 1}
