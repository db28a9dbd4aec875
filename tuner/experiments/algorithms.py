"""The optimizers on the same budget: the held-out gain of a search that may run so many candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gorgo.apps.claims.verdict import ClaimVerdict
from tuner.experiments.comparison import PAPER, Runs, TuningExperiment, e2e, part_ratio, ttft
from tuner.experiments.fleets import grid
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import Windows

GROUP = "algorithms"
ALGORITHMS = ("es-probes", "es", "cma", "random")
#: As many as the points of the grid of `fleets`.
BUDGET = Search(candidates=16, seeds=1, held_out_seeds=2)
#: Of p95 E2E, as the search's own.
MARGIN = 1.01
#: Draws of the windows on which the grid's choice is measured.
FRESH = 700_000
#: Where the defaults lose most without a change of the share of one replica.
FLEET, SHAPE, TIME_SCALE, REQUESTS = "mixed-gpus", "art-chat-apr6", 3.0, 2_400


def experiment(seeds: Sequence[int]) -> TuningExperiment:
    """Search the same windows with each optimizer, from the same start; the grid on the same number of candidates."""
    runs = yield [
        *(_task(name, seed) for name in ALGORITHMS for seed in seeds),
        *(_fixed(seed, weights, 0) for weights in grid(PAPER) for seed in seeds),
    ]
    best = {seed: _best_of_grid(seed, runs) for seed in seeds}
    runs = yield [_fixed(seed, weights, FRESH) for seed in seeds for weights in (best[seed], {})]
    verdicts = []
    for name in (*ALGORITHMS, "grid"):
        if name == "grid":
            pairs = [(runs[_fixed(s, best[s], FRESH)].tail, runs[_fixed(s, {}, FRESH)].tail) for s in seeds]
            moved = sum(bool(best[seed]) for seed in seeds)
        else:
            found = [runs[_task(name, seed)] for seed in seeds]
            pairs = [(run.tail, run.whole) for run in found]
            moved = sum(run.accepted for run in found)
        ends = part_ratio(pairs, e2e)
        note = f"p95 E2E {ends.value:.3f}; moved in {moved} of {len(seeds)}" if ends else ""
        text = f"{FLEET}, {SHAPE}: {PAPER} searched by {name}, {BUDGET.candidates} candidates / start, p95 TTFT"
        verdicts.append(ClaimVerdict.of_ratio(GROUP, (text,), part_ratio(pairs, ttft), note=note))
    return verdicts


def _best_of_grid(seed: int, runs: Runs) -> Mapping[str, float]:
    """Return the lowest p95 TTFT with a p95 E2E within the margin of a search; no weights for the defaults."""
    plain = runs[_fixed(seed, {"w_queue": 0.1, "w_rtt": 0.5}, 0)].tail
    best: Mapping[str, float] = {}
    least = ttft(plain)
    for weights in grid(PAPER):
        tail = runs[_fixed(seed, weights, 0)].tail
        if e2e(tail) <= MARGIN * e2e(plain) and ttft(tail) < least:
            best, least = weights, ttft(tail)
    return best


def _fixed(seed: int, weights: Mapping[str, float], offset: int) -> Task:
    windows = Windows(shapes=(SHAPE,), draw=seed + offset, time_scale=TIME_SCALE, limit=REQUESTS * 2 // 3)
    named = tuple(sorted(weights.items()))
    return Task(windows=windows, policy=PAPER, fleet=FLEET, seed=seed + offset, weights=named)


def _task(optimizer: str, seed: int) -> Task:
    windows = Windows(shapes=(SHAPE,), draw=seed, time_scale=TIME_SCALE, limit=REQUESTS)
    search = replace(BUDGET, optimizer=optimizer)
    return Task(windows=windows, policy=PAPER, fleet=FLEET, seed=seed, search=search)
