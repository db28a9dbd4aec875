"""The record of one routing decision: every candidate's terms, for `/admin/decisions` and for the sample.

Owns the records of decisions and of the sources of cached tokens, which say what the Router's knowledge of a cache
comes from and how right it was (`CacheSourceStats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.numeric import in_ms, none_if_nan
from gorgo.core.record import record

# Sources of cached tokens: what the Router's knowledge of a replica's cache comes from, and how right it was.


#: `history`: prompts that were sent there, corrected by reports of cached tokens. `events`: the engine's KV events.
#: `push`: the engine's pushed snapshots.
CacheSource = Literal["history", "events", "push"]


@dataclass(slots=True)
class KvEventStats:
    """Blocks of a replica's events, by what became of them.

    `unknown_parents` and `without_tokens` could not be hashed; `unknown_removals` were not in the index.
    `other_block_sizes`, `other_tiers` and `excess_sources` are not indexed. `evicted` exceeded the bound.
    """

    stored: int = 0
    removed: int = 0
    unknown_parents: int = 0
    without_tokens: int = 0
    unknown_removals: int = 0
    other_block_sizes: int = 0
    other_tiers: int = 0
    excess_sources: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class CacheSourceStats:
    """The source of one replica, since it joined.

    Parameters
    ----------
    source:
        Of the newest report, in use for prompts with exact tokens; `history` without a report.
    complete:
        Whether the source has all blocks; of another one the better of it and the history counts.
    block_tokens:
        Tokens per block; `None` for the history.
    blocks:
        Reported as cached, each of the replica's caches counted.
    speculated_blocks:
        Dispatched and neither reported nor expired.
    age_s:
        Since the newest event or push; `None` without one.
    requests:
        Completed ones with a report of cached tokens; the sums of tokens are over these.
    estimated_tokens, reported_tokens:
        Cached by the Router's estimate at dispatch, and by the engine's usage.
    phantom_tokens, missed_tokens:
        Estimated and not reported, and the reverse, summed by request.
    events:
        Blocks of its events.
    decisions:
        Decisions for the replica by the source that they used, from the first report of any replica on.
    """

    source: CacheSource
    complete: bool
    block_tokens: int | None
    blocks: int
    speculated_blocks: int
    age_s: float | None
    requests: int
    estimated_tokens: int
    reported_tokens: int
    phantom_tokens: int
    missed_tokens: int
    events: KvEventStats
    decisions: Mapping[CacheSource, int]


@record
class ShadowScore:
    """A shadow policy's score of the replica chosen.

    `rank` is 1 for the shadow's own choice. Replicas of equal cost (within `TIE_EPSILON`) share the lowest rank.
    With fewer than two candidates there is no rank. `cost` is in the shadow's unit.
    """

    policy: str
    rank: int | None
    cost: float | None
    predicted_ttft_s: float | None

    def as_dict(self) -> dict[str, Any]:
        predicted_ms = None if self.predicted_ttft_s is None else self.predicted_ttft_s * 1e3
        return {"policy": self.policy, "rank": self.rank, "cost": self.cost, "predicted_ttft_ms": predicted_ms}


@record
class Decision:
    """A choice with its candidates, weights and terms. No prompt text."""

    request_id: str
    attempt: int
    decided_s: float
    policy: str
    unit: str
    weights_version: int
    weights: Mapping[str, float]
    candidates: Sequence[str]
    #: Of the replica chosen, among the candidates.
    row: int
    terms: Mapping[str, NDArray[np.float64]]
    cost: NDArray[np.float64] | None
    prompt_tokens: int
    estimated_cached_tokens: int
    #: On the candidate with the longest match.
    best_cached_tokens: int
    predicted_ttft_s: float | None
    estimate: TtftEstimate
    fallback: str | None
    #: Replicas left out and the reason: `draining`, `ejected`, `tried`, `model`, `region`, `subset`, `slow_start`,
    #: `warming`, `full`.
    excluded: Mapping[str, str]
    shadow: ShadowScore | None = None
    #: Name of the client's key, and the model under its name in the Router.
    client: str | None = None
    model: str | None = None
    #: Of the policy that learns: its table with a row per candidate, the names of its columns, and the version of its
    #: model, which is `None` without one.
    features: NDArray[np.float32] | None = None
    feature_names: tuple[str, ...] = ()
    model_version: int | None = None
    #: Source of the cached tokens of the replica chosen.
    cache_source: CacheSource = "history"
    #: Number of eligible replicas of which the candidates are a sample; `None` if they are all.
    sampled_from: int | None = None
    #: As in `Choice`, s.
    estimates: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    #: Objectives or deadlines of the request, s.
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    @property
    def replica(self) -> str:
        """The replica chosen."""
        return self.candidates[self.row]

    def as_dict(self) -> dict[str, Any]:
        """JSON form for `/admin/decisions/{id}`: one object per candidate, terms by name."""
        rows: list[dict[str, Any]] = []
        for row, name in enumerate(self.candidates):
            cost = None if self.cost is None else none_if_nan(self.cost[row])
            terms = {term: none_if_nan(column[row]) for term, column in self.terms.items()}
            rows.append({"replica": name, "cost": cost, "terms": terms})
            if self.estimates:
                rows[-1]["estimates_ms"] = {
                    estimate: in_ms(none_if_nan(column[row])) for estimate, column in self.estimates.items()
                }
            if self.features is not None:
                rows[-1]["features"] = dict(zip(self.feature_names, self.features[row].tolist(), strict=True))
        return {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "client": self.client,
            "model": self.model,
            "decided_s": self.decided_s,
            "policy": self.policy,
            "unit": self.unit,
            "weights_version": self.weights_version,
            "weights": dict(self.weights),
            "model_version": self.model_version,
            "replica": self.replica,
            "prompt_tokens": self.prompt_tokens,
            "estimated_cached_tokens": self.estimated_cached_tokens,
            "best_cached_tokens": self.best_cached_tokens,
            "cache_source": self.cache_source,
            "predicted_ttft_ms": None if self.predicted_ttft_s is None else self.predicted_ttft_s * 1e3,
            "predicted_parts_ms": dict(self.estimate.as_ms()),
            "objectives_ms": {"ttft": in_ms(self.slo_ttft_s), "tpot": in_ms(self.slo_tpot_s)},
            "fallback": self.fallback,
            "shadow": None if self.shadow is None else self.shadow.as_dict(),
            "sampled_from": self.sampled_from,
            "candidates": rows,
            "excluded": dict(self.excluded),
        }
