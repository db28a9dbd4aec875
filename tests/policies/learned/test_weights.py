"""Weights of learned policies take effect at once: with a model, each end of a weight's box decides differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.policy.interface import Candidates
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import Learner
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.policies.learned.models import LinearFake
from tests.policies.table import request, table


class HalfWrongPrior(LinearFake):
    """A model of a prediction by priors that are half wrong, and nothing beside its residual."""

    prior_error = 0.5

    def base_s(self, table: np.ndarray) -> np.ndarray:
        return table[:, -1].astype(np.float64)


POLICIES: dict[str, tuple[Callable[[], Learner], dict[str, float]]] = {
    "lodestar": (Lodestar, {"prefill_tokens": 0.001}),
    "predicted-latency": (PredictedLatency, {"uncached_prefill_tokens": 0.001}),
    "gorgo-residual": (GorgoResidual, {"prior_s": 1.0, "uncached_prefill_tokens": 0.001}),
}
CASES = [(name, spec.name) for name, (make, _) in POLICIES.items() for spec in make().weight_specs]


def policy_of(name: str) -> Learner:
    make, factors = POLICIES[name]
    policy = make()
    names = policy.feature_names
    model = (HalfWrongPrior if name == "gorgo-residual" else LinearFake)(
        names,
        factors,
        tpot={"in_flight_requests": 0.001} if name == "predicted-latency" else None,
        low={"prompt_tokens": 900.0},
        high={"prompt_tokens": 1000.0},
    )
    policy.adopt(model)
    return policy


def tables() -> Iterator[Candidates]:
    """Tables of four replicas that differ in every signal, and one of a large fleet."""
    rng = np.random.default_rng(4)
    for number, rows in enumerate([4] * 60 + [300] * 4):
        tokens = rng.choice([100.0, 1000.0, 1050.0, 9000.0], rows)
        yield table(
            rows,
            cached=rng.choice([0.0, 90.0, 850.0, 1000.0], rows),
            prompt_tokens=(1000, 1000, 1000, 1050, 5000)[number % 5] if rows == 4 else 1000,
            rtt_s=rng.uniform(0.0, 0.1, rows),
            in_flight_requests=rng.integers(1, 9, rows),
            queued_prefill_tokens=tokens,
            uncached_prefill_tokens=tokens,
            used_tokens=rng.choice([700.0, 990.0], 1).repeat(rows),
            kv_capacity_tokens=[1000.0] * rows,
            prefill_token_s=[0.001] * rows,
            slowdown=[1.0] * rows,
            drained_at_s=rng.uniform(0.0, 2.0, rows),
            head_due_s=[np.inf] * rows,
            prefill_share=rng.uniform(0.0, 1.0, rows),
            salt=rng.integers(0, 2**62, rows),
        )


def answers(name: str, weight: str, value: float) -> list[object]:
    policy = policy_of(name)
    weights = Weights.of(policy.weight_specs, {weight: value})
    found: list[object] = []
    for seed, candidates in enumerate(tables()):
        asked = replace(request(prompt_tokens=candidates.prompt_tokens), blocks=bytes(range(8)) * 15)
        asked = replace(asked, slo_ttft_s=1.02, slo_tpot_s=0.006)
        choice = policy.choose(asked, candidates, weights, np.random.default_rng(seed))
        found.append((choice.row, choice.fallback, None if choice.cost is None else choice.cost.tolist()))
    return found


@pytest.mark.parametrize(("name", "weight"), CASES)
def test_each_weight_changes_decisions(name: str, weight: str) -> None:
    (spec,) = [spec for spec in policy_of(name).weight_specs if spec.name == weight]
    low, default, high = (answers(name, weight, value) for value in (spec.low, spec.default, spec.high))
    assert low == answers(name, weight, spec.low)
    # The two ends of some boxes are the same: no gate, and one that none passes.
    assert low != default or high != default
