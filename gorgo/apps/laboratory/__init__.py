"""Everything that the comparison of policies claims, as one table: each target, what came out, whether it is met."""

from gorgo.apps.laboratory.command import Findings, Laboratory, Session
from gorgo.apps.laboratory.plan import estimated_cpu_s
from gorgo.apps.laboratory.setting import Bench, Setting
from gorgo.apps.laboratory.show import as_markdown, show_findings
from gorgo.apps.laboratory.target import Target, Verdict, judge
from gorgo.apps.laboratory.targets import all_targets, groups

__all__ = [
    "Bench",
    "Findings",
    "Laboratory",
    "Session",
    "Setting",
    "Target",
    "Verdict",
    "all_targets",
    "as_markdown",
    "estimated_cpu_s",
    "groups",
    "judge",
    "show_findings",
]
