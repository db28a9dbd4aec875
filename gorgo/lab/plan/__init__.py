"""`gorgo plan`: the cheapest fleet that serves a demand within its objectives, searched in virtual time."""

from gorgo.lab.plan.plan import Plan, PlanOptions, make_plan, write_plan
from gorgo.lab.plan.settings import PlanSettings, read_settings

__all__ = ["Plan", "PlanOptions", "PlanSettings", "make_plan", "read_settings", "write_plan"]
