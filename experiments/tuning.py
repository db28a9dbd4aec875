"""A measurement of the tuner: a policy on ART-Chat-like windows, with fixed weights, a campaign, or a search.

Theory of operation of the traffic: one window is half an hour, which holds seven pairs of a switchback's blocks at
most. A longer run is several windows of the same shape, each drawn with its own seed; the hashes of each are its own,
so that no prompt of one is found in a cache that another has filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import thread_time
from typing import Any, ClassVar

import tuner.campaign
import tuner.objective
import tuner.offline
import tuner.optimizers
import tuner.space
from experiments import fleets, traffic
from experiments.fleets import unknown_paper_fleet
from experiments.runner import run_key
from experiments.traffic import marked
from gorgo.core.limits import RouterLimits
from gorgo.core.router import Router
from gorgo.core.training.learning import RecordedOutcome
from gorgo.lab import whatif
from gorgo.lab.datasets import load_requests
from gorgo.lab.decisions import MAX_DECISIONS, LoggedDecision, decision_of
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import QWEN_L40S, find_fleet
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.job import STEADY
from gorgo.lab.traces import TraceFilters
from gorgo.lab.whatif import MOST_DECISIONS, LogFilter
from gorgo.policies.registry import make_policy
from tuner.campaign.options import CampaignOptions
from tuner.offline.search import RunScore, ScoredWeights, SearchOptions, decide, score_of, search_weights
from tuner.offline.simulated_campaign import simulate_campaign

#: The paper drops longer prompts and caps answers; nearly all end at the cap.
MAX_INPUT, MAX_OUTPUT = 24_000, 128
#: Seeds of windows that follow one another in a run are this far apart: no two runs share one.
STRIDE = 1000
#: Between two windows, s: about the time between two requests.
PAUSE_S = 0.5
#: What a run's figures depend on beside the simulator.
_CODE = (
    *(Path(module.__file__ or "").parent for module in (tuner.campaign, tuner.offline, tuner.optimizers)),
    *(Path(module.__file__ or "") for module in (tuner.objective, tuner.space, fleets, traffic)),
    Path(whatif.__file__ or ""), Path(__file__),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows end to end."""

    shapes: tuple[str, ...]  #: By name, in their order.
    draw: int  #: Seed of the first; the next ones' follow from it.
    time_scale: float = 1.0  #: 2.0 is half the load.
    limit: int | None = None  #: The first so many requests of each; None: all.

    def feed(self) -> Sequence[SimRequest]:
        return _feed(self.shapes, self.draw, self.limit)


@lru_cache(maxsize=3)
def _feed(shapes: tuple[str, ...], draw: int, limit: int | None) -> Sequence[SimRequest]:
    filters = TraceFilters(max_input=MAX_INPUT, max_output=MAX_OUTPUT, min_output=MAX_OUTPUT, limit=limit)
    feeds = [feed_of(load_requests(shape, filters, seed=draw + STRIDE * number)) for number, shape in enumerate(shapes)]
    return tuple(_joined(feeds))


