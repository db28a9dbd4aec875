"""Scores of weight sets on a recorded window: one simulated run per seed.

Theory of operation: seed s is the same network jitter and the same ties for every weight set, so that the difference of
two is far less noisy than either. All runs of a batch are distributed over all cores together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from joblib import Parallel, delayed, parallel_config

from gorgo.apps.simulate import SimJob, run_once
from gorgo.sim.records import SimRecord

#: Called after each run.
OnProgress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RunScore:
    """Statistics of one run over the scored requests; latencies are None where no request has one."""

    n: int
    errors: int
    ttft_ms_p95: float | None
    e2e_s_p95: float | None
    max_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateBatch:
    """Weight sets on a window.

    Parameters
    ----------
    job:
        The window and all that candidates share; `feed` is set.
    seeds:
        A run each.
    from_s, until_s:
        Requests that arrive in between count, s from the start of the run.
    """

    job: SimJob
    seeds: Sequence[int]
    from_s: float = 0.0
    until_s: float = float("inf")

    def jobs(self, weights: Mapping[str, float]) -> list[SimJob]:
        """Return a run per seed, without the requests after `until_s`."""
        assert self.job.feed is not None, "a recorded window"
        scale = self.job.time_scale
        feed = tuple(request for request in self.job.feed if request.arrival_s * scale < self.until_s)
        job = replace(self.job, feed=feed, weights=dict(weights), keep_requests=True)
        return [replace(job, seed=seed) for seed in self.seeds]


def scores_of(
    question: CandidateBatch,
    candidates: Sequence[Mapping[str, float]],
    *,
    n_jobs: int = 1,
    on_progress: OnProgress = lambda: None,
) -> list[list[RunScore]]:
    """Return, for each candidate, a score per seed in their order."""
    jobs = [job for weights in candidates for job in question.jobs(weights)]
    found: list[RunScore] = []
    with parallel_config(backend="loky", n_jobs=n_jobs):
        for score in Parallel(return_as="generator")(delayed(score_once)(job, question.from_s) for job in jobs):
            found.append(score)
            on_progress()
    per = len(question.seeds)
    return [found[place : place + per] for place in range(0, len(found), per)]


def score_once(job: SimJob, from_s: float) -> RunScore:
    """Run a job in this process, and score requests that arrive from `from_s` on."""
    records = run_once(job).requests or ()
    return score_of([record for record in records if record.scheduled_s >= from_s])


def geometric(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of known values; None without any."""
    known = [log(value) for value in values if value]
    return exp(sum(known) / len(known)) if known else None


def score_of(records: Sequence[SimRecord]) -> RunScore:
    """Return the statistics of some requests of a run; latencies and shares are of those that succeeded."""
    good = [record for record in records if record.error is None]
    shares = Counter(record.replica for record in good)
    return RunScore(
        n=len(records),
        errors=len(records) - len(good),
        ttft_ms_p95=_p95([record.ttft_ms for record in good]),
        e2e_s_p95=_p95([record.e2e_s for record in good]),
        max_share=max(shares.values()) / len(good) if good else None,
    )


def _p95(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, 0.95)) if known else None
