"""The search of a recorded window in virtual time; weights move only if held-out requests confirm it.

Owns the search, the scores of weight sets, the decision (`SearchVerdict`) and the file of it. Leaves the runs to
`gorgo.lab.simulate`.

Theory of operation. The window is cut in time: candidates run on its first part, and the best one on the whole. Only
the last part decides, under seeds that the search has not used. Every candidate has the same seeds. The objective is
p95 TTFT, as a geometric mean over seeds. A candidate counts as twice as slow if its p95 E2E is more than the margin
above the reference's, if it fails more requests, or if it gives one replica more than its share. The reference is the
start or the policy's defaults, whichever has the lower p95 E2E.

The verdict is what requests and seeds say that the search has not seen. Start, defaults and best run on the whole
window under new seeds, and only what arrives in its last part counts. A change is made when its whole 95 % interval is
on the right side:

- from the start to the defaults, if the start's p95 TTFT or p95 E2E is shown to be worse;
- from there to the best, if its p95 TTFT is shown to be lower, and its p95 E2E is not more than the margin above.

Otherwise nothing moves. The interval is over seeds on this one window: it says how sure the figure is for this traffic,
not how the next day's differs. So the best has to be ahead by `ANOTHER_DAY` more than the interval allows for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any

import numpy as np
from joblib import Parallel, delayed, parallel_config

from gorgo.config.weights_file import WeightsFile
from gorgo.core.policy.weights import Weights
from gorgo.errors import TunerError
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.compare import Ratio, ratio_of
from gorgo.policies.registry import make_policy
from tuner.campaign.generation import REFUSED, Generation
from tuner.campaign.options import CampaignOptions
from tuner.objective import p95
from tuner.optimizers.registry import make_optimizer
from tuner.space import LogBox, tuned_box

# Scores of weight sets on a recorded window: one simulated run per seed.
#
# Theory of operation: seed s is the same network jitter and the same ties for every weight set, so that the difference
# of two is far less noisy than either. All runs of a batch are distributed over all cores together.


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
    scores: list[RunScore] = []
    with parallel_config(backend="loky", n_jobs=n_jobs):
        for score in Parallel(return_as="generator")(delayed(score_once)(job, question.from_s) for job in jobs):
            scores.append(score)
            on_progress()
    per = len(question.seeds)
    return [scores[start : start + per] for start in range(0, len(scores), per)]


def score_once(job: SimJob, from_s: float) -> RunScore:
    """Run a job in this process, and score requests that arrive from `from_s` on."""
    records = run_once(job).requests or ()
    return score_of([record for record in records if record.scheduled_s >= from_s])


def geometric(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of known values; None without any."""
    logs = [log(value) for value in values if value]
    return exp(sum(logs) / len(logs)) if logs else None


def score_of(records: Sequence[SimRecord]) -> RunScore:
    """Return the statistics of some requests of a run; latencies and shares are of those that succeeded."""
    good = [record for record in records if record.error is None]
    shares = Counter(record.replica for record in good)
    return RunScore(
        n=len(records),
        errors=len(records) - len(good),
        ttft_ms_p95=p95([record.ttft_ms for record in good]),
        e2e_s_p95=p95([record.e2e_s for record in good]),
        max_share=max(shares.values()) / len(good) if good else None,
    )


#: Share of the window's time that the search does not use.
HELD_OUT = 1 / 3
#: First seed of the held-out runs: above any that a search uses.
HELD_OUT_SEED = 10_000
MODE = "twin"

