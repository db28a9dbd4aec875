"""Whether intervals cover the truth in simulation, where queues and caches are those of earlier decisions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.whatif_coverage import RUNS, coverage


@pytest.mark.system
@pytest.mark.timeout(7200)
def test_intervals_cover_the_truth_of_single_decisions_in_90_to_99_of_100_simulated_logs() -> None:
    rows = coverage()
    robust = [row.covered / row.judged for row in rows if row.estimator == "dr"]
    assert {row.judged for row in rows} == {RUNS}
    assert min(robust) >= 0.85, rows
    assert 0.90 <= np.mean(robust) <= 0.99, rows
