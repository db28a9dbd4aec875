"""Which runs a list of targets needs: each once, however many targets look at it.

Owns the runs and the lookup from setting, policy and seed to a run. Two settings of different names can need the same
run (a held-out window is also one of three days); the key says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gorgo.apps.laboratory.kept import KeptRun
from gorgo.apps.laboratory.key import run_key
from gorgo.apps.laboratory.setting import Bench, Setting
from gorgo.apps.laboratory.target import Rows, Target
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate import ORACLE, SimJob

#: Processor's time of a run of 7,000 requests where none was measured yet, s: on two virtual cores of 2.x GHz.
RUN_CPU_S, ORACLE_CPU_S = 3.3, 6.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Jobs by key, in the order of the table, and where each is looked at."""

    jobs: Mapping[str, SimJob]
    places: Mapping[tuple[Setting, str, int], str]

    @classmethod
    def of(cls, targets: Sequence[Target], seeds: Sequence[int], bench: Bench) -> Plan:
        wanted = dict.fromkeys(run for target in targets for run in target.runs())
        jobs: dict[str, SimJob] = {}
        places: dict[tuple[Setting, str, int], str] = {}
        for setting, policy in wanted:
            for seed in seeds:
                job = bench.job(setting, policy, seed)
                key = run_key(job)
                jobs.setdefault(key, job)
                places[setting, policy, seed] = key
        return cls(jobs, places)

    def rows(self, find: Callable[[str], KeptRun | None]) -> Rows:
        """What has been run, as targets look at it."""
        rows: dict[tuple[Setting, str], dict[int, ResultRow]] = {}
        for (setting, policy, seed), key in self.places.items():
            run = find(key)
            if run is not None:
                rows.setdefault((setting, policy), {})[seed] = run.row
        return rows


def estimated_cpu_s(jobs: Sequence[SimJob]) -> float:
    """About what they will take, by what runs of 7,000 requests take; a tenth of the requests a tenth of it."""
    return sum(_cpu_s(job) for job in jobs)


def _cpu_s(job: SimJob) -> float:
    whole_s = ORACLE_CPU_S if job.policy == ORACLE else RUN_CPU_S
    limit = job.filters.limit
    return whole_s if limit is None else whole_s * min(1.0, limit / 7_000)
