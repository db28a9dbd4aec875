"""The live campaign along a window in virtual time. The campaign is the sidecar's; half an hour takes seconds.

Owns the shell of a campaign in virtual time (`CampaignDriver`) and the run around it. Leaves the campaign to
`tuner.campaign`, and the simulation to `gorgo.lab.sim`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.simulation import Controller
from gorgo.lab.simulate import SimJob, run_once
from gorgo.policies.registry import make_policy
from tuner.campaign.generation import Action, Freeze, Generation, PutWeights, RecordGeneration, RollBack, Stop, Wait
from tuner.campaign.machine import Campaign, Refutes
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.optimizers.base import BUDGET
from tuner.optimizers.registry import make_optimizer
from tuner.space import searched_box, tuned_box

# The shell of a campaign in virtual time: reads the Router's samples, and executes actions.
#
# The order of calls is the sidecar's: all new samples first, then time, then actions. Without a network a put is
# executed at once and never refused.


#: As the sidecar polls, s.
POLL_S = 1.0
#: Samples of one poll, as of the admin listener.
BATCH = 1000


class CampaignDriver:
    """A controller of a simulation, through which a campaign acts on its Router.

    Parameters
    ----------
    campaign:
        New, or from its saved state.
    poll_s:
        Between two polls, in virtual seconds.
    begin_s:
        Of the campaign; traffic begins at 0.

    Weights are set whatever the policy's own box: the campaign has a box of its own.
    """

    def __init__(self, campaign: Campaign, *, poll_s: float = POLL_S, begin_s: float = 0.0) -> None:
        self.campaign = campaign
        self.generations: list[Generation] = []
        self.stopped: str | None = None
        self.puts = 0
        self.rollbacks = 0
        #: Blocks in which a candidate was in force.
        self.candidate_blocks = 0
        self._poll_s = poll_s
        self._next_s: float | None = begin_s

    @property
    def next_s(self) -> float | None:
        """Return the time of the next poll; None when the campaign is done."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:
        """Poll the Router once and act on it."""
        if self.campaign.phase == "new":
            self._carry_out(self.campaign.on_start(now=now), router, now)
        self._read(router, now)
        self._carry_out(self.campaign.on_time(now=now), router, now)
        self._next_s = None if self.stopped is not None else now + self._poll_s

    def _read(self, router: Router, now: float) -> None:
        samples = router.samples
        while self.stopped is None and (rows := self._new(router)):
            boot_id = samples.boot_id
            self._carry_out(self.campaign.on_samples(rows, boot_id=boot_id, now=now), router, now)

    def _new(self, router: Router) -> list[TunerSample]:
        rows: list[dict[str, Any]] = router.samples.after(self.campaign.cursor.last_seq, BATCH)["samples"]
        return [TunerSample.from_json(sample) for sample in rows]

    def _carry_out(self, actions: Iterable[Action], router: Router, now: float) -> None:
        waiting = deque(actions)
        while waiting:
            match waiting.popleft():
                case PutWeights() | RollBack() as order:
                    self.puts += 1
                    self.candidate_blocks += dict(order.values) != {**self.campaign.start, **self.campaign.incumbent}
                    self.rollbacks += isinstance(order, RollBack)
                    specs = router.settings.policy.weight_specs
                    weights = router.settings.weights.changed(specs, order.values, allow_out_of_range=True)
                    router.settings.set_weights(weights, now=now)
                    waiting.extend(self.campaign.on_weights_applied(weights.version, ticket=order.ticket, now=now))
                case RecordGeneration() as record:
                    self.generations.append(record.generation)
                case Stop() as stop:
                    self.stopped = stop.reason
                case Freeze() | Wait():  # a simulated proxy has one tuner, which polls every `poll_s` anyway
                    pass


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
    candidate_blocks:
        Blocks in which a candidate was in force; the incumbent has as many beside them.
    """

    generations: Sequence[Generation]
    weights: Mapping[str, float]
    row: ResultRow
    records: Sequence[SimRecord]
    stopped: str | None
    rollbacks: int
    candidate_blocks: int


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
    begin_s: float = 0.0,
    refutes: Refutes | None = None,
    controllers: Sequence[Controller] = (),
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
    poll_s, begin_s:
        As of `CampaignDriver`.
    refutes:
        As of the campaign.
    controllers:
        Of the simulation, beside the campaign's.

    Raises `WeightsError` for a start outside the box, and what `run_once` does.
    """
    specs = make_policy(job.policy).weight_specs
    start = dict(Weights.of(specs, job.weights, allow_out_of_range=True))
    box = searched_box(job.policy, box, published=options.mode == "paper")
    moved = tuned_box(specs, tune_lambda=tune_lambda, box=box)
    proposals, coins = np.random.default_rng(seed).spawn(2)
    searcher = make_optimizer(optimizer or options.algorithm, moved, start, proposals, budget=budget)
    campaign = Campaign(moved, searcher, options, start=start, rng=coins)
    campaign.refutes = refutes
    driver = CampaignDriver(campaign, poll_s=poll_s, begin_s=begin_s)
    run = run_once(replace(job, weights=start, keep_requests=True), controllers=(*controllers, driver))
    final = {**driver.campaign.start, **driver.campaign.incumbent}
    return CampaignRun(
        generations=driver.generations,
        weights=final,
        row=replace(run.row, weights=final),
        records=run.requests or (),
        stopped=driver.stopped,
        rollbacks=driver.rollbacks,
        candidate_blocks=driver.candidate_blocks,
    )
