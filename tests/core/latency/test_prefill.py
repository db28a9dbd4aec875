from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.latency.prefill import PrefillPrior, prefill_s


def test_time_of_a_prefill_is_constant_linear_and_quadratic() -> None:
    prior = PrefillPrior(base_s=0.01, tokens_per_s=1000.0, kappa_s=1e-6)
    assert prior.seconds(500, 2000) == pytest.approx(0.01 + 0.5 + 1e-6 * 500 * (2000 + 250))


def test_columns_give_what_single_replicas_do() -> None:
    priors = [PrefillPrior(), PrefillPrior(0.1, 100.0, 1e-3)]
    column = prefill_s(
        np.array([prior.base_s for prior in priors]),
        np.array([1 / prior.tokens_per_s for prior in priors]),
        np.array([prior.kappa_s for prior in priors]),
        np.array([100.0, 300.0]),
        np.array([900.0, 700.0]),
    )
    assert column.tolist() == pytest.approx([priors[0].seconds(100, 900), priors[1].seconds(300, 700)])


def test_a_prior_counts_as_known_by_its_rate() -> None:
    assert not PrefillPrior.of(0.02, None, None).known
    given = PrefillPrior.of(None, 20_000.0, None)
    assert given.known
    assert (given.base_s, given.kappa_s) == (PrefillPrior().base_s, PrefillPrior().kappa_s)
