"""The tie-break by rows beside the one by columns."""

import numpy as np
import pytest

from gorgo.core.policy.choice import TIE_EPSILON, argmin_tiebreak, least_of_rows

COSTS = ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0 + TIE_EPSILON / 2, 1.0], [0.0], [1.0, 1.0 + 3 * TIE_EPSILON])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("costs", COSTS)
def test_rows_choose_as_columns_do_and_draw_as_often(costs: list[float], seed: int) -> None:
    in_flight = np.random.default_rng(seed).integers(0, 3, len(costs)).astype(float)
    by_rows, by_columns = np.random.default_rng(seed), np.random.default_rng(seed)
    row = least_of_rows(costs, min(costs), in_flight, by_rows)
    assert row == argmin_tiebreak(np.array(costs), in_flight, by_columns)
    assert by_rows.bit_generator.state == by_columns.bit_generator.state
