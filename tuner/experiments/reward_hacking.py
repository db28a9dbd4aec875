"""Reward hacking: all to the nearest replica, as in the paper's appendix D, without a guard and in the default mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from gorgo.apps.claims.verdict import ClaimVerdict
from tuner.experiments.comparison import PAPER, PROTOCOL, SWITCHBACK, TUNING, Options, TuningExperiment, e2e, twice
from tuner.experiments.task import Task
from tuner.experiments.windows import Windows

GROUP = "reward hacking"
#: As near to the 0 of the paper as a log space comes: a queue of 200,000 tokens weighs as much as 1 ms of round trip.
HACKED = (("w_rtt", 0.23), ("w_queue", 1e-6))
BOX = (("w_queue", 1e-7, 0.5),)
#: Time scale: at a third of the load one replica still copes with all of it; at half it answers several times slower.
LOAD = 2.0


def experiment(seeds: Sequence[int]) -> TuningExperiment:
    """Tune from the hacked weights, and serve the window with the weights at the end."""
    many = twice(seeds)
    modes = {"guard off": PROTOCOL, "switchback": SWITCHBACK}
    runs = yield [
        *(_tuned(seed, options) for seed in many for options in modes.values()),
        *(_served(seed) for seed in many),
    ]
    ends = {
        name: [replace(_served(s), weights=tuple(sorted(runs[_tuned(s, options)].weights.items()))) for s in many]
        for name, options in modes.items()
    }
    runs = yield [task for tasks in ends.values() for task in tasks]
    plain = [runs[_served(seed)].whole for seed in many]
    verdicts = []
    for name, tasks in ends.items():
        parts = [runs[task].whole for task in tasks]
        shares = [part.max_share or 0.0 for part in parts]
        ratios = [e2e(end) / e2e(base) for end, base in zip(parts, plain, strict=True)]
        verdicts += [
            _verdict(name, "largest share of one replica where it ends", "", shares, 0.9, 0.8),
            _verdict(name, "p95 E2E where it ends / defaults", f" of {len(many)} seeds", ratios, 2.0, 1.5),
        ]
    return verdicts


def _served(seed: int) -> Task:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=LOAD)
    return Task(windows=windows, policy=PAPER, box=BOX, seed=seed)


def _tuned(seed: int, options: Options) -> Task:
    return replace(_served(seed), weights=HACKED, campaign=options)


def _verdict(name: str, what: str, of: str, values: Sequence[float], at_least: float, at_most: float) -> ClaimVerdict:
    """The median has a lower bound without the guard; the highest has an upper bound with it."""
    unguarded = name == "guard off"
    return ClaimVerdict(
        group=GROUP,
        labels=(f"{name}: {what}, {'median' if unguarded else 'highest'}{of}",),
        value=median(values) if unguarded else max(values),
        at_least=at_least if unguarded else None,
        at_most=None if unguarded else at_most,
    )
