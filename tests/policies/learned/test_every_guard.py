"""Each guard of each learned policy: forced, counted by its word, and off in its own row of the ablations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import pytest

from experiments.systems import llm_d, lodestar
from experiments.variants import find_variant
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import Learner
from gorgo.policies.learned.base import Guard
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.policies.learned.models import BrokenFake, LinearFake
from tests.policies.table import request, table

DRAWS = 40


def loaded(*tokens: float, **given: Any) -> Candidates:
    """Replicas with so many prompt tokens before a first token."""
    columns: dict[str, Any] = {"in_flight_requests": [9.0] * len(tokens), **given}
    waiting = list(tokens)
    return table(len(tokens), queued_prefill_tokens=waiting, uncached_prefill_tokens=waiting, **columns)


FULL = loaded(
    *(100.0 * rank for rank in range(8)),
    used_tokens=[900.0] * 8,
    kv_capacity_tokens=[1000.0] * 8,
    cached=[400.0] + [0.0] * 7,
    salt=np.random.default_rng(1).integers(0, 2**62, 8),
)


@dataclass(frozen=True)
class Case:
    """Candidates on which `word` decides every time under `weights`.

    `ablation` is the variant without the guard, or with it where it is off by default; `None` where none can be: a
    model that fails has no other use.
    """

    policy: type[Lodestar] | type[PredictedLatency] | type[GorgoResidual]
    word: Guard
    candidates: Candidates
    ablation: str | None
    weights: Mapping[str, float] = field(default_factory=dict)
    model: str = "trained"
    high: Mapping[str, float] = field(default_factory=dict)

    @property
    def learner(self) -> Learner:
        policy = self.policy()
        names = policy.feature_names
        factors = {name: 0.001 for name in names if name in ("prefill_tokens", "uncached_prefill_tokens")}
        models = {
            "trained": LinearFake(names, factors, low=dict.fromkeys(self.high, 0.0), high=self.high),
            "broken": BrokenFake(names),
            "none": None,
        }
        policy.adopt(models[self.model])
        return policy


def asked() -> RouteRequest:
    return replace(request(), blocks=bytes(range(8)) * 15)


CERTAIN = {"epsilon": 0.0}
CACHED, LATE = loaded(4000, 100, cached=[960, 0]), loaded(9000, 100, cached=[960, 0])
CASES = [
    Case(Lodestar, "cold_start", loaded(1, 2), "lodestar, model from 200 samples", model="none"),
    Case(Lodestar, "no_model", loaded(1, 2), None, CERTAIN, "broken"),
    Case(Lodestar, "out_of_range", loaded(1, 2000), "lodestar, no range check", CERTAIN, high={"prefill_tokens": 9.0}),
    Case(Lodestar, "explore", loaded(1, 2), "lodestar, no exploration", {"epsilon": 1.0}),
    Case(Lodestar, "k_filter", FULL, "lodestar, no K-filter", CERTAIN),
    Case(Lodestar, "near_best", loaded(1000, 1010), "lodestar, near best 0.1", {**CERTAIN, "delta": 0.1}),
    Case(PredictedLatency, "cold_start", CACHED, "predicted-latency, model from 1,000 samples", model="none"),
    Case(PredictedLatency, "no_model", CACHED, None, model="broken"),
    Case(PredictedLatency, "explore", CACHED, "predicted-latency, no exploration", {"epsilon": 1.0}),
    Case(PredictedLatency, "affinity_kept", CACHED, "predicted-latency, no affinity gates", CERTAIN),
    Case(PredictedLatency, "affinity_left", LATE, "predicted-latency, no load gate", CERTAIN),
    Case(GorgoResidual, "no_model", loaded(1, 2), None, model="broken"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.policy.name}-{case.word}" for case in CASES])


def words(case: Case, weights: Mapping[str, float]) -> Counter[str | None]:
    policy = case.learner
    values = Weights.of(policy.weight_specs, {**case.weights, **weights}, allow_out_of_range=True)
    draws = (np.random.default_rng(seed) for seed in range(DRAWS))
    return Counter(policy.choose(asked(), case.candidates, values, rng).fallback for rng in draws)


@each_case
def test_a_guard_that_is_forced_decides_and_is_counted_by_its_word(case: Case) -> None:
    assert words(case, {}) == {case.word: DRAWS}


@each_case
def test_a_guard_has_a_row_of_its_own_among_the_ablations_in_which_it_does_not_act(case: Case) -> None:
    if case.ablation is None:
        assert case.word == "no_model"
        return
    assert any(
        case.ablation in one.variants
        for one in (*lodestar.comparisons(), *llm_d.comparisons())
        if one.group in ("guards", "gates")
    )
    variant = find_variant(case.ablation)
    if case.word == "cold_start":
        changed = variant.make()
        assert isinstance(changed, Learner)
        assert changed.training.first_samples != case.policy().training.first_samples
    elif case.word == "near_best":  # off by default: its row has it
        assert words(case, {"delta": 0.0}) == {None: DRAWS}
        assert words(case, dict(variant.weights)) == {case.word: DRAWS}
    else:
        assert case.word not in words(case, dict(variant.weights))


def test_every_word_is_some_guard_s() -> None:
    assert {case.word for case in CASES} == set(get_args(Guard))


@pytest.mark.parametrize("label", ["gorgo-residual, no range check", "gorgo-residual, no limit"])
def test_the_bounds_of_the_residual_have_rows_too_without_which_it_is_larger(label: str) -> None:
    policy = GorgoResidual()
    names = policy.feature_names
    factors = {"prior_s": 1.0, "running_requests": 1.0}
    policy.adopt(LinearFake(names, factors, low={"running_requests": 0.0}, high={"running_requests": 50.0}))
    running = [100.0, 0.0] if "range" in label else [20.0, 0.0]
    known: dict[str, Any] = {"prefill_token_s": [0.001] * 2, "slowdown": [1.0] * 2, "rtt_s": [0.1] * 2}
    candidates = table(2, running_requests=running, **known)

    def residual_ms(weights: Mapping[str, float]) -> float:
        values = Weights.of(policy.weight_specs, weights, allow_out_of_range=True)
        return float(policy.choose(asked(), candidates, values, np.random.default_rng(0)).terms["residual"][0])

    bounded, free = residual_ms({}), residual_ms(dict(find_variant(label).weights))
    assert bounded == pytest.approx(0.0 if "range" in label else 10_000.0, abs=1.0)
    assert free > bounded
    assert any(
        label in one.variants for one in (*lodestar.comparisons(), *llm_d.comparisons()) if one.group == "guards"
    )


def test_the_other_variants_of_the_issue_can_be_run() -> None:
    assert find_variant("lodestar, frozen").trains_until == 0.5
    assert find_variant("lodestar, offline").trained_on == "7xL20-8xA30"
    rules = ("new data only", "all data", "random replay", "linear")
    made = [find_variant(f"lodestar, {rule}").make() for rule in rules]
    assert [one.training.replay_rule for one in made if isinstance(one, Learner)][:3] == ["none", "all", "random"]
    assert [one.training.kind for one in made if isinstance(one, Learner)][3] == "linear"
