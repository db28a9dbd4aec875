"""What every registered policy keeps, whatever its rule. A new policy joins by being registered."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.replica import Columns
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import make_policy, policy_names
from tests.policies.table import COUNTS, choose, request, table

#: Those that other packages offer as well, where they are installed.
pytestmark = pytest.mark.parametrize("name", policy_names())

#: Engine figures that may be unknown.
SIGNALS = tuple(item.name for item in fields(Columns) if item.name not in (*COUNTS, "salt"))


def assert_valid(policy: Policy, candidates: Candidates, choice: Choice) -> None:
    assert 0 <= choice.row < len(candidates)
    assert isinstance(choice.row, int)
    for column in choice.terms.values():
        assert column.shape == (len(candidates),)
        assert not np.isnan(column).any(), "a term that is unknown must have a value by the policy's own rule"
    if choice.cost is not None:
        assert policy.unit, "a policy with a cost states its unit"
        np.testing.assert_allclose(sum(choice.terms.values()), choice.cost)
        assert choice.cost[choice.row] <= choice.cost.min() + 1e-9


def test_declares_what_the_table_of_policies_shows(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert list(signature(policy.choose).parameters) == ["request", "candidates", "weights", "rng"]
    assert policy.summary
    assert "\n" not in policy.summary
    assert policy.index in ("published", "bounded", "events", "any")
    Weights.of(policy.weight_specs)  # the defaults lie in their own boxes
    assert all(spec.description and spec.low < spec.high for spec in policy.weight_specs)
    assert all(spec.low > 0 or (spec.tunable == "no" and spec.low == 0) for spec in policy.weight_specs)


def test_answers_a_valid_row_when_all_is_equal(name: str) -> None:
    for rows in (1, 2, 3, 64):
        candidates, policy = table(rows), make_policy(name)
        assert_valid(policy, candidates, choose(policy, candidates))


def test_answers_a_valid_row_when_every_signal_is_unknown(name: str) -> None:
    for rows in (1, 3):
        unknown: dict[str, Any] = {signal: np.full(rows, np.nan) for signal in SIGNALS}
        candidates, policy = table(rows, **unknown), make_policy(name)
        assert_valid(policy, candidates, choose(policy, candidates))


def test_answers_a_valid_row_for_huge_values(name: str) -> None:
    huge: dict[str, Any] = {item.name: [1e15, 2e15, 3e15] for item in fields(Columns) if item.name != "salt"}
    candidates, policy = table(3, cached=[1e12, 0, 1], prompt_tokens=10**12, **huge), make_policy(name)
    assert_valid(policy, candidates, choose(policy, candidates))


def test_answers_a_valid_row_for_an_empty_prompt(name: str) -> None:
    candidates, policy = table(3, prompt_tokens=0), make_policy(name)
    assert_valid(policy, candidates, choose(policy, candidates, asked=request(prompt_tokens=0)))


def test_sees_only_the_rows_that_are_eligible(name: str) -> None:
    """Slots 0 and 2 are left out: they look best in every column, and nothing of them may come through."""
    best = [0, 50, 0, 60]
    columns: dict[str, Any] = {item.name: best for item in fields(Columns) if item.name != "salt"}
    gathered = table(2, slots=[1, 3], names=["b", "d"], cached=[1000, 10, 1000, 0], **columns)
    picked: dict[str, Any] = {item.name: [50, 60] for item in fields(Columns) if item.name != "salt"}
    salt = gathered.columns.salt[[1, 3]]
    whole = table(2, names=["b", "d"], cached=[10, 0], salt=salt, **picked)
    one, other = choose(make_policy(name), gathered), choose(make_policy(name), whole)
    assert one.row == other.row
    assert {term: list(values) for term, values in one.terms.items()} == {
        term: list(values) for term, values in other.terms.items()
    }


def test_keeps_its_terms_apart_from_the_fleet_columns(name: str) -> None:
    """A decision is kept and read later; a term that is a kept column would change under it."""
    known: dict[str, Any] = {item.name: [1.0, 2.0] for item in fields(Columns) if item.name != "salt"}
    candidates = table(2, cached=[5, 6], **known)
    choice = choose(make_policy(name), candidates)
    kept = [getattr(candidates.columns, item.name) for item in fields(Columns)] + [candidates.matched_tokens]
    for column in [*choice.terms.values(), *([] if choice.cost is None else [choice.cost])]:
        assert not any(np.shares_memory(column, one) for one in kept)


def cells(rng: np.random.Generator, rows: int, *, unknown: bool) -> np.ndarray:
    """A column: each cell zero, one, the largest, of any size, of any order of magnitude, or unknown; or all alike."""
    kinds = [
        np.zeros(rows),
        np.ones(rows),
        np.full(rows, 1e9),
        rng.uniform(0, 1e9, rows),
        10 ** rng.uniform(-12, 9, rows),
    ]
    if unknown:
        kinds.append(np.full(rows, np.nan))
    drawn = np.choose(rng.integers(len(kinds), size=rows), kinds)
    return np.full(rows, drawn[0]) if rng.random() < 0.2 else drawn


def test_answers_the_same_for_the_same_seed_and_a_valid_row_for_any_table(name: str) -> None:
    rng = np.random.default_rng(20)
    for seed in range(100):
        rows = int(rng.integers(1, 10))
        counts: dict[str, Any] = {count: cells(rng, rows, unknown=False) for count in COUNTS}
        signals: dict[str, Any] = {signal: cells(rng, rows, unknown=True) for signal in SIGNALS}
        cached = np.minimum(cells(rng, rows, unknown=False), 1000).tolist()
        candidates = table(rows, cached=cached, **counts, **signals)
        choices = [choose(make_policy(name), candidates, seed=seed) for _ in range(2)]
        assert choices[0].row == choices[1].row, seed
        assert_valid(make_policy(name), candidates, choices[0])
