"""`gorgo laboratory`: every run that the targets need, and the verdicts.

Owns the order of things and the folder:

    OUT/runs/KEY.json     a row per run, kept: what is there is not run again (`key` says what makes two runs the same)
    OUT/results.json      the rows of this table, for `gorgo report` and others
    OUT/laboratory.md     the table
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from gorgo.apps.laboratory.kept import Kept, KeptRun
from gorgo.apps.laboratory.key import run_key
from gorgo.apps.laboratory.plan import Plan
from gorgo.apps.laboratory.setting import Bench
from gorgo.apps.laboratory.target import Rows, Target, Verdict, judge
from gorgo.apps.results import write_results
from gorgo.apps.simulate import run_many
from gorgo.apps.simulate.progress import shown_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Laboratory:
    """What is asked for.

    Parameters
    ----------
    targets, seeds, bench:
        Each target on each of the seeds.
    out:
        Folder for the files; None: nothing is written, nothing is found again.
    n_jobs:
        Runs at a time; -1 is one per core.
    show_progress:
        On stderr.
    """

    targets: Sequence[Target]
    bench: Bench
    seeds: Sequence[int] = range(10)
    out: Path | None = None
    n_jobs: int = -1
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """What came out: a verdict per target, the rows, and what it took.

    `cpu_s` is of all runs, those that were kept from before included; `wall_s` of this time alone, which made `made` of
    them.
    """

    verdicts: Sequence[Verdict]
    rows: Rows
    runs: int
    made: int
    cpu_s: float
    wall_s: float


class Session:
    """One table in the making: what is to be run is known before anything runs.

    Raises what a job raises: `TraceError`, `ConfigError`, `ScenarioError`, and `ReportError` for a damaged kept run.
    """

    def __init__(self, asked: Laboratory) -> None:
        self._asked = asked
        self._kept = Kept(None if asked.out is None else asked.out / "runs")
        self.plan = Plan.of(asked.targets, asked.seeds, asked.bench)
        #: Those that were not made before.
        self.missing = [job for key, job in self.plan.jobs.items() if self._kept.find(key) is None]

    def run(self) -> Findings:
        """Runs what is missing, writes the files, and judges."""
        begun_s = monotonic()
        self._run_missing()
        rows = self.plan.rows(self._kept.find)
        runs = [run for key in self.plan.jobs if (run := self._kept.find(key)) is not None]
        if self._asked.out is not None:
            write_results(self._asked.out, [run.row for run in runs])
        return Findings(
            verdicts=[judge(target, rows) for target in self._asked.targets],
            rows=rows,
            runs=len(runs),
            made=len(self.missing),
            cpu_s=sum(run.cpu_s or 0.0 for run in runs),
            wall_s=monotonic() - begun_s,
        )

    def _run_missing(self) -> None:
        shown = self._asked.show_progress and self.missing
        with shown_progress(len(self.missing)) if shown else nullcontext(None) as progress:
            for run in run_many(self.missing, n_jobs=self._asked.n_jobs, progress=progress):
                self._kept.keep(run_key(run.job), KeptRun(run.row, run.cpu_s))
