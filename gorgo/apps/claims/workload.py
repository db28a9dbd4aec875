"""What a target is measured on: a workload, the conditions that all runs share, and a run.

The list of workloads is in `targets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.demo.options import PAPER
from gorgo.apps.results import ResultRow, load_text
from gorgo.apps.simulate import SimJob, run_once
from gorgo.apps.simulate.job import STEADY
from gorgo.apps.traces import TraceFilters
from gorgo.core.limits import RouterLimits
from gorgo.sim.fleet import SimFleet
from gorgo.sim.named_fleets import find_fleet

#: `gorgo` with the weights that the paper's authors learned on April 5, frozen.
LEARNED = "gorgo (0.276, 0.5)"
#: Policies with other weights than their defaults, by their name in the tables.
WEIGHTED: Mapping[str, tuple[str, Mapping[str, float]]] = {LEARNED: (PAPER, {"w_rtt": 0.276, "w_queue": 0.5})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests at a load.

    Parameters
    ----------
    name:
        Shown in tables, without the load.
    traces:
        Files, or names of data sets or shapes. Seed s takes number s modulo their count; a shape is drawn with s.
    filters:
        Which of their requests run.
    time_scale:
        2.0 is half the load.
    scenario:
        Faults and other deviations.
    fleet:
        Name of a fleet; None: that of the conditions.
    block_tokens:
        As in `SimJob`.
    seeds:
        Of the seeds of a check only the first so many; None: all.

    Example
    -------
    >>> window = Workload(name="windows", traces=("one", "two"), time_scale=2.0)
    >>> window.label, PolicyTask(window, "random", 3).trace
    ('windows, load 0.5', 'two')
    """

    name: str
    traces: Sequence[str]
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    scenario: str = STEADY
    fleet: str | None = None
    block_tokens: int | None = None
    seeds: int | None = None

    @property
    def label(self) -> str:
        """Return the name with the load, the named fleet and, unless steady, the scenario."""
        parts = [self.name, load_text(self.time_scale), *([] if self.fleet is None else [self.fleet])]
        return ", ".join(parts if self.scenario == STEADY else [*parts, self.scenario])

    def at(self, time_scale: float) -> Workload:
        """Return the same at another load."""
        return replace(self, time_scale=time_scale)

    def under(self, scenario: str) -> Workload:
        """Return the same under a scenario."""
        return replace(self, scenario=scenario)

    def on(self, fleet: str) -> Workload:
        """Return the same on a named fleet."""
        return replace(self, fleet=fleet)


@dataclass(frozen=True, slots=True)
class PolicyTask:
    """One policy on one workload; `policy` may be a key of `WEIGHTED`."""

    workload: Workload
    policy: str
    seed: int

    @property
    def trace(self) -> str:
        return self.workload.traces[self.seed % len(self.workload.traces)]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A result row, and the processor time of its run, s."""

    row: ResultRow
    cpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all runs share: fleet, limits and intervals.

    Parameters
    ----------
    fleet:
        Of workloads without a named one. With accurate priors of its engines; a scenario may change them.
    limits, probe_interval_s, scrape_interval_s:
        As in `SimJob`.
    first_requests:
        Of each workload only so many; None: all.
    """

    fleet: SimFleet
    limits: RouterLimits | None = None
    probe_interval_s: float = 30.0
    scrape_interval_s: float = 30.0
    first_requests: int | None = None

    def job(self, task: PolicyTask) -> SimJob:
        """Return the job of a run, the policy with its default weights or those of `WEIGHTED`."""
        workload = task.workload
        policy, weights = WEIGHTED.get(task.policy, (task.policy, None))
        return SimJob(
            trace=task.trace,
            policy=policy,
            weights=weights,
            fleet=self.fleet if workload.fleet is None else find_fleet(workload.fleet),
            filters=self._filters(workload),
            time_scale=workload.time_scale,
            seed=task.seed,
            scenario=workload.scenario,
            limits=self.limits,
            probe_interval_s=self.probe_interval_s,
            scrape_interval_s=self.scrape_interval_s,
            block_tokens=workload.block_tokens,
        )

    def key(self, task: PolicyTask) -> str:
        """Return the key of the task's run; workloads of two names can be one run."""
        return job_key(self.job(task))

    def run(self, task: PolicyTask) -> PolicyRun:
        """Run the task in this process."""
        run = run_once(self.job(task))
        return PolicyRun(run.row, run.cpu_s)

    def _filters(self, workload: Workload) -> TraceFilters:
        limits = [limit for limit in (workload.filters.limit, self.first_requests) if limit is not None]
        return replace(workload.filters, limit=min(limits, default=None))


def job_key(job: SimJob) -> str:
    """Return the key of a job; raises `UnknownPolicy`."""
    return run_key(job.policy, [job.trace], [replace(job, trace="")])
