"""One measurement: a policy on some windows, with fixed weights, a campaign beside it, or a search of the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import thread_time
from typing import Any

from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.simulate import SimJob, run_once
from gorgo.apps.simulate.job import STEADY
from gorgo.core.router import Router
from gorgo.sim.named_fleets import find_fleet
from gorgo.sim.records import SimRecord
from tuner.campaign.options import CampaignOptions
from tuner.experiments.windows import Windows, paper_fleet
from tuner.offline.score import RunScore, score_of
from tuner.offline.search import ScoredWeights, SearchOptions, search_weights
from tuner.offline.simulated_campaign import simulate_campaign
from tuner.offline.verdict import decide

_TUNER = Path(__file__).parents[1]
#: What a run's figures depend on beside the simulator.
_CODE = tuple(
    _TUNER / name
    for name in (
        "campaign",
        "offline",
        "optimizers",
        "objective.py",
        "space.py",
        "experiments/task.py",
        "experiments/windows.py",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Sizes of a search, as in `SearchOptions`."""

    candidates: int
    seeds: int
    held_out_seeds: int
    optimizer: str = SearchOptions().optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to run.

    Parameters
    ----------
    windows:
        Traffic.
    policy, weights:
        Start weights by name; empty is the policy's defaults.
    fleet:
        A named fleet, of which the Router knows the speed; None: the paper's, of which it does not.
    scenario:
        By name; changes the fleet or what the Router knows of it.
    seed:
        Of the network and of the tuner's chance. The same for runs that are compared.
    campaign:
        Options by name; None: the weights stay as they are.
    search:
        Search the windows offline instead of serving them.
    tune_lambda, box:
        As in `tuned_box`, the box as (name, low, high).
    after:
        Figures of `tail` are over requests from this one on.
    later:
        Weights that are set when this many requests have arrived; None: none.
    """

    windows: Windows
    policy: str
    fleet: str | None = None
    scenario: str = STEADY
    weights: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    campaign: tuple[tuple[str, Any], ...] | None = None
    search: Search | None = None
    tune_lambda: bool = False
    box: tuple[tuple[str, float, float], ...] = ()
    after: int = 0
    later: tuple[int, tuple[tuple[str, float], ...]] | None = None

    def key(self) -> str:
        """Return the key of the run: of the task, its shapes and the code."""
        return run_key(self.policy, self.windows.shapes, [self], code=_CODE)

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        return {name: (low, high) for name, low, high in self.box}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """Figures of all requests and of those from `Task.after` on, and the tuner's doing.

    `first_accepted_s` is when a campaign took its first weights, s of the run; None if it took none.
    Of a search, `whole` are the start's held-out figures, and `tail` those of the weights that are taken.
    """

    whole: RunScore
    tail: RunScore
    weights: Mapping[str, float]
    generations: int = 0
    accepted: int = 0
    rollbacks: int = 0
    first_accepted_s: float | None = None
    reasons: tuple[str, ...] = ()
    cpu_s: float = 0.0


def run_task(task: Task) -> TaskRun:
    """Run the task in this process."""
    started_s = thread_time()
    job = SimJob(
        trace=" + ".join(task.windows.shapes),
        feed=task.windows.feed(),
        policy=task.policy,
        weights=dict(task.weights) or None,
        fleet=paper_fleet() if task.fleet is None else find_fleet(task.fleet),
        time_scale=task.windows.time_scale,
        scenario=task.scenario,
        seed=task.seed,
        keep_requests=True,
    )
    if task.search is not None:
        outcome = _search(task, task.search, replace(job, seed=0, keep_requests=False))
    elif task.campaign is not None:
        outcome = _campaign(task, dict(task.campaign), job)
    else:
        run = run_once(job, controllers=_put_later(task))
        whole, tail = _parts(run.requests or (), task.after)
        outcome = TaskRun(whole=whole, tail=tail, weights=run.row.weights or {})
    return replace(outcome, cpu_s=thread_time() - started_s)


def _campaign(task: Task, options: Mapping[str, Any], job: SimJob) -> TaskRun:
    tuned = simulate_campaign(
        job, CampaignOptions(**options), seed=task.seed, tune_lambda=task.tune_lambda, box=task.bounds
    )
    whole, tail = _parts(tuned.records, task.after)
    return TaskRun(
        whole=whole,
        tail=tail,
        weights=tuned.weights,
        generations=len(tuned.generations),
        accepted=sum(row.accepted for row in tuned.generations[1:]),
        first_accepted_s=next((row.finished_s for row in tuned.generations[1:] if row.accepted), None),
        rollbacks=tuned.rollbacks,
        reasons=tuple(row.reason for row in tuned.generations),
    )


def _search(task: Task, sizes: Search, job: SimJob) -> TaskRun:
    options = SearchOptions(**asdict(sizes), seed=task.seed, tune_lambda=task.tune_lambda, box=task.bounds)
    search = search_weights(job, options)
    result = decide(job, search, options)
    return TaskRun(
        whole=_held_out(result.before),
        tail=_held_out(result.after),
        weights=result.weights,
        generations=len(search.rows),
        accepted=int(result.moved),
        reasons=(result.reason,),
    )


def _held_out(found: ScoredWeights) -> RunScore:
    return RunScore(
        n=sum(score.n for score in found.scores),
        errors=found.errors,
        ttft_ms_p95=found.ttft_ms,
        e2e_s_p95=found.e2e_s,
        max_share=found.max_share,
    )


class _PutOnce:
    """A controller of a simulation that sets weights at one time."""

    def __init__(self, at_s: float, weights: Mapping[str, float]) -> None:
        self._next_s: float | None = at_s
        self._weights = weights

    @property
    def next_s(self) -> float | None:
        """Return that time; None once the weights are set."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:
        """Set the weights."""
        specs = router.settings.policy.weight_specs
        router.settings.set_weights(
            router.settings.weights.changed(specs, self._weights, allow_out_of_range=True), now=now
        )
        self._next_s = None


def _put_later(task: Task) -> Sequence[_PutOnce]:
    if task.later is None:
        return ()
    index, weights = task.later
    return (_PutOnce(task.windows.feed()[index].arrival_s * task.windows.time_scale, dict(weights)),)


def _parts(records: Sequence[SimRecord], after: int) -> tuple[RunScore, RunScore]:
    return score_of(records), score_of(records[after:])
