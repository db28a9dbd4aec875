"""The live campaign along a window in virtual time. The campaign is the sidecar's; half an hour takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gorgo.apps.results import ResultRow
from gorgo.apps.simulate import SimJob, run_once
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import make_policy
from gorgo.sim.records import SimRecord
from tuner.campaign.generation import Generation
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.offline.driver import POLL_S, CampaignDriver
from tuner.optimizers.base import BUDGET
from tuner.optimizers.registry import make_optimizer
from tuner.space import searched_box, tuned_box


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRun:
    """A campaign at the end of its window.

    Parameters
    ----------
    generations:
        Every row of the history, in order.
    weights:
        The incumbent at the end, all of the policy's weights.
    row:
        The run as a whole, candidates included.
    records:
        A record per request.
    stopped:
        Why the campaign ended before the window did; None if it did not.
    rollbacks:
        Immediate roll-backs.
    """

    generations: Sequence[Generation]
    weights: Mapping[str, float]
    row: ResultRow
    records: Sequence[SimRecord]
    stopped: str | None
    rollbacks: int


def simulate_campaign(
    job: SimJob,
    options: CampaignOptions,
    *,
    optimizer: str | None = None,
    seed: int = 0,
    tune_lambda: bool = False,
    box: Mapping[str, tuple[float, float]] | None = None,
    budget: int = BUDGET,
    poll_s: float = POLL_S,
) -> CampaignRun:
    """Tune along `job`, which has trace, policy, start weights (its defaults if None) and fleet.

    Parameters
    ----------
    optimizer, budget:
        Name of the optimizer (None: the mode's), and the most proposals.
    seed:
        Of the campaign; the simulation's own is the job's.
    tune_lambda, box:
        As in `tuned_box`.
    poll_s:
        Between two polls of the campaign, virtual seconds.

    Raises `WeightsError` for a start outside the box, and what `run_once` does.
    """
    specs = make_policy(job.policy).weight_specs
    start = dict(Weights.of(specs, job.weights, allow_out_of_range=True))
    box = searched_box(job.policy, box, published=options.mode == "paper")
    moved = tuned_box(specs, tune_lambda=tune_lambda, box=box)
    proposals, coins = np.random.default_rng(seed).spawn(2)
    searcher = make_optimizer(optimizer or options.algorithm, moved, start, proposals, budget=budget)
    driver = CampaignDriver(Campaign(moved, searcher, options, start=start, rng=coins), poll_s=poll_s)
    run = run_once(replace(job, weights=start, keep_requests=True), controllers=(driver,))
    final = {**driver.campaign.start, **driver.campaign.incumbent}
    return CampaignRun(
        generations=driver.generations,
        weights=final,
        row=replace(run.row, weights=final),
        records=run.requests or (),
        stopped=driver.stopped,
        rollbacks=driver.rollbacks,
    )