#: Called with each row as it is made.
OnRow = Callable[[Generation], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search.

    Parameters
    ----------
    optimizer, candidates:
        Name of the optimizer, and the most candidates.
    seeds, held_out_seeds:
        Runs per candidate, and of each finalist.
    tune_lambda, box:
        As in `tuned_box`.
    margin, max_share:
        Of the guard, as `e2e_margin` and `max_share` of `CampaignOptions`.
    seed:
        Of the optimizer and, from it on, of the runs.
    n_jobs:
        Runs at a time; -1 is one per core.
    """

    optimizer: str = CampaignOptions().algorithm
    candidates: int = 40
    seeds: int = 3
    held_out_seeds: int = 10
    tune_lambda: bool = False
    box: Mapping[str, tuple[float, float]] | None = None
    margin: float = CampaignOptions().e2e_margin
    max_share: float = CampaignOptions().max_share
    seed: int = 0
    n_jobs: int = 1

    def __post_init__(self) -> None:
        for name in ("candidates", "seeds", "held_out_seeds"):
            if getattr(self, name) < 1:
                raise TunerError(f"{name} is {getattr(self, name)!r}; expected 1 or more")
        if self.seed + self.seeds > HELD_OUT_SEED:
            raise TunerError(f"seed {self.seed} with {self.seeds} runs; expected seeds below {HELD_OUT_SEED:,}")


@dataclass(frozen=True, slots=True)
class ScoredWeights:
    """A weight set, all of the policy's weights, with a score per seed."""

    weights: Mapping[str, float]
    scores: Sequence[RunScore]

    @property
    def ttft_ms(self) -> float | None:
        return geometric([score.ttft_ms_p95 for score in self.scores])

    @property
    def e2e_s(self) -> float | None:
        return geometric([score.e2e_s_p95 for score in self.scores])

    @property
    def errors(self) -> int:
        return sum(score.errors for score in self.scores)

    @property
    def max_share(self) -> float:
        return max((score.max_share or 0.0 for score in self.scores), default=0.0)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: start, defaults and best with their scores, and every row."""

    start: ScoredWeights
    defaults: ScoredWeights
    best: ScoredWeights
    rows: Sequence[Generation]
    stopped: str
    split_s: float


def search_weights(
    job: SimJob, options: SearchOptions, *, on_progress: OnProgress = lambda: None, on_row: OnRow | None = None
) -> SearchResult:
    """Search along `job`: its feed is the window, its weights the start (the policy's defaults if None).

    Raises `WeightsError` for a start outside the box, `TunerError` for a window without a first token.
    """
    split_s = held_out_from_s(job)
    question = CandidateBatch(job=job, seeds=range(options.seed, options.seed + options.seeds), until_s=split_s)
    twin = _SearchRun(question, options, on_progress, on_row, stamp_s=split_s)
    return twin.search()


def check_start(job: SimJob, options: SearchOptions) -> None:
    """Raise `WeightsError` for a start outside the box, before anything runs or is written."""
    specs = make_policy(job.policy).weight_specs
    box = tuned_box(specs, tune_lambda=options.tune_lambda, box=options.box)
    box.to_log(Weights.of(specs, job.weights, allow_out_of_range=True))


def held_out_from_s(job: SimJob) -> float:
    """Return the start of the held-out part, s of the run."""
    if not job.feed:
        raise TunerError(f"{job.trace}: the twin needs a recorded window with requests in it")
    return job.feed[-1].arrival_s * job.time_scale * (1 - HELD_OUT)


def refused(ours: ScoredWeights, theirs: ScoredWeights, *, margin: float, max_share: float) -> str | None:
    """Return why the guard refuses a weight set against the reference; None if it does not."""
    if ours.errors > theirs.errors:
        return f"errors rose: {ours.errors}, {theirs.errors} before"
    if ours.e2e_s and theirs.e2e_s and ours.e2e_s > theirs.e2e_s * (1 + margin):
        return f"p95 E2E is {ours.e2e_s / theirs.e2e_s - 1:.1%} higher"
    ends_earlier = ours.e2e_s is not None and theirs.e2e_s is not None and ours.e2e_s < theirs.e2e_s
    if ours.max_share > max(max_share, theirs.max_share) and not ends_earlier:
        return f"one replica takes {ours.max_share:.0%} of the requests; {theirs.max_share:.0%} before"
    return None


class _SearchRun:
    """One running search."""

    def __init__(
        self,
        question: CandidateBatch,
        options: SearchOptions,
        on_progress: OnProgress,
        on_row: OnRow | None,
        *,
        stamp_s: float,
    ) -> None:
        self._question, self._options, self._on_progress, self._on_row = question, options, on_progress, on_row
        self._span_s = stamp_s
        specs = make_policy(question.job.policy).weight_specs
        self._start = dict(Weights.of(specs, question.job.weights, allow_out_of_range=True))
        self._box: LogBox = tuned_box(specs, tune_lambda=options.tune_lambda, box=options.box)
        self._safe = {**self._start, **{spec.name: spec.default for spec in self._box.specs}}
        rng = np.random.default_rng(options.seed)
        self._optimizer = make_optimizer(options.optimizer, self._box, self._start, rng, budget=options.candidates)
        self._rows: list[Generation] = []

    def search(self) -> SearchResult:
        start, defaults = self._begin()
        reference = min(start, defaults, key=lambda one: one.e2e_s or float("inf"))
        best = start
        if self._better(defaults, start, reference) is None:
            best = defaults
            self._optimizer.recentre(defaults.weights)
        anchor_ms = best.ttft_ms
        if anchor_ms is None:
            raise TunerError(f"{self._question.job.trace}: no request of the window has a first token")
        self._optimizer.tell_incumbent(anchor_ms)
        while (stopped := self._optimizer.stop()) is None:
            proposed = self._optimizer.ask()
            tried = self._try([{**self._start, **proposed}])[0]
            no = self._better(tried, best, reference)
            value = tried.ttft_ms or anchor_ms * REFUSED
            if refused(tried, reference, margin=self._options.margin, max_share=self._options.max_share):
                value = max(value, anchor_ms * REFUSED)
            self._optimizer.tell(proposed, value, accepted=no is None)
            self._record(tried, best, accepted=no is None, reason=no or "lower p95 TTFT under the same seeds")
            best = tried if no is None else best
        return SearchResult(start, defaults, best, self._rows, stopped, self._span_s)

    def _begin(self) -> tuple[ScoredWeights, ScoredWeights]:
        wanted = [self._start] if self._start == self._safe else [self._start, self._safe]
        tried = self._try(wanted)
        self._record(tried[0], tried[0], accepted=True, reason="the start")
        if len(tried) > 1:
            self._record(tried[1], tried[0], accepted=False, reason="the policy's defaults, to compare with")
        return tried[0], tried[-1]

    def _try(self, candidates: Sequence[Mapping[str, float]]) -> list[ScoredWeights]:
        scores = scores_of(self._question, candidates, n_jobs=self._options.n_jobs, on_progress=self._on_progress)
        return [
            ScoredWeights(weights, scores_of_one) for weights, scores_of_one in zip(candidates, scores, strict=True)
        ]

    def _better(self, ours: ScoredWeights, best: ScoredWeights, reference: ScoredWeights) -> str | None:
        """Return why `ours` does not replace `best`; None if it does."""
        options = self._options
        if no := refused(ours, reference, margin=options.margin, max_share=options.max_share):
            return no
        if refused(best, reference, margin=options.margin, max_share=options.max_share):
            return None  # a refused best is replaced by any accepted one
        if not ours.ttft_ms or not best.ttft_ms:
            return "no first tokens"
        return None if ours.ttft_ms < best.ttft_ms else f"p95 TTFT {ours.ttft_ms / best.ttft_ms - 1:+.1%}"

    def _record(self, tried: ScoredWeights, best: ScoredWeights, *, accepted: bool, reason: str) -> None:
        """Record a row of the history; its times are one span of the run per candidate."""
        number = len(self._rows)
        generation = Generation(
            number=number,
            started_s=number * self._span_s,
            finished_s=(number + 1) * self._span_s,
            weights=dict(tried.weights),
            weights_version=None,
            sigma=self._optimizer.sigma,
            mode=MODE,
            optimizer=self._optimizer.name,
            n=sum(score.n for score in tried.scores),
            objective_ms=tried.ttft_ms,
            incumbent_objective_ms=best.ttft_ms,
            e2e_s_p95=tried.e2e_s,
            itl_ms_p95=None,
            errors=tried.errors,
            max_share=tried.max_share,
            accepted=accepted,
            reason=reason,
        )
        self._rows.append(generation)
        if self._on_row is not None:
            self._on_row(generation)


#: Share of p95 TTFT that another day's traffic may take from a gain. A find whose interval ended at -0.0 % met the next
#: day at 1.013 [0.990, 1.037] of the defaults (`python -m experiments --system tuner --only 'next window'`).
ANOTHER_DAY = 0.02

Figure = Callable[[RunScore], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchVerdict:
    """What is to be done, and by how much.

    Parameters
    ----------
    weights:
        Of the policy, all of them: the start's where nothing moves.
    moved:
        Whether they are others than the start's.
    reason:
        Why, in words.
    ttft, e2e:
        p95 of what was proposed over the start's, held out; what is proposed is `weights` where something moves, else
        the best of the search. None where the search has found nothing but the start.
    before, after:
        Held-out figures of the start and of `weights`.
    """

    weights: Mapping[str, float]
    moved: bool
    reason: str
    ttft: Ratio | None
    e2e: Ratio | None
    before: ScoredWeights
    after: ScoredWeights


def decide(
    job: SimJob, search: SearchResult, options: SearchOptions, *, on_progress: OnProgress = lambda: None
) -> SearchVerdict:
    """Run what is left of the search where it has not been."""
    first = HELD_OUT_SEED + options.seed
    question = CandidateBatch(job=job, seeds=range(first, first + options.held_out_seeds), from_s=search.split_s)
    wanted = list({_key(one.weights): one.weights for one in (search.start, search.defaults, search.best)}.values())
    scores = scores_of(question, wanted, n_jobs=options.n_jobs, on_progress=on_progress)
    scored = {_key(weights): ScoredWeights(weights, one) for weights, one in zip(wanted, scores, strict=True)}
    start, defaults, best = (scored[_key(one.weights)] for one in (search.start, search.defaults, search.best))
    base, words = start, "the start"
    if start is not defaults and (why := start_is_worse(start, defaults)):
        base, words = defaults, f"back to the defaults: {why}"
    no = "nothing better was found" if best is base else not_shown(best, base, options)
    chosen = base if no else best
    proposed = chosen if chosen is not start else best
    reason = (
        f"{words}; {'no move from there: ' if chosen is not start else 'no move: '}{no}" if no else _gain(best, base)
    )
    return SearchVerdict(
        weights=dict(chosen.weights),
        moved=chosen is not start,
        reason=reason,
        ttft=None if proposed is start else compared(proposed, start, _ttft),
        e2e=None if proposed is start else compared(proposed, start, _e2e),
        before=start,
        after=chosen,
    )


def start_is_worse(start: ScoredWeights, defaults: ScoredWeights) -> str | None:
    """What shows that the defaults are better than the start, in words."""
    for name, figure in (("TTFT", _ttft), ("E2E", _e2e)):
        ratio = compared(start, defaults, figure)
        if ratio is not None and ratio.low is not None and ratio.low > 1:
            return f"p95 {name} of the start is {_percent(ratio)}"
    return f"errors: {start.errors}, {defaults.errors} by the defaults" if start.errors > defaults.errors else None


def not_shown(best: ScoredWeights, base: ScoredWeights, options: SearchOptions) -> str | None:
    """Why the best of the search is not taken; None if it is."""
    if no := refused(best, base, margin=options.margin, max_share=options.max_share):
        return no
    ttft = compared(best, base, _ttft)
    if ttft is None or ttft.high is None or ttft.high >= 1 - ANOTHER_DAY:
        return "no gain in p95 TTFT is shown" if ttft is None else f"p95 TTFT is {_percent(ttft)}"
    return None


def compared(ours: ScoredWeights, theirs: ScoredWeights, figure: Figure) -> Ratio | None:
    """Seed by seed."""
    both = [(figure(one), figure(other)) for one, other in zip(ours.scores, theirs.scores, strict=True)]
    return ratio_of([(one, other) for one, other in both if one is not None and other is not None])


def weights_file(
    job: SimJob, result: SearchVerdict, *, source: str, created: str, window: Mapping[str, Any]
) -> WeightsFile:
    """The file that `gorgo serve --weights` and `gorgo freeze --weights` take."""
    specs = make_policy(job.policy).weight_specs
    outside = Weights.of(specs, result.weights, allow_out_of_range=True).out_of_range(specs)
    return WeightsFile(
        policy=job.policy,
        weights=dict(result.weights),
        widened=bool(outside),
        source=source,
        created=created,
        note=result.reason,
        evidence={
            "moved": result.moved,
            "ttft_ms_p95": {"before": result.before.ttft_ms, "after": result.after.ttft_ms},
            "e2e_s_p95": {"before": result.before.e2e_s, "after": result.after.e2e_s},
            "ttft_ratio": None if result.ttft is None else asdict(result.ttft),
            "e2e_ratio": None if result.e2e is None else asdict(result.e2e),
            "held_out": {"seeds": len(result.before.scores), "requests": result.before.scores[0].n},
            "window": dict(window),
        },
    )


def _gain(best: ScoredWeights, base: ScoredWeights) -> str:
    ttft, e2e = compared(best, base, _ttft), compared(best, base, _e2e)
    assert ttft is not None, "shown to be lower"
    beside = "" if e2e is None else f", p95 E2E {_percent(e2e)}"
    return f"p95 TTFT is {_percent(ttft)}{beside}, on requests and seeds that the search has not seen"


def _percent(ratio: Ratio) -> str:
    """A ratio in words, with its interval."""
    words = f"{ratio.value - 1:+.1%}"
    return (
        words if ratio.low is None or ratio.high is None else f"{words} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
    )


def _ttft(score: RunScore) -> float | None:
    return score.ttft_ms_p95


def _e2e(score: RunScore) -> float | None:
    return score.e2e_s_p95


def _key(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(weights.items()))
