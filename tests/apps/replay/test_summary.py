from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.apps.replay.records import Record
from gorgo.apps.replay.summary import LogHistogram, Tally


def record(**changes: object) -> Record:
    values = {"id": "r", "scheduled_s": 1.0, "sent_s": 1.25, "input_tokens": 100, "ttft_ms": 10.0, "e2e_s": 1.0}
    return Record(**{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_of_the_histogram_is_right_within_one_percent(values: list[float], share: float) -> None:
    histogram = LogHistogram()
    histogram.add(tuple(values))
    expected = np.quantile(values, share, method="inverted_cdf")
    assert histogram.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_no_value_has_no_quantile() -> None:
    assert LogHistogram().quantile(0.5) is None
    assert LogHistogram().spread().mean is None


def test_a_gap_of_nothing_or_of_hours_is_still_counted() -> None:
    histogram = LogHistogram()
    histogram.add((0.0, 1e9))
    assert histogram.count == 2


def test_failed_requests_count_as_errors_and_nothing_else() -> None:
    tally = Tally()
    tally.add(record(error="http 503: busy", replica="a", cached_tokens=100))
    tally.add(record(replica="b", cached_tokens=50))
    assert (tally.n, tally.error_count) == (2, 1)
    assert dict(tally.errors) == {"http 503": 1}


def test_a_cache_hit_is_of_the_requests_that_tell() -> None:
    tally = Tally()
    for cached, believed in ((50, 40.0), (None, 90.0), (100, None)):
        tally.add(record(cached_tokens=cached, believed_cached_tokens=believed))
    assert tally._cached.value == 0.75
    assert tally._believed.value == 0.65


def test_slip_is_never_negative() -> None:
    assert record(sent_s=0.5).slip_s == 0.0
    assert record().slip_s == 0.25
