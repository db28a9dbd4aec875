"""What learned policies share: the contract, guards that are forced and counted, weights that take effect at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import numpy as np
import pytest

from experiments.systems import llm_d, lodestar
from experiments.variants import find_variant
from gorgo.core.fleet.replica import Columns
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Hedge, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.learning import Learner
from gorgo.policies.learned.base import Guard, near_best, predict_ttft_s, rows_in_range, sample_rows
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from gorgo.policies.registry import make_policy
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted, timed
from tests.policies.learned.models import BrokenFake, LinearFake
from tests.policies.table import COUNTS, choose, request, table
from tests.policies.test_contract import SIGNALS, assert_valid, cells

LOW, HIGH = np.array([0.0, 100.0], np.float32), np.array([10.0, 100.0], np.float32)


def inside(*rows: tuple[float, float], margin: float = 0.1) -> list[bool]:
    return [bool(row) for row in rows_in_range(np.array(rows, np.float32), LOW, HIGH, margin=margin)]


def test_every_row_is_checked_with_a_margin_of_the_range() -> None:
    assert inside((5, 100), (11, 100), (11.1, 100), (-1, 100), (-1.1, 100)) == [True, True, False, True, False]


def test_without_a_margin_the_bounds_themselves_are_in_range() -> None:
    assert inside((0, 100), (10, 100), (10.001, 100), margin=0.0) == [True, True, False]


def test_a_feature_that_was_constant_admits_no_other_value() -> None:
    assert inside((5, 100), (5, 101), (5, 99)) == [True, False, False]


class Answers:
    """A model with a fixed answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def ttft_s(self, table: np.ndarray) -> np.ndarray:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.array(self.answer)


def test_a_prediction_is_at_least_zero() -> None:
    predicted = predict_ttft_s(Answers([0.5, -0.1]), np.zeros((2, 1), np.float32))
    assert predicted is not None
    assert predicted.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("answer", [ValueError("no"), [1.0, np.nan], [np.inf, 1.0], [1.0], [[1.0, 2.0]], ["a", "b"]])
def test_a_model_that_raises_or_answers_no_number_per_row_predicts_nothing(answer: object) -> None:
    assert predict_ttft_s(Answers(answer), np.zeros((2, 1), np.float32)) is None


def test_near_best_never_lies_below_the_best_whatever_the_sign() -> None:
    assert near_best(np.array([1.0, 1.1, 1.11]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([-1.0, -0.9, -0.89]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([2.0, 1.0, 1.0]), share=0.0).tolist() == [1, 2]


def test_a_sample_has_its_size_and_the_included_row() -> None:
    rows = np.arange(300)
    drawn = sample_rows(rows, 16, np.random.default_rng(0), include=299)
    assert 299 in drawn
    assert len(drawn) in (16, 17)
    assert sorted(set(drawn.tolist())) == drawn.tolist()
    assert sample_rows(rows, 300, np.random.default_rng(0), include=0) is rows


# Queueing, deadlines and hedging by the predictions of learned policies, through a Router.
LIMITS = RouterLimits(
    overload=OverloadLimits(queue_enabled=True, shed_on_objective=True),
    hedging=HedgeLimits(budget_ratio=0.5, window_s=1000.0),
)
LEARNED = ("lodestar", "predicted-latency", "gorgo-residual")
#: No decision by chance.
CERTAIN = {"epsilon": 0.0}


def router_of(name: str, *, ttft_s: float | None, replicas: tuple[str, ...] = ("a", "b")) -> Router:
    """Idle replicas that prefill 1,000 tokens a second, and a model by which every first token takes `ttft_s`."""
    router = make_router(replicas=[timed(replica, max_running_requests=4) for replica in replicas], limits=LIMITS)
    policy = make_policy(name)
    certain = {weight: value for weight, value in CERTAIN.items() if weight in {s.name for s in policy.weight_specs}}
    router.settings.set_policy(policy, Weights.of(policy.weight_specs, certain), now=0.0)
    if ttft_s is not None:
        learner = router.learning.learner
        assert isinstance(learner, Learner)
        router.learning.adopt(LinearFake(learner.feature_names, {}, constant=ttft_s))
    return router


def request_base(name: str = "r", *, slo_s: float | None = None, tokens: int = 100) -> RouteRequest:
    return replace(a_request(name, prompt_tokens=tokens), slo_ttft_s=slo_s)


@pytest.mark.parametrize("name", LEARNED)
def test_the_model_decides_whether_a_deadline_can_be_met(name: str) -> None:
    (early,) = submitted(router_of(name, ttft_s=0.5), request_base(slo_s=1.0), now=0.0)
    (late,) = submitted(router_of(name, ttft_s=3.0), request_base(slo_s=1.0), now=0.0)
    assert isinstance(early, Dispatch)
    assert isinstance(late, Reject)


@pytest.mark.parametrize("name", LEARNED)
def test_before_a_model_the_priors_decide(name: str) -> None:
    """The only replica has two seconds of prefill before this request, or 0.1 s."""
    for waiting, expected in ((2000, Reject), (100, Dispatch)):
        router = router_of(name, ttft_s=None, replicas=("a",))
        dispatched(submitted(router, request_base("before", tokens=waiting), now=0.0))
        (action,) = submitted(router, request_base(slo_s=1.0), now=0.0)
        assert isinstance(action, expected)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("ttft_s", [0.2, None], ids=["model", "cold"])
def test_requests_are_queued_while_the_replicas_are_saturated(name: str, ttft_s: float | None) -> None:
    router = router_of(name, ttft_s=ttft_s)
    actions = [submitted(router, request_base(f"r{number}"), now=0.0)[0] for number in range(40)]
    assert isinstance(actions[0], Dispatch)
    assert isinstance(actions[-1], Hold)


@pytest.mark.parametrize("name", LEARNED)
def test_a_request_later_than_the_model_predicted_is_hedged(name: str) -> None:
    router = router_of(name, ttft_s=0.2)
    for number in range(2):
        before = dispatched(submitted(router, request_base(f"before-{number}"), now=-9.0)).attempt_id
        router.on_first_token(before, now=-8.8)
        router.on_finish(before, COMPLETED, now=-8.8)
    dispatched(submitted(router, request_base(), now=0.0))
    due_s = router.next_timer()
    assert due_s is not None
    assert due_s == pytest.approx(0.2 + 0.5, abs=0.2)
    hedges = [action for at in (due_s, due_s + 0.2, due_s + 0.4) for action in router.handle_timer(now=at)]
    assert [type(action) for action in hedges] == [Hedge]


@pytest.mark.parametrize("name", LEARNED)
def test_the_features_of_each_attempt_are_those_of_its_replica(name: str) -> None:
    router = router_of(name, ttft_s=None)
    action = dispatched(submitted(router, request_base(), now=0.0))
    router.on_first_token(action.attempt_id, now=0.1)
    router.on_finish(action.attempt_id, COMPLETED, now=0.5)
    assert router.learning.outcomes is not None
    rows = router.learning.outcomes.since(0)
    assert len(rows) == 1
    assert rows.ttft_s.tolist() == pytest.approx([0.1])
    assert rows.features[0, rows.names.index("prompt_tokens")] == 100


# --- The contract of policies, kept by each learned one with a model too.


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


@pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])
def test_the_model_decides_when_all_is_equal_and_when_every_signal_is_unknown(make: Make) -> None:
    for rows in (1, 2, 3, 64):
        unknown: dict[str, Any] = {signal: np.full(rows, np.nan) for signal in SIGNALS}
        for candidates in (table(rows), table(rows, **unknown)):
            choice = chosen(make, candidates)
            assert choice.fallback is None
            assert choice.cost is not None


@pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])
def test_huge_values_are_a_valid_row_without_a_warning(make: Make) -> None:
    huge: dict[str, Any] = {item.name: [1e15, 2e15, 3e15] for item in fields(Columns) if item.name != "salt"}
    chosen(make, table(3, cached=[1e12, 0, 1], prompt_tokens=10**12, **huge))


@pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])
def test_the_same_seed_makes_the_same_choice_for_any_table(make: Make) -> None:
    rng = np.random.default_rng(20)
    for seed in range(200):
        rows = int(rng.integers(1, 12))
        counts: dict[str, Any] = {count: cells(rng, rows, unknown=False) for count in COUNTS}
        signals: dict[str, Any] = {signal: cells(rng, rows, unknown=True) for signal in SIGNALS}
        cached = np.minimum(cells(rng, rows, unknown=False), 1000)
        candidates = table(rows, cached=cached, **counts, **signals)
        assert chosen(make, candidates, seed=seed).row == chosen(make, candidates, seed=seed).row, seed


@pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])
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


@pytest.mark.parametrize("make", [Lodestar, PredictedLatency, GorgoResidual])
def test_terms_and_features_are_no_columns_of_the_fleet(make: Make) -> None:
    known: dict[str, Any] = {item.name: [1.0, 2.0] for item in fields(Columns) if item.name != "salt"}
    candidates = table(2, cached=[5, 6], **known)
    choice = chosen(make, candidates)
    columns = [getattr(candidates.columns, item.name) for item in fields(Columns)] + [candidates.matched_tokens]
    assert choice.cost is not None
    assert choice.features is not None
    for made in (*choice.terms.values(), choice.cost, choice.features):
        assert not any(np.shares_memory(made, column) for column in columns)


# --- Each guard of each learned policy: forced, counted by its word, and off in its own row of the ablations.


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


# --- Weights of learned policies take effect at once: with a model, each end of a weight's box decides differently.


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
CASES_WEIGHTS = [(name, spec.name) for name, (make, _) in POLICIES.items() for spec in make().weight_specs]


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


@pytest.mark.parametrize(("name", "weight"), CASES_WEIGHTS)
def test_each_weight_changes_decisions(name: str, weight: str) -> None:
    (spec,) = [spec for spec in policy_of(name).weight_specs if spec.name == weight]
    low, default, high = (answers(name, weight, value) for value in (spec.low, spec.default, spec.high))
    assert low == answers(name, weight, spec.low)
    # The two ends of some boxes are the same: no gate, and one that none passes.
    assert low != default or high != default
