"""The contract of policies, kept by each learned one with a model too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.replica import Columns
from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.training.learning import Learner
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.policies.learned.models import LinearFake
from tests.policies.table import COUNTS, choose, table
from tests.policies.test_contract import SIGNALS, assert_valid, cells

pytestmark = pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])

#: Every decision is the model's: chance and gates aside.
MODEL: dict[str, dict[str, Any]] = {
    "lodestar": {"epsilon": 0.0, "k": 0.0},
    "predicted-latency": {"epsilon": 0.0, "affinity": 0.0, "affinity_first": 0.0},
    "gorgo-residual": {},
}
Make = Callable[[], Learner]


def trained(make: Make) -> Learner:
    """The policy with a model that reads every feature."""
    policy = make()
    names = policy.feature_names
    factors = {name: 1e-3 * (place + 1) for place, name in enumerate(names)}
    policy.adopt(LinearFake(names, factors, tpot=factors if policy.name == "predicted-latency" else None))
    return policy


def chosen(make: Make, candidates: Candidates, *, seed: int = 0) -> Choice:
    policy = trained(make)
    choice = choose(policy, candidates, seed=seed, **MODEL[policy.name])
    assert_valid(policy, candidates, choice)
    assert choice.features is not None
    assert choice.features.shape == (len(candidates), len(policy.feature_names))
    return choice


def test_the_model_decides_when_all_is_equal_and_when_every_signal_is_unknown(make: Make) -> None:
    for rows in (1, 2, 3, 64):
        unknown: dict[str, Any] = {signal: np.full(rows, np.nan) for signal in SIGNALS}
        for candidates in (table(rows), table(rows, **unknown)):
            choice = chosen(make, candidates)
            assert choice.fallback is None
            assert choice.cost is not None


def test_huge_values_are_a_valid_row_without_a_warning(make: Make) -> None:
    huge: dict[str, Any] = {item.name: [1e15, 2e15, 3e15] for item in fields(Columns) if item.name != "salt"}
    chosen(make, table(3, cached=[1e12, 0, 1], prompt_tokens=10**12, **huge))


def test_the_same_seed_makes_the_same_choice_for_any_table(make: Make) -> None:
    rng = np.random.default_rng(20)
    for seed in range(200):
        rows = int(rng.integers(1, 12))
        counts: dict[str, Any] = {count: cells(rng, rows, unknown=False) for count in COUNTS}
        signals: dict[str, Any] = {signal: cells(rng, rows, unknown=True) for signal in SIGNALS}
        cached = np.minimum(cells(rng, rows, unknown=False), 1000)
        candidates = table(rows, cached=cached, **counts, **signals)
        assert chosen(make, candidates, seed=seed).row == chosen(make, candidates, seed=seed).row, seed


def test_only_eligible_rows_are_read(make: Make) -> None:
    best = [0, 50, 0, 60]
    columns: dict[str, Any] = {item.name: best for item in fields(Columns) if item.name != "salt"}
    gathered = table(2, slots=[1, 3], names=["b", "d"], cached=[1000, 10, 1000, 0], **columns)
    picked: dict[str, Any] = {item.name: [50, 60] for item in fields(Columns) if item.name != "salt"}
    whole = table(2, names=["b", "d"], cached=[10, 0], salt=gathered.columns.salt[[1, 3]], **picked)
    one, other = chosen(make, gathered), chosen(make, whole)
    assert one.row == other.row
    np.testing.assert_array_equal(one.features, other.features)
    assert {term: list(values) for term, values in one.terms.items()} == {
        term: list(values) for term, values in other.terms.items()
    }


def test_terms_and_features_are_no_columns_of_the_fleet(make: Make) -> None:
    known: dict[str, Any] = {item.name: [1.0, 2.0] for item in fields(Columns) if item.name != "salt"}
    candidates = table(2, cached=[5, 6], **known)
    choice = chosen(make, candidates)
    columns = [getattr(candidates.columns, item.name) for item in fields(Columns)] + [candidates.matched_tokens]
    assert choice.cost is not None
    assert choice.features is not None
    for made in (*choice.terms.values(), choice.cost, choice.features):
        assert not any(np.shares_memory(made, column) for column in columns)
