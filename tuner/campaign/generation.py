"""The record of one generation, the actions of a campaign, and the numbers and rows of its generations.

Owns the record, for the campaign, the history and the report, the actions, and the values that the optimizer is given
(`GenerationLog`). Leaves to the campaign when an action is due, and to its shell how it is executed.

Theory of operation: traffic changes over a day by more than weights do, so values of different hours do not compare.
Each candidate is measured beside the incumbent, and the optimizer is given the ratio of the two times an anchor: the
first incumbent's objective, multiplied by every accepted ratio since. A candidate that the guard refused is given as
`REFUSED` times the incumbent, whatever its objective, so that it is never ranked first. What accepted candidates add to
p95 E2E adds up in `e2e_lost`, a logarithm; gains make up for earlier losses, and for no later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import Any

from tuner.campaign.comparison import Verdict
from tuner.campaign.options import CampaignOptions
from tuner.objective import WindowStats
from tuner.optimizers.base import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One weight set under test, and its result.

    Parameters
    ----------
    number:
        From 0 within the campaign; 0 is the start.
    started_s, finished_s:
        By the campaign's clock; in the history Unix time.
    weights, weights_version:
        The weight set, and the proxy's version of it; None if it never reached the proxy.
    sigma:
        Step size in log space; None for an optimizer without one.
    mode, optimizer:
        How it was compared, and which optimizer proposed it.
    n:
        Samples in its window; statistics without a sample are None.
    objective_ms, incumbent_objective_ms:
        p95 TTFT of the window and of the incumbent's.
    e2e_s_p95, itl_ms_p95, errors, max_share:
        Guarded: p95 end to end, p95 gap between tokens, failed requests, largest share of one replica.
    accepted, reason:
        The decision and its reason.
    """

    number: int
    started_s: float
    finished_s: float
    weights: Mapping[str, float]
    weights_version: int | None
    sigma: float | None
    mode: str
    optimizer: str
    n: int
    objective_ms: float | None
    incumbent_objective_ms: float | None
    e2e_s_p95: float | None
    itl_ms_p95: float | None
    errors: int
    max_share: float | None
    accepted: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the row of `gorgo history --json` and of the report's `history.json`."""
        return {**asdict(self), "weights": dict(self.weights)}


# Actions of a campaign: frozen records for its shell to execute in their order.
#
# The shell answers a `PutWeights` or `RollBack` with `Campaign.on_weights_applied` and its ticket; others need no
# answer.


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Route by these weights, all of the policy's by name; `ticket` names this put."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """The same because the weights in force do harm: before anything else, with an event in the history."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RecordGeneration:
    """Write this row before the next action."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Freeze:
    """Pin these weights, which are in force."""

    values: Mapping[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `on_time` at `until`, by the clock of `now`, if nothing happens before."""

    until: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The campaign is done."""

    reason: str


Action = PutWeights | RollBack | RecordGeneration | Freeze | Wait | Stop


#: Worse than any candidate worth keeping.
REFUSED = 2.0
#: Objective while no window has had a first token.
NO_OBJECTIVE_MS = 1.0
NO_STATS = WindowStats(0, None, None, None, 0, None)


class GenerationLog:
    """Numbers, rows and the optimizer's scale. The campaign reads and restores its attributes."""

    def __init__(self, options: CampaignOptions, optimizer: Optimizer) -> None:
        self._options, self._optimizer = options, optimizer
        self.number = 0
        self.anchor: float | None = None
        self.e2e_lost = 0.0
        self.reference: WindowStats | None = None
        self.started_s: float | None = None
        self.opened_s: float | None = None

    def on_start(self, now: float) -> None:
        if self.started_s is None or self.started_s > now:  # a clock that was set back, or an edited state
            self.started_s = self.opened_s = now

    def budget_spent(self, now: float) -> str | None:
        options = self._options
        if self.number > options.max_generations:
            return f"{options.max_generations} generations"
        if options.budget_s is not None and self.started_s is not None and now >= self.started_s + options.budget_s:
            return f"budget of {options.budget_s:g} s is spent"
        return None

    def forget(self) -> None:
        """Start the scales anew for an incumbent that was not accepted."""
        self.anchor, self.e2e_lost = None, 0.0

    def measured(self, incumbent: WindowStats) -> None:
        """Record a window of the incumbent; in mode `paper` only the first."""
        if self._options.mode != "paper" or self.reference is None:
            self.reference = incumbent

    def started(self, weights: Mapping[str, float], version: int | None, now: float) -> RecordGeneration:
        """Return the row of generation 0, the start."""
        stats = self.reference or NO_STATS
        verdict = Verdict(True, "the start", stats.ttft_ms_p95, stats.ttft_ms_p95, stats)
        return self.closed(weights, verdict, version, now)

    def opened(self, now: float) -> None:
        self.opened_s = now

    def on_verdict(self, weights: Mapping[str, float], verdict: Verdict) -> None:
        """Give the optimizer the result of its proposal."""
        reference = self.reference.ttft_ms_p95 if self.reference else None
        theirs = verdict.incumbent_objective_ms or reference or NO_OBJECTIVE_MS
        anchor = self.anchor or theirs
        value = anchor * (verdict.objective_ms or theirs * REFUSED) / theirs
        if verdict.refused:
            value = max(value, anchor * REFUSED)
        self._optimizer.tell_incumbent(anchor)
        self._optimizer.tell(weights, value, accepted=verdict.accepted)
        self.anchor = value if verdict.accepted else anchor
        if verdict.accepted:
            self.reference = verdict.stats
            self.e2e_lost = max(0.0, self.e2e_lost + _e2e_loss(verdict))
        elif verdict.incumbent_stats is not None:
            self.reference = verdict.incumbent_stats

    def closed(
        self, weights: Mapping[str, float], verdict: Verdict, version: int | None, now: float
    ) -> RecordGeneration:
        """Return the row of a finished generation, and advance the number."""
        stats = verdict.stats or NO_STATS
        generation = Generation(
            number=self.number,
            started_s=now if self.opened_s is None else self.opened_s,
            finished_s=now,
            weights=dict(weights),
            weights_version=version,
            sigma=self._optimizer.sigma,
            mode=self._options.mode,
            optimizer=self._optimizer.name,
            n=stats.n,
            objective_ms=verdict.objective_ms,
            incumbent_objective_ms=verdict.incumbent_objective_ms,
            e2e_s_p95=stats.e2e_s_p95,
            itl_ms_p95=stats.itl_ms_p95,
            errors=stats.errors,
            max_share=stats.max_share,
            accepted=verdict.accepted,
            reason=verdict.reason,
        )
        self.number += 1
        return RecordGeneration(generation)


def _e2e_loss(verdict: Verdict) -> float:
    """Return the logarithm of the offspring's p95 E2E over the incumbent's; 0 if either is unknown."""
    ours = verdict.stats.e2e_s_p95 if verdict.stats else None
    theirs = verdict.incumbent_stats.e2e_s_p95 if verdict.incumbent_stats else None
    return log(ours / theirs) if ours and theirs else 0.0
