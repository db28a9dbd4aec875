"""Numbers of generations, rows of the history, and the values that the optimizer is given.

Theory of operation: traffic changes over a day by more than weights do, so values of different hours do not compare.
Each candidate is measured beside the incumbent, and the optimizer is given the ratio of the two times an anchor: the
first incumbent's objective, multiplied by every accepted ratio since. A candidate that the guard refused is given as
`REFUSED` times the incumbent, whatever its objective, so that it is never ranked first. What accepted candidates add to
p95 E2E adds up in `e2e_lost`, a logarithm; gains make up for earlier losses, and for no later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from tuner.campaign.comparison import Verdict
from tuner.campaign.generation import Generation, RecordGeneration
from tuner.campaign.options import CampaignOptions
from tuner.objective import WindowStats
from tuner.optimizers.base import Optimizer

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
        found = self.reference or NO_STATS
        verdict = Verdict(True, "the start", found.ttft_ms_p95, found.ttft_ms_p95, found)
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
        found = verdict.stats or NO_STATS
        row = Generation(
            number=self.number,
            started_s=now if self.opened_s is None else self.opened_s,
            finished_s=now,
            weights=dict(weights),
            weights_version=version,
            sigma=self._optimizer.sigma,
            mode=self._options.mode,
            optimizer=self._optimizer.name,
            n=found.n,
            objective_ms=verdict.objective_ms,
            incumbent_objective_ms=verdict.incumbent_objective_ms,
            e2e_s_p95=found.e2e_s_p95,
            itl_ms_p95=found.itl_ms_p95,
            errors=found.errors,
            max_share=found.max_share,
            accepted=verdict.accepted,
            reason=verdict.reason,
        )
        self.number += 1
        return RecordGeneration(row)


def _e2e_loss(verdict: Verdict) -> float:
    """Return the logarithm of the offspring's p95 E2E over the incumbent's; 0 if either is unknown."""
    ours = verdict.stats.e2e_s_p95 if verdict.stats else None
    theirs = verdict.incumbent_stats.e2e_s_p95 if verdict.incumbent_stats else None
    return log(ours / theirs) if ours and theirs else 0.0
