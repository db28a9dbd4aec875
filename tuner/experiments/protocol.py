"""The paper's protocol: tune on one window, freeze, serve two others at other loads; by a campaign and by a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.demo.options import BASELINES
from gorgo.apps.results import load_text
from tuner.experiments.comparison import (
    OURS,
    PAPER,
    PROTOCOL,
    SWITCHBACK,
    TUNING,
    Runs,
    TuningExperiment,
    e2e,
    part_ratio,
    ttft,
)
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import Windows

GROUP, SEARCH_GROUP = "protocol", "protocol by twin"
#: Shapes and time scales of the windows that were not tuned on.
HELD_OUT = (("art-chat-apr6", 2.0), ("art-chat-apr7", 3.0))
#: Bound on a frozen set's p95 TTFT over the best baseline's.
BOUNDS = {PAPER: 0.96, OURS: 0.90}
#: The smallest search that finds anything.
SEARCH = Search(candidates=12, seeds=2, held_out_seeds=6)


def by_campaign(seeds: Sequence[int]) -> TuningExperiment:
    """Tune by the published protocol, and in the default mode."""
    tuned = {
        (policy, f"tuned in mode {dict(options)['mode']}"): [
            Task(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, campaign=options)
            for seed in seeds
        ]
        for policy in BOUNDS
        for options in (PROTOCOL, SWITCHBACK)
    }
    return _freeze(GROUP, seeds, tuned, "{} accepted in {} runs")


def by_search(seeds: Sequence[int]) -> TuningExperiment:
    """Tune by searching the window offline."""
    tuned = {
        (policy, "tuned by the twin"): [
            Task(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, search=SEARCH)
            for seed in seeds
        ]
        for policy in BOUNDS
    }
    return _freeze(SEARCH_GROUP, seeds, tuned, "moved in {} of {}")


def _freeze(
    group: str, seeds: Sequence[int], tuned: Mapping[tuple[str, str], Sequence[Task]], note: str
) -> TuningExperiment:
    """Serve the held-out windows with what each of `tuned` found; a task per seed by policy and words."""
    plain = [_served(*on, policy, s) for on in HELD_OUT for policy in (*BASELINES, *BOUNDS) for s in seeds]
    runs = yield [*(task for tasks in tuned.values() for task in tasks), *plain]
    frozen = {
        (on, *named): [
            _served(*on, named[0], seed, runs[task].weights) for seed, task in zip(seeds, tasks, strict=True)
        ]
        for on in HELD_OUT
        for named, tasks in tuned.items()
    }
    runs = yield [task for tasks in frozen.values() for task in tasks]
    return [
        _verdict(
            group,
            on,
            policy,
            words,
            (seeds, tasks, runs),
            note.format(sum(runs[task].accepted for task in tuned[policy, words]), len(seeds)),
        )
        for (on, policy, words), tasks in frozen.items()
    ]


def _served(shape: str, load: float, policy: str, seed: int, weights: Mapping[str, float] | None = None) -> Task:
    windows = Windows(shapes=(shape,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted((weights or {}).items())))


def _verdict(
    group: str,
    on: tuple[str, float],
    policy: str,
    words: str,
    found: tuple[Sequence[int], Sequence[Task], Runs],
    note: str,
) -> ClaimVerdict:
    """Compare frozen weights with the baseline of the lowest median on that window."""
    seeds, tasks, runs = found
    served = {name: [runs[_served(*on, name, seed)].whole for seed in seeds] for name in (*BASELINES, policy)}
    best = min(BASELINES, key=lambda name: median(map(ttft, served[name])))
    frozen = [runs[task].whole for task in tasks]
    pairs = list(zip(frozen, served[best], strict=True))
    whole, defaults = part_ratio(pairs, e2e), part_ratio(list(zip(frozen, served[policy], strict=True)), ttft)
    summary = (
        f"p95 E2E {whole.value:.3f}; p95 TTFT to own defaults {defaults.value:.3f}; " if whole and defaults else ""
    )
    return ClaimVerdict.of_ratio(
        group,
        (f"{on[0]}, {load_text(on[1])}: {policy} {words}, frozen / {best}, median p95 TTFT",),
        part_ratio(pairs, ttft),
        value=median(ttft(ours) / ttft(theirs) for ours, theirs in pairs),
        at_most=BOUNDS[policy],
        note=summary + note,
    )
