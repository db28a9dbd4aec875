"""`gorgo claims`: every run that the targets need, their verdicts, and the files.

OUT/runs/KEY.json     one run, see `run_cache`
OUT/results.json      the rows of this table, for `gorgo report`
OUT/claims.md         the table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.table import TableSection, sections
from gorgo.apps.claims.target import RatioTarget, Rows, judge
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.claims.workload import Conditions, PolicyRun, PolicyTask, Workload
from gorgo.apps.results import ResultRow, write_results
from gorgo.apps.simulate import ORACLE, SimJob
from gorgo.apps.simulate.compare import mean_row

#: Processor time of a run of 7,000 requests on a virtual core of 2.x GHz, s.
RUN_CPU_S, ORACLE_CPU_S = 3.3, 6.0
#: By group of targets.
TITLES = {
    "baselines": "Against the best of the paper's four baselines",
    "published": "Against the published policy",
    "oracle": "Against the same rule with full knowledge (`oracle`)",
    "scenarios": "When something goes wrong or is different",
    "wildchat": "Short prompts, little reuse, no queues",
    "priors": "Told the wrong speed, 3x either way, against itself told the right one",
    "paper": "The published claim: p95 TTFT over the best baseline on held-out windows",
    "learned": "The same with the weights that the authors learned (w_rtt 0.276, w_queue 0.5), frozen",
    "engines": "Every shape on two schedulers, with full and partial hits: against the better of all others",
    "partial-hits": "Engines that find part of each cached prefix, against the published policy",
    "tail": "Short prompts at the trace's own load: the tail that the stall of others costs",
    "residual": "`gorgo-residual`, which learns within the run, against `gorgo-ms`",
}
HEADER = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
MEANS_HEADER = ("on", "policy", "TTFT p50 ms", "p95", "E2E p50 s", "p95", "hit %")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOptions:
    """What is checked.

    Parameters
    ----------
    targets, seeds, conditions:
        Each target on each of the seeds.
    out:
        Folder for the files; None: nothing is written, no earlier run is found.
    n_jobs, show_progress:
        As in `Runner`.
    """

    targets: Sequence[RatioTarget]
    conditions: Conditions
    seeds: Sequence[int] = range(10)
    out: Path | None = None
    n_jobs: int = -1
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """A verdict per target, the rows behind them, and the effort.

    `cpu_s` is of all `runs`; `wall_s` is of this call, which made `made` of them.
    """

    verdicts: Sequence[ClaimVerdict]
    rows: Rows
    runs: int
    made: int
    cpu_s: float
    wall_s: float

    def sections(self) -> list[TableSection]:
        """Return the tables: verdicts by group, then means of every policy on every workload."""
        return [*sections(self.verdicts, HEADER, TITLES), TableSection("", MEANS_HEADER, mean_cells(self.rows))]

    def failing(self) -> list[str]:
        """Return the policies with failed requests, by name."""
        return sorted({policy for (_, policy), runs in self.rows.items() if any(row.errors for row in runs.values())})

    def summary(self) -> str:
        """Return counts and times in a line."""
        met = sum(bool(verdict.met) for verdict in self.verdicts)
        return (
            f"{met} of {len(self.verdicts)} targets met, all simulated; {self.runs} runs, {self.cpu_s:.0f} s "
            f"of processor time; {self.made} of them were made now, in {self.wall_s:.0f} s."
        )


class ClaimCheck:
    """One check; what it will run is known before anything runs.

    Raises what a job raises: `TraceError`, `ConfigError`, `ScenarioError`; and `ReportError` for a damaged run.
    """

    def __init__(self, options: ClaimOptions) -> None:
        self._options = options
        self._tasks = list(dict.fromkeys(task for target in options.targets for task in target.tasks(options.seeds)))
        conditions = options.conditions
        cache = RunCache(None if options.out is None else options.out / "runs", PolicyRun)
        self._runner: Runner[PolicyTask, PolicyRun] = Runner(
            conditions.run, conditions.key, cache, n_jobs=options.n_jobs, show_progress=options.show_progress
        )
        #: Every run, and those that were not made before.
        self.tasks = list(self._runner.by_key(self._tasks).values())
        self.missing = list(self._runner.missing(self._tasks).values())

    def run(self) -> Findings:
        """Run what is missing, write results.json, and judge."""
        started_s = monotonic()
        # Runs that share a trace follow one another: each process keeps the feed that it used last.
        ordered = sorted(self._tasks, key=lambda task: (task.trace, task.seed, task.workload.time_scale))
        runs = self._runner.runs(ordered, title="claims")
        rows: dict[tuple[Workload, str], dict[int, ResultRow]] = {}
        for task in self._tasks:
            rows.setdefault((task.workload, task.policy), {})[task.seed] = runs[task].row
        unique = [runs[task] for task in self.tasks]
        if self._options.out is not None:
            write_results(self._options.out, [run.row for run in unique])
        return Findings(
            verdicts=[judge(target, rows) for target in self._options.targets],
            rows=rows,
            runs=len(unique),
            made=len(self.missing),
            cpu_s=sum(run.cpu_s or 0.0 for run in unique),
            wall_s=monotonic() - started_s,
        )

    def estimated_cpu_s(self) -> float:
        """Return about how long the missing runs will take, s of processor time."""
        return sum(_cpu_s(self._options.conditions.job(task)) for task in self.missing)


def mean_cells(rows: Rows) -> list[tuple[str, ...]]:
    """Return means over seeds of every policy, workload by workload."""
    means = {(on.label, policy): mean_row(list(by_seed.values())) for (on, policy), by_seed in rows.items() if by_seed}
    labels = list(dict.fromkeys(label for label, _ in means))
    return [
        (
            *place,
            _cell(mean.ttft_ms.p50, ".0f"),
            _cell(mean.ttft_ms.p95, ".0f"),
            _cell(mean.e2e_s.p50, ".2f"),
            _cell(mean.e2e_s.p95, ".2f"),
            _cell(None if mean.cache_hit is None else 100 * mean.cache_hit, ".1f"),
        )
        for place, mean in sorted(means.items(), key=lambda item: (labels.index(item[0][0]), item[0][1]))
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cpu_s(job: SimJob) -> float:
    """In proportion to the requests, as far as their number is known."""
    whole_s = ORACLE_CPU_S if job.policy == ORACLE else RUN_CPU_S
    limit = job.filters.limit
    return whole_s if limit is None else whole_s * min(1.0, limit / 7_000)
