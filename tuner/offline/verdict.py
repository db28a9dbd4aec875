"""Whether a search's best is taken: what requests and seeds that the search has not seen say, and the file of it.

Owns the decision and its words. Theory of operation: start, defaults and best run on the whole window under new seeds,
and only what arrives in its last part counts. A change is made when its whole 95 % interval is on the right side:

- from the start to the defaults, if the start's p95 TTFT or p95 E2E is shown to be worse;
- from there to the best, if its p95 TTFT is shown to be lower, and its p95 E2E is not more than the margin above.

Otherwise nothing moves. The interval is over seeds on this one window: it says how sure the figure is for this traffic,
not how the next day's differs. So the best has to be ahead by `ANOTHER_DAY` more than the interval allows for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.config.weights_file import WeightsFile
from gorgo.core.policy.weights import Weights
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.compare import Ratio, ratio_of
from gorgo.policies.registry import make_policy
from tuner.offline.search import (
    HELD_OUT_SEED,
    CandidateBatch,
    OnProgress,
    RunScore,
    ScoredWeights,
    SearchOptions,
    SearchResult,
    refused,
    scores_of,
)

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
    found = {_key(weights): ScoredWeights(weights, one) for weights, one in zip(wanted, scores, strict=True)}
    start, defaults, best = (found[_key(one.weights)] for one in (search.start, search.defaults, search.best))
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
