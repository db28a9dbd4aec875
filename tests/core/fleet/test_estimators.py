from __future__ import annotations

from math import nan

import pytest

from gorgo.core.fleet.estimators import ewma, is_stale


def test_first_sample_stands_for_itself() -> None:
    assert ewma(nan, 0.2, 0.3) == 0.2


def test_new_sample_counts_with_its_weight() -> None:
    assert ewma(0.1, 0.2, 0.3) == pytest.approx(0.13)
    assert ewma(0.1, 0.2, 1.0) == pytest.approx(0.2)


def test_a_figure_is_stale_at_its_age_limit_and_never_before_it_was_seen() -> None:
    assert not is_stale(10.0, now=99.9, after_s=90.0)
    assert is_stale(10.0, now=100.0, after_s=90.0)
    assert not is_stale(None, now=1e9, after_s=90.0)
