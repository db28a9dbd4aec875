"""The fit: which constants, from where, on which windows, and what the search found.

Owns the fitted constants and their bounds. The rest of the profile stays as it is estimated: KV pool, chunk, attention,
experts and the largest CUDA graph are known or weigh little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from gorgo.apps.claims.runner import Runner
from gorgo.apps.demo.options import PAPER
from gorgo.apps.fleet_fit.measure import FitRun, FitTask, with_values
from gorgo.apps.fleet_fit.published import LEARNED, WINDOWS, PublishedWindow
from gorgo.apps.fleet_fit.search import Dimension, FitEvaluation, coordinate_search, log_ratios, mean_square
from gorgo.sim.engine.profiles import EngineProfile

#: Fitted on these windows; the other one is held out.
FITTED_ON = ("April 5", "April 7")
#: Half a window behind the requests that fill the caches.
WARM_UP, MEASURED = 1200, 3600
#: The engine whose constants are fitted, with the authors' flags.
BASE = "2xL40S-Qwen3.5-35B-A3B-FP8-estimate"
#: From an earlier search of an open loop, which began at a scan by hand.
START: Mapping[str, float] = {
    "prefill_tokens_per_s": 18_420.0,
    "decode_base_s": 0.007957,
    "decode_eager_s": 0.025,
    "hit_share": 0.35,
    "decode_moe_s": 0.02321,
    "prefill_base_s": 0.008044,
}
#: Constants in the order of the search: those that move most figures first.
DIMENSIONS = (
    Dimension(name="prefill_tokens_per_s", low=4_000, high=40_000, step=0.08),
    Dimension(name="decode_base_s", low=0.002, high=0.02, step=0.1),
    Dimension(name="decode_eager_s", low=0.005, high=0.08, step=0.2),
    Dimension(name="hit_share", low=0.02, high=1.0, step=0.2),
    Dimension(name="decode_moe_s", low=0.002, high=0.06, step=0.2),
    Dimension(name="prefill_base_s", low=0.001, high=0.08, step=0.4),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, and the root mean square of ln(simulated / measured) on the windows of the fit before and after.

    `held_out` is that on the held-out windows, `evaluations` how many profiles were tried.
    """

    values: Mapping[str, float]
    start: float
    fitted: float
    held_out: float
    evaluations: int


def fit_profile(
    base: EngineProfile,
    start: Mapping[str, float],
    runner: Runner[FitTask, FitRun],
    *,
    evaluations: int,
    seed: int = 0,
    parts: tuple[int, int] = (WARM_UP, MEASURED),
    on_evaluation: Callable[[FitEvaluation], None] = lambda _: None,
) -> Fit:
    """Return the fit of `base` from `start`, with a value for each constant of `DIMENSIONS`.

    `parts` are the requests of a window that warm up and those that are measured.
    """
    fitted_on = [one for one in WINDOWS if one.name in FITTED_ON]
    others = [one for one in WINDOWS if one.name not in FITTED_ON]

    def loss(values: Mapping[str, float], windows: Sequence[PublishedWindow] = fitted_on) -> float:
        return loss_of(with_values(base, values), windows, runner, seed=seed, parts=parts)

    search = coordinate_search(loss, start, DIMENSIONS, evaluations=evaluations, on_evaluation=on_evaluation)
    best = search.best
    return Fit(
        best.values,
        sqrt(search.evaluations[0].loss),
        sqrt(best.loss),
        sqrt(loss(best.values, others)),
        len(search.evaluations),
    )


def loss_of(
    profile: EngineProfile,
    windows: Sequence[PublishedWindow],
    runner: Runner[FitTask, FitRun],
    *,
    seed: int,
    parts: tuple[int, int],
) -> float:
    """Return the mean square of ln(simulated / measured) over all figures of all policies on the windows."""
    tasks = {
        (window.name, policy): task_of(window, policy, profile, seed=seed, parts=parts)
        for window in windows
        for policy in window.stats
    }
    runs = runner.runs(list(tasks.values()), title="fit")
    return mean_square(
        ratio
        for window in windows
        for policy, measured in window.stats.items()
        for ratio in log_ratios(runs[tasks[window.name, policy]].stats, measured)
    )


def task_of(
    window: PublishedWindow,
    policy: str,
    profile: EngineProfile,
    *,
    seed: int,
    parts: tuple[int, int | None] = (0, None),
    time_scale: float | None = None,
    weights: Mapping[str, float] = LEARNED,
) -> FitTask:
    """Return the task of a policy on a window, the paper's policy with `weights`: those that the authors learned."""
    return FitTask(
        trace=window.trace,
        time_scale=window.time_scale if time_scale is None else time_scale,
        policy=policy,
        weights=tuple(weights.items()) if policy == PAPER else (),
        profile=profile,
        seed=seed,
        warm_up=parts[0],
        measured=parts[1],
    )
