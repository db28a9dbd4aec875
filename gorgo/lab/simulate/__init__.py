"""Policies side by side in virtual time: runs, many of them, and their comparison.

Programs and notebooks begin with `run_policies` and `data_frame`.
"""

from gorgo.lab.simulate.job import BASELINES, FLOOR, ORACLE, PINNED, SimJob, SimulatedRun
from gorgo.lab.simulate.run import run_many, run_once
from gorgo.lab.simulate.simulate import (
    DEFAULT_POLICIES,
    SimulateOptions,
    data_frame,
    flat_rows,
    jobs_of,
    run_policies,
    simulate_command,
    simulate_options,
)

__all__ = [
    "BASELINES",
    "DEFAULT_POLICIES",
    "FLOOR",
    "ORACLE",
    "PINNED",
    "SimJob",
    "SimulateOptions",
    "SimulatedRun",
    "data_frame",
    "flat_rows",
    "jobs_of",
    "run_many",
    "run_once",
    "run_policies",
    "simulate_command",
    "simulate_options",
]
