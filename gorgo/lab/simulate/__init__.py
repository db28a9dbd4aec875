"""Policies side by side in virtual time: runs, many of them, and their comparison."""

from gorgo.lab.simulate.job import BASELINES, FLOOR, ORACLE, PINNED, SimJob, SimulatedRun
from gorgo.lab.simulate.run import run_many, run_once
from gorgo.lab.simulate.simulate import DEFAULT_POLICIES, SimulateOptions, jobs_of, simulate_command

__all__ = [
    "BASELINES",
    "DEFAULT_POLICIES",
    "FLOOR",
    "ORACLE",
    "PINNED",
    "SimJob",
    "SimulateOptions",
    "SimulatedRun",
    "jobs_of",
    "run_many",
    "run_once",
    "simulate_command",
]
