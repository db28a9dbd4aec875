"""How many intervals of `gorgo whatif` cover the truth in simulation, where queues and caches are those of earlier
decisions. `python -m tests.bench.whatif_coverage` prints the rows of a hundred logs as JSON.

The truth is the mean outcome of what the other weights decided, over all runs, less that of the logs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np

from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.learning import RecordedOutcome
from gorgo.lab.datasets import load_requests
from gorgo.lab.decisions import LoggedDecision, decision_of
from gorgo.lab.sim.fleet import find_fleet
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from gorgo.lab.whatif import EstimatedChange, Estimator, JudgedLog
from gorgo.policies.gorgo import Gorgo
from gorgo.policies.registry import make_policy

#: Logs with support, of each kind; and how many are simulated for them at most.
RUNS, MOST_RUNS = 100, 150
#: A request of so many is decided by each of the other weight sets: those say what is true, and are in no log.
SPOTS = 20
OTHERS: tuple[Mapping[str, float], ...] = ({"w_rtt": 3.98}, {"w_queue": 0.398})


def spot_of(request_id: str) -> int:
    """Return which of so many a request is, by a hash: the one before it is any other."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=4).digest(), "little") % SPOTS


class Spotted:
    """The log's policy, which leaves single decisions, whatever they are, to other weights.

    It has a policy and is none by inheritance, so that it runs on compiled modules too.
    """

    def __init__(self) -> None:
        self._gorgo = Gorgo()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._gorgo, name)

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        spot = spot_of(request.request_id)
        chosen = Weights.of(self._gorgo.weight_specs, OTHERS[spot]) if spot < len(OTHERS) else weights
        return self._gorgo.choose(request, candidates, chosen, rng)


@dataclass
class Spots:
    """Collects the decisions of the log, and those of the other weights that were not made by chance."""

    log: list[LoggedDecision] = field(default_factory=list)
    others: list[list[LoggedDecision]] = field(default_factory=lambda: [[] for _ in OTHERS])
    next_s: float | None = 0.0

    def act(self, router: Router, now: float) -> None:
        router.settings.record_outcomes(self)
        self.next_s = None

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        decision, spot = decision_of(outcome), spot_of(outcome.decision.request_id)
        assert decision is not None
        if spot >= len(OTHERS):
            self.log.append(decision)
        elif outcome.decision.fallback is None:
            self.others[spot].append(decision)


def simulated(seed: int) -> Spots:
    """Twelve minutes of a fleet, of which a tenth is by chance."""
    feed = feed_of(load_requests("short-chat", TraceFilters(limit=4500, max_output=128), seed=seed))
    job = SimJob(
        trace="short-chat",
        feed=tuple(feed),
        policy="gorgo",
        fleet=find_fleet("small-model"),
        time_scale=2.0,
        seed=seed,
        limits=RouterLimits(explore=0.1),
    )
    spots = Spots()
    run_once(job, controllers=(spots,), policy=cast(Policy, Spotted()))
    return spots


def outcomes(decisions: Sequence[LoggedDecision], late_s: float) -> Mapping[str, list[float]]:
    return {
        "late first tokens": [100.0 * (one.ttft_s > late_s) for one in decisions],
        "mean TTFT": [1e3 * one.ttft_s for one in decisions],
        "mean E2E": [1e3 * one.e2e_s for one in decisions],
    }


@dataclass
class Kind:
    """What the logs say of one of the other weight sets, and what its own decisions brought."""

    said: dict[tuple[str, Estimator], list[EstimatedChange]] = field(default_factory=dict)
    made: dict[str, list[float]] = field(default_factory=dict)
    #: Logs with and without support for an estimate, and those that refute the weights.
    judged: int = 0
    unsupported: int = 0
    refuted: int = 0

    def judge(self, log: JudgedLog, weights: Mapping[str, float], made: Sequence[LoggedDecision]) -> None:
        """Add a log, if this kind has not enough of them yet."""
        for name, values in outcomes(made, log.late_s).items():
            self.made.setdefault(name, []).extend(values)
        if self.judged == RUNS:
            return
        found = log.judge(make_policy("gorgo"), weights)
        if not found.support.is_enough:
            self.unsupported += 1
            return
        self.judged += 1
        self.refuted += found.refuted is not None
        for outcome in found.outcomes:
            for estimator, change in outcome.changes.items():
                self.said.setdefault((outcome.name, estimator), []).append(change)


class Row(NamedTuple):
    """What an estimator says of an outcome under some weights: `half` is half the median width of its intervals."""

    weights: Mapping[str, float]
    outcome: str
    estimator: Estimator
    truth: float
    mean: float
    covered: int
    judged: int
    half: float
    refuted: int
    unsupported: int


def coverage() -> list[Row]:
    """Simulate logs until each of the other weight sets has its estimates."""
    kinds = [Kind() for _ in OTHERS]
    logged: dict[str, list[float]] = {}
    seeds = 0
    while min(kind.judged for kind in kinds) < RUNS:
        assert seeds < MOST_RUNS, [kind.judged for kind in kinds]
        spots = simulated(seeds)
        seeds += 1
        log = JudgedLog(spots.log)
        for name, values in outcomes(log.decisions, log.late_s).items():
            logged.setdefault(name, []).extend(values)
        for kind, weights, made in zip(kinds, OTHERS, spots.others, strict=True):
            kind.judge(log, weights, made)
    return [row for kind, weights in zip(kinds, OTHERS, strict=True) for row in _rows(kind, weights, logged)]


def _rows(kind: Kind, weights: Mapping[str, float], logged: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    for (outcome, estimator), said in kind.said.items():
        truth = float(np.mean(kind.made[outcome]) - np.mean(logged[outcome]))
        yield Row(
            weights=weights,
            outcome=outcome,
            estimator=estimator,
            truth=truth,
            mean=float(np.mean([one.change for one in said])),
            covered=sum(one.low <= truth <= one.high for one in said),
            judged=kind.judged,
            half=float(np.median([one.high - one.low for one in said])) / 2,
            refuted=kind.refuted,
            unsupported=kind.unsupported,
        )


if __name__ == "__main__":
    print(json.dumps([row._asdict() for row in coverage()]))
