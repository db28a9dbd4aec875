from __future__ import annotations

from collections.abc import Sequence

import pytest

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.fleet_fit.fit import (
    BASE,
    DIMENSIONS,
    FITTED_ON,
    PARTS,
    RHO_MIN,
    RHO_WEIGHT,
    SEEDS,
    START,
    fit_profile,
    loss_of,
    rho_of,
    task_of,
    window_loss,
)
from gorgo.apps.fleet_fit.measure import FitRun, FitTask, with_values
from gorgo.apps.fleet_fit.published import WINDOWS, RunStats
from gorgo.apps.fleet_fit.search import FitEvaluation
from gorgo.sim.engine.fitted import FLAGS
from gorgo.sim.engine.profiles import find_profile


def fake_run(task: FitTask) -> FitRun:
    """As fast as its prefill rate: exactly the measured figures at 16,000 tokens/s, but twice those of April 6."""
    measured = next(one for one in WINDOWS if one.trace == task.trace)
    slow = 16_000 / task.profile.prefill_tokens_per_s * (2.0 if measured.name == "April 6" else 1.0)
    stats = RunStats(*(slow * value for value in measured.stats[task.policy].values()))
    return FitRun(stats=stats, errors=0, cache_hit=0.3, share={}, cpu_s=0.0)


def a_runner() -> Runner[FitTask, FitRun]:
    return Runner(fake_run, repr, RunCache(None, FitRun), n_jobs=1, show_progress=False)


def test_the_fit_recovers_a_constant_and_reports_the_window_that_it_did_not_see() -> None:
    seen: list[FitEvaluation] = []
    base = with_values(find_profile(BASE), FLAGS)
    fit = fit_profile(base, START, a_runner(), evaluations=120, on_evaluation=seen.append)
    assert fit.values["prefill_tokens_per_s"] == pytest.approx(16_000, rel=0.02)
    assert fit.fitted < fit.start
    assert fit.held_out == pytest.approx(0.693, abs=0.03), "ln 2"
    assert fit.evaluations == len(seen) <= 120


def test_one_window_is_held_out_and_every_constant_starts_within_its_bounds() -> None:
    assert set(FITTED_ON) < {window.name for window in WINDOWS}
    assert len(WINDOWS) - len(FITTED_ON) == 1
    assert [one.name for one in DIMENSIONS if not one.low < START[one.name] < one.high] == []


def test_the_loss_is_over_every_figure_of_every_policy() -> None:
    base = with_values(find_profile(BASE), {**FLAGS, "prefill_tokens_per_s": 8_000})
    tasks: list[FitTask] = []

    class Recorded(Runner[FitTask, FitRun]):
        def runs(self, wanted: Sequence[FitTask], *, title: str) -> dict[FitTask, FitRun]:
            tasks.extend(wanted)
            return super().runs(wanted, title=title)

    runner = Recorded(fake_run, repr, RunCache(None, FitRun), n_jobs=1, show_progress=False)
    loss = loss_of(base, WINDOWS[:1], runner, seeds=(3, 4), parts=(10, 20))
    assert loss**0.5 == pytest.approx(0.693, abs=0.001)
    assert [(task.policy, task.seed, task.warm_up, task.measured) for task in tasks] == [
        (policy, seed, 10, 20) for policy in WINDOWS[0].stats for seed in (3, 4)
    ]


def test_a_fit_is_on_whole_windows() -> None:
    task = task_of(WINDOWS[0], "gorgo", find_profile(BASE), seed=0, parts=PARTS)
    assert (task.warm_up, task.measured) == (0, None)
    assert len(SEEDS) > 1


def scaled(stats: RunStats, factor: float) -> RunStats:
    return RunStats(*(factor * value for value in stats.values()))


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
