"""Claims and their check: tasks, a cache of their runs, verdicts, and every claim about the policies."""

from gorgo.apps.claims.policy_claims import ClaimCheck, ClaimOptions, Findings
from gorgo.apps.claims.target import RatioTarget, judge
from gorgo.apps.claims.targets import all_targets, groups
from gorgo.apps.claims.workload import Conditions, Workload

__all__ = [
    "ClaimCheck",
    "ClaimOptions",
    "Conditions",
    "Findings",
    "RatioTarget",
    "Workload",
    "all_targets",
    "groups",
    "judge",
]
