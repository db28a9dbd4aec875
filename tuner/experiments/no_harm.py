"""What clients get of a whole run with a tuner beside it, candidates included, against fixed defaults."""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.simulate.compare import geometric_mean, ratio_of
from tuner.experiments.comparison import OURS, PAPER, SWITCHBACK, TUNING, Options, TuningExperiment, e2e, ttft
from tuner.experiments.task import Task
from tuner.experiments.windows import Windows

GROUP = "no harm"
LOADS = (3.0, 2.0, 1.25, 1.0)
#: The published protocol for as long as there is traffic, as a sidecar runs it.
PAPER_ALL_ALONG: Options = (("max_generations", 10_000), ("mode", "paper"))
#: Bounds on p95 TTFT and p95 E2E by mode.
BOUNDS: tuple[tuple[Options, float | None, float | None], ...] = (
    (SWITCHBACK, 1.01, 1.02),
    (PAPER_ALL_ALONG, None, None),
)


def experiment(seeds: Sequence[int]) -> TuningExperiment:
    """Compare each mode at each load; a seed's figure is the geometric mean over the loads."""
    policies = (PAPER, OURS)
    runs = yield [
        _task(policy, load, seed, options)
        for policy in policies
        for load in LOADS
        for options in (None, SWITCHBACK, PAPER_ALL_ALONG)
        for seed in seeds
    ]
    verdicts = []
    for policy in policies:
        for options, ttft_bound, e2e_bound in BOUNDS:
            tuned = [[runs[_task(policy, load, seed, options)] for load in LOADS] for seed in seeds]
            fixed = [[runs[_task(policy, load, seed, None)] for load in LOADS] for seed in seeds]
            accepted = sum(run.accepted for of_seed in tuned for run in of_seed)
            for name, figure, bound in (("p95 TTFT", ttft, ttft_bound), ("p95 E2E", e2e, e2e_bound)):
                by_seed = [
                    (
                        geometric_mean([figure(run.whole) for run in ours]),
                        geometric_mean([figure(run.whole) for run in theirs]),
                    )
                    for ours, theirs in zip(tuned, fixed, strict=True)
                ]
                text = f"{policy}, {dict(options)['mode']}: the whole run / fixed defaults, {name}"
                note = f"{accepted} accepted in {len(LOADS) * len(seeds)} runs"
                verdicts.append(ClaimVerdict.of_ratio(GROUP, (text,), ratio_of(by_seed), at_most=bound, note=note))
    return verdicts


def _task(policy: str, load: float, seed: int, options: Options | None) -> Task:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, campaign=options)
