"""`gorgo simulate`: every policy at every load and seed, and the files that it leaves.

Owns the list of runs and the folder:

    OUT/results.json                         a row per run
    OUT/POLICY/xSCALE-seedSEED/              one run: its row in results.json, its requests in requests.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from gorgo.apps.demo.options import PUBLISHED
from gorgo.apps.progress import shown_progress
from gorgo.apps.results import ResultRow, load_text, write_results
from gorgo.apps.session_keys import warning
from gorgo.apps.simulate.job import BASELINES, FLOOR, ORACLE, STEADY, SimJob, SimulatedRun
from gorgo.apps.simulate.run import policy_of, run_many
from gorgo.apps.traces import TraceFilters
from gorgo.config.atomic import create_text_file
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import make_shadow
from gorgo.sim.faults.scenarios import find_scenario
from gorgo.sim.fleet import SimFleet
from gorgo.sim.routers.group import ONE_ROUTER, RouterGroup

#: This project's, the published one, the paper's four baselines, and chance.
DEFAULT_POLICIES = ("gorgo-ms", *PUBLISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of a comparison: of a grid of `SimJob`, one per policy, load and seed.

    Parameters
    ----------
    trace, filters, fleet, limits, scenario, probe_interval_s, scrape_interval_s, shadow, routers:
        As in `SimJob`.
    policies:
        In the order of the table; oracle and floor come behind them.
    weights:
        Per policy; others run with their defaults.
    time_scales, seeds:
        Each policy runs at each of them.
    out:
        Folder for the files; None: nothing is written.
    n_jobs:
        As in `run_many`.
    show_progress:
        Progress on stderr.
    """

    trace: str
    fleet: SimFleet
    filters: TraceFilters = field(default_factory=TraceFilters)
    policies: Sequence[str] = DEFAULT_POLICIES
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    time_scales: Sequence[float] = (1.0,)
    seeds: Sequence[int] = (0,)
    scenario: str = STEADY
    limits: RouterLimits | None = None
    probe_interval_s: float = 30.0
    scrape_interval_s: float = 30.0
    shadow: str | None = None
    routers: RouterGroup = ONE_ROUTER
    out: Path | None = None
    n_jobs: int = -1
    show_progress: bool = True

    @property
    def names(self) -> Sequence[str]:
        """All rows of a block, each once."""
        return tuple(dict.fromkeys((*self.policies, ORACLE, FLOOR)))


def simulate_command(options: SimulateOptions, *, warn: Callable[[str], None]) -> list[ResultRow]:
    """Run all jobs and write the files of `out`; return a row per run, in the order of scale, policy and seed.

    `warn` gets sentences about the trace.

    Raises `UnknownPolicy`, `UnknownScenario`, `WeightsError` or `TraceError`, if possible before the first run.
    """
    _check(options)
    jobs = jobs_of(options)
    rows: dict[tuple[float, str, int], ResultRow] = {}
    warned: dict[str, str | None] = {}
    shown = shown_progress("simulate", len(jobs)) if options.show_progress else nullcontext(None)
    with shown as advance:
        for run in run_many(jobs, n_jobs=options.n_jobs):
            rows[_place(run.job)] = run.row
            warned.setdefault(run.job.policy, warning(run.job.policy, run.key_share))
            if advance is not None:
                advance(f"{run.job.policy}, {load_text(run.job.time_scale)}, seed {run.job.seed}")
            if options.out is not None:
                _write_run(options.out, run)
    for text in filter(None, warned.values()):
        warn(text)
    ordered = [rows[_place(job)] for job in jobs]
    if options.out is not None:
        write_results(options.out, ordered)
    return ordered


def jobs_of(options: SimulateOptions) -> list[SimJob]:
    """A job per row."""
    return list(_jobs(options))


def _jobs(options: SimulateOptions) -> Iterator[SimJob]:
    for time_scale in dict.fromkeys(options.time_scales):
        for policy in options.names:
            for seed in options.seeds:
                yield SimJob(
                    trace=options.trace,
                    policy=policy,
                    fleet=options.fleet,
                    filters=options.filters,
                    time_scale=time_scale,
                    weights=options.weights.get(policy),
                    seed=seed,
                    scenario=options.scenario,
                    limits=options.limits,
                    probe_interval_s=options.probe_interval_s,
                    scrape_interval_s=options.scrape_interval_s,
                    routers=options.routers,
                    shadow=None if policy in BASELINES else options.shadow,
                    keep_requests=options.out is not None,
                )


def _check(options: SimulateOptions) -> None:
    """Raise for a wrong name or weight before the first run."""
    find_scenario(options.scenario).fleet(options.fleet)
    for name in options.names:
        if name != FLOOR:
            Weights.of(policy_of(name).weight_specs, options.weights.get(name), version=1, allow_out_of_range=True)
    for name in options.policies:
        if name not in BASELINES:
            make_shadow(options.shadow, policy_of(name))


def _place(job: SimJob) -> tuple[float, str, int]:
    return job.time_scale, job.policy, job.seed


def _write_run(out: Path, run: SimulatedRun) -> None:
    """One run's own folder, in the form of a live replay's."""
    folder = out / run.job.policy / f"load-{1 / run.job.time_scale:g}-seed-{run.job.seed}"
    write_results(folder, [run.row])
    with create_text_file(folder / "requests.jsonl") as file:
        for record in run.requests or ():
            print(json.dumps(record.as_json()), file=file)