def _joined(feeds: Sequence[Sequence[SimRequest]]) -> Iterator[SimRequest]:
    """Yield the feeds one after the other; each has its own users and prompts."""
    offset_s, index = 0.0, 0
    for number, feed in enumerate(feeds):
        salt = (number * 0x9E3779B97F4A7C15) % 2**64
        for request in feed:
            yield replace(
                request, index=index, arrival_s=offset_s + request.arrival_s, blocks=marked(request.blocks, salt),
                prefix_hash=request.prefix_hash ^ salt,
            )  # fmt: skip
            index += 1
        offset_s += feed[-1].arrival_s + PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Sizes of a search, as in `SearchOptions`."""

    candidates: int
    seeds: int
    held_out_seeds: int
    optimizer: str = SearchOptions().optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRun:
    """Figures of a run, and the tuner's doing.

    Of a search, `whole` are the start's held-out figures, and `tail` those of the weights that are taken.
    """

    whole: RunScore  #: Of all requests.
    tail: RunScore  #: Of those from `TuningTask.after` on.
    weights: Mapping[str, float]
    generations: int = 0
    accepted: int = 0
    rollbacks: int = 0
    candidate_blocks: int = 0  #: A campaign's blocks in which a candidate was in force.
    #: When a campaign took its first weights, s of the run; None if it took none.
    first_accepted_s: float | None = None
    reasons: tuple[str, ...] = ()
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """What to run."""

    windows: Windows
    policy: str
    fleet: str | None = None  #: A named one, of which the Router knows the speed; None: the paper's, of which not.
    scenario: str = STEADY  #: By name; changes the fleet or what the Router knows of it.
    weights: tuple[tuple[str, float], ...] = ()  #: Start weights by name; empty is the policy's defaults.
    seed: int = 0  #: Of the network and of the tuner's chance. The same for runs that are compared.
    campaign: tuple[tuple[str, Any], ...] | None = None  #: Options by name; None: the weights stay as they are.
    optimizer: str | None = None  #: In the place of the mode's.
    search: Search | None = None  #: Search the windows offline instead of serving them.
    tune_lambda: bool = False  #: As in `tuned_box`, and the box as (name, low, high).
    box: tuple[tuple[str, float, float], ...] = ()
    after: int = 0  #: Figures of `tail` are over requests from this one on.
    begin_s: float = 0.0  #: Of the campaign, s of the run; `tail` begins with it, too.
    filtered: bool = False  #: Whether a log of the run's own decisions is the campaign's first filter.
    explore: float = 0.0  #: Share of requests that go to any replica by chance.
    kind: ClassVar[type[TuningRun]] = TuningRun

    def key(self) -> str:
        return run_key(self.policy, self.windows.shapes, [self], code=_CODE)

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        return {name: (low, high) for name, low, high in self.box}

    def run(self) -> TuningRun:
        started_s = thread_time()
        paper = unknown_paper_fleet(find_profile(QWEN_L40S))
        job = SimJob(
            trace=" + ".join(self.windows.shapes), feed=self.windows.feed(), policy=self.policy,
            weights=dict(self.weights) or None, fleet=paper if self.fleet is None else find_fleet(self.fleet),
            time_scale=self.windows.time_scale, scenario=self.scenario, seed=self.seed, keep_requests=True,
            limits=RouterLimits(explore=self.explore) if self.explore else None,
        )  # fmt: skip
        if self.search is not None:
            outcome = _searched(self, self.search, replace(job, seed=0, keep_requests=False))
        elif self.campaign is not None:
            outcome = _tuned(self, dict(self.campaign), job)
        else:
            run = run_once(job)
            whole, tail = _parts(run.requests or (), self.after)
            outcome = TuningRun(whole=whole, tail=tail, weights=run.row.weights or {})
        return replace(outcome, cpu_s=thread_time() - started_s)


class DecisionCollector:
    """A controller of a simulation that collects the newest decisions of its Router, as many as a log is read."""

    def __init__(self, most: int = MAX_DECISIONS) -> None:
        self.decisions: deque[LoggedDecision] = deque(maxlen=most)
        self._next_s: float | None = 0.0

    @property
    def next_s(self) -> float | None:
        """Return when it begins to collect; None afterwards."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:  # noqa: ARG002 - a controller's signature
        router.settings.record_outcomes(self)
        self._next_s = None

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        decision = decision_of(outcome)
        if decision is not None:
            self.decisions.append(decision)


def _tuned(task: TuningTask, options: Mapping[str, Any], job: SimJob) -> TuningRun:
    log = DecisionCollector(MOST_DECISIONS)
    refutes = LogFilter(lambda: tuple(log.decisions), make_policy(task.policy)) if task.filtered else None
    tuned = simulate_campaign(
        job, CampaignOptions(**options), optimizer=task.optimizer, seed=task.seed, tune_lambda=task.tune_lambda,
        box=task.bounds, begin_s=task.begin_s, refutes=refutes, controllers=(log,) if task.filtered else (),
    )  # fmt: skip
    before = sum(one.scheduled_s < task.begin_s for one in tuned.records)
    whole, tail = _parts(tuned.records, max(task.after, before))
    accepted = [row for row in tuned.generations[1:] if row.accepted]
    return TuningRun(
        whole=whole, tail=tail, weights=tuned.weights, generations=len(tuned.generations), accepted=len(accepted),
        first_accepted_s=accepted[0].finished_s if accepted else None, rollbacks=tuned.rollbacks,
        candidate_blocks=tuned.candidate_blocks, reasons=tuple(row.reason for row in tuned.generations),
    )  # fmt: skip


def _searched(task: TuningTask, sizes: Search, job: SimJob) -> TuningRun:
    options = SearchOptions(**asdict(sizes), seed=task.seed, tune_lambda=task.tune_lambda, box=task.bounds)
    search = search_weights(job, options)
    result = decide(job, search, options)
    return TuningRun(
        whole=_held_out(result.before), tail=_held_out(result.after), weights=result.weights,
        generations=len(search.rows), accepted=int(result.moved), reasons=(result.reason,),
    )  # fmt: skip


def _held_out(found: ScoredWeights) -> RunScore:
    n = sum(score.n for score in found.scores)
    return RunScore(
        n=n, errors=found.errors, ttft_ms_p95=found.ttft_ms, e2e_s_p95=found.e2e_s, max_share=found.max_share
    )


def _parts(records: Sequence[SimRecord], after: int) -> tuple[RunScore, RunScore]:
    return score_of(records), score_of(records[after:])
