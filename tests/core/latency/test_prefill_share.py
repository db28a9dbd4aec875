from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill_share import (
    FADE_S,
    faded,
    mean_of_columns,
    mean_of_rows,
    shares_of_columns,
    with_prefill,
)

cells = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12)


@pytest.mark.parametrize(("every_s", "prefill_s"), [(0.1, 0.05), (0.5, 0.4), (2.0, 0.5)])
def test_in_a_steady_stream_it_is_the_share_of_the_time(every_s: float, prefill_s: float) -> None:
    share = 0.0
    for _ in range(round(10 * FADE_S / every_s)):
        share = with_prefill(share, every_s, prefill_s)
    assert share == pytest.approx(prefill_s / every_s, rel=0.05)


def test_an_empty_cell_of_any_age_has_no_share() -> None:
    assert with_prefill(0.0, 1.8e9, 3.0) == 3.0 / FADE_S


@given(cells, st.floats(0.0, 1e9))
def test_rows_have_the_very_numbers_of_columns(shares: list[float], now: float) -> None:
    since_s = [now / (1 + place) for place in range(len(shares))]
    assert [faded(share, now - at_s) for share, at_s in zip(shares, since_s, strict=True)] == shares_of_columns(
        np.array(shares), np.array(since_s), now
    ).tolist()


@given(st.floats(0.0, 3.0), st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_it_only_fades(share: float, age_s: float, more_s: float) -> None:
    assert 0.0 <= faded(share, age_s + more_s) <= faded(share, age_s) <= share


@given(cells)
def test_the_mean_of_rows_is_the_very_number_of_columns(shares: list[float]) -> None:
    assert mean_of_rows(shares) == mean_of_columns(np.array(shares))
