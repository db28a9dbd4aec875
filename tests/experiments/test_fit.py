"""The fit of the engine: the search, the loss, and a constant that is recovered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import numpy as np
import pytest

from experiments.fit import (
    BASE,
    DIMENSIONS,
    RHO_WEIGHT,
    SEEDS,
    START,
    CoordinateSearch,
    fit_profile,
    loss_of,
    rho_of,
    window_loss,
    with_values,
)
from experiments.runner import Runner
from experiments.simulated import RecordedTrainer, TaskRun, forecasts
from experiments.systems.gorgo_paper import FITTED_ON, RHO_MIN, WINDOWS, Stats
from experiments.windows import PolicyTask
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.lab.results import Spread
from gorgo.lab.sim.engine.profiles import FLAGS, find_profile
from gorgo.lab.sim.training import TrainingRound
from tests.experiments.rows import row
from tests.policies.learned.models import LinearFake

RATE, SHARE = (1.0, 1000.0, 0.15), (0.01, 1.0, 0.15)
START_AT = {"rate": 10.0, "share": 0.8}


def as_fast_as_its_prefill(task: PolicyTask) -> TaskRun:
    """Exactly the measured figures at 16,000 tokens/s, but twice those of April 6."""
    assert task.workload.world is not None
    window = next(one for one in WINDOWS if one.trace == task.trace)
    slow = (
        16_000 / task.workload.world.replicas[0].profile.prefill_tokens_per_s * (2.0 if window.on == "April 6" else 1.0)
    )
    values = [slow * value for value in window.stats[task.job().policy]]
    ttft, e2e = Spread(1.0, *values[:3]), Spread(1.0, *values[3:6])
    return TaskRun(row=replace(row(), ttft_ms=ttft, e2e_s=e2e, tpot_ms=Spread(p50=values[6])), cpu_s=0.0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(PolicyTask, "run", as_fast_as_its_prefill)
    return Runner(None, n_jobs=1, show_progress=False)


def test_the_fit_recovers_a_constant_and_reports_the_window_that_it_did_not_see(made_up: Runner) -> None:
    tried: list[float] = []
    base = with_values(find_profile(BASE), FLAGS)
    fit = fit_profile(
        base, START, made_up, evaluations=80, seeds=(0,), on_evaluation=lambda _, loss: tried.append(loss)
    )
    assert fit.values["prefill_tokens_per_s"] == pytest.approx(16_000, rel=0.02)
    assert fit.fitted < fit.start
    assert fit.held_out == pytest.approx(0.693, abs=0.03), "ln 2"
    assert fit.evaluations == len(tried) <= 80


def test_one_window_is_held_out_and_every_constant_starts_within_its_bounds() -> None:
    assert set(FITTED_ON) < {window.on for window in WINDOWS}
    assert len(WINDOWS) - len(FITTED_ON) == 1
    assert [name for name, (low, high, _) in DIMENSIONS.items() if not low < START[name] < high] == []
    assert len(SEEDS) > 1


def test_the_loss_is_over_every_figure_of_every_policy(made_up: Runner) -> None:
    base = with_values(find_profile(BASE), {**FLAGS, "prefill_tokens_per_s": 8_000})
    loss = loss_of(base, WINDOWS[:1], made_up, seeds=(3, 4))
    assert loss**0.5 == pytest.approx(0.693, abs=0.001)
    assert made_up.made == 2 * len(WINDOWS[0].stats)


def scaled(stats: Stats, factor: float) -> Stats:
    return tuple(factor * value for value in stats)


def test_one_policy_that_no_fleet_meets_does_not_outweigh_the_others() -> None:
    measured = WINDOWS[0].stats
    far, farther = ({**measured, "prefix-cache": scaled(measured["prefix-cache"], factor)} for factor in (2.0, 20.0))
    assert window_loss(far, measured) == pytest.approx(window_loss(farther, measured))
    assert window_loss(far, measured) == pytest.approx(0.693**2 / 5, abs=0.001)


def test_policies_in_another_order_than_measured_cost() -> None:
    measured = WINDOWS[0].stats
    worst_first = dict(zip(measured, reversed([*measured.values()]), strict=True))
    rho = rho_of(worst_first, measured)
    assert rho is not None
    assert rho < 0
    assert window_loss(worst_first, measured) > RHO_WEIGHT * (RHO_MIN - rho) ** 2
    assert rho_of(measured, measured) == pytest.approx(1.0)


# -- the search


def valley(values: Mapping[str, float]) -> float:
    """A narrow valley that is aligned with no axis: rate and share make up for each other in part."""
    rate, share = log(values["rate"] / 40.0), log(values["share"] / 0.2)
    return (rate + share) ** 2 + 0.2 * (rate - share) ** 2


def test_the_search_finds_the_constants_that_made_the_figures() -> None:
    search = CoordinateSearch(valley, 200, lambda *_: None)
    best, lowest = search.run(START_AT, {"rate": RATE, "share": SHARE})
    assert best == pytest.approx({"rate": 40.0, "share": 0.2}, rel=0.05)
    assert lowest == min(search.tried.values())


@pytest.mark.parametrize("budget", [1, 7])
def test_the_search_keeps_its_budget_and_evaluates_nothing_twice(budget: int) -> None:
    tried: list[tuple[float, float]] = []

    def loss(values: Mapping[str, float]) -> float:
        tried.append((values["rate"], values["share"]))
        return valley(values)

    CoordinateSearch(loss, budget, lambda *_: None).run(START_AT, {"rate": RATE, "share": SHARE})
    assert len(tried) == len(set(tried)) == budget


def test_no_value_leaves_its_bounds() -> None:
    search = CoordinateSearch(valley, 100, lambda *_: None)
    best, _ = search.run({"rate": 10.0, "share": 0.2}, {"rate": (1.0, 20.0, 0.15), "share": SHARE})
    assert best["rate"] == max(rate for rate, _ in search.tried) == 20.0


# forecasts


NAMES = ("prompt_tokens",)


def outcomes(*dispatched_s: float, ttft_s: float = 2.0, tpot_s: float = 0.04) -> TrainingRows:
    """Prompts of 1,000 tokens."""
    rows = TrainingRows.empty(NAMES, len(dispatched_s))
    rows.features[:] = 1000.0
    return replace(
        rows,
        dispatched_s=np.array(dispatched_s),
        ttft_s=np.full(len(rows), ttft_s),
        tpot_s=np.full(len(rows), tpot_s),
        e2e_s=np.full(len(rows), 9.0),
    )


def model(token_s: float, *, tpot: float | None = None) -> LinearFake:
    return LinearFake(NAMES, {NAMES[0]: token_s}, tpot=None if tpot is None else {NAMES[0]: tpot})


def test_an_outcome_is_predicted_by_the_model_that_was_in_use_at_its_dispatch() -> None:
    rounds = [
        TrainingRound(model(0.001, tpot=1e-5), 8.0, 10.0),
        TrainingRound(model(9.0), 18.0, None),  # frozen: never adopted
        TrainingRound(model(0.003), 28.0, 30.0),
    ]
    found = forecasts([outcomes(9.0, 10.0, 29.0), outcomes(30.0)], rounds, None)
    np.testing.assert_allclose(found.predicted_ttft_s, [np.nan, 1.0, 1.0, 3.0])
    np.testing.assert_allclose(found.predicted_tpot_s, [np.nan, 0.01, 0.01, np.nan])
    first = forecasts([outcomes(9.0)], rounds, model(0.002))
    assert first.predicted_ttft_s.tolist() == pytest.approx([2.0])


def test_errors_are_shares_of_the_measured_time_and_outcomes_without_a_model_are_left_out() -> None:
    rounds = [TrainingRound(model(0.001, tpot=5e-5), 0.0, 10.0), TrainingRound(model(0.004), 19.0, 20.0)]
    found = forecasts([outcomes(1.0, 11.0, 12.0, 21.0)], rounds, None)
    errors = found.errors()
    assert [errors["ttft_mean"], errors["ttft_median"]] == pytest.approx([2 / 3, 0.5])
    assert [errors["tpot_mean"], errors["tpot_median"]] == pytest.approx([0.25, 0.25])
    assert set(found.between(0.0, 10.0).errors().values()) == {None}
    assert found.means_ms()["modelled_ttft_ms"] == pytest.approx(2000.0)


def test_censored_outcomes_have_no_measured_time() -> None:
    rows = outcomes(11.0, 12.0)
    rows.censored[0] = True
    found = forecasts([rows], [TrainingRound(model(0.001), 0.0, 10.0)], None)
    assert found.dispatched_s.tolist() == [12.0]


def test_a_run_without_a_learner_has_no_errors() -> None:
    assert set(forecasts([], [], None).errors().values()) == {None}


def test_a_trainer_retains_what_it_was_given() -> None:
    trainer = RecordedTrainer(TrainingSpec("linear", NAMES, first_samples=10), seed=0)
    trainer.add(outcomes(*map(float, range(100))))
    trainer.train()
    assert sum(map(len, trainer.rows)) == 100
