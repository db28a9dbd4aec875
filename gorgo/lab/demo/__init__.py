"""`gorgo demo`: three simulated regions, the proxy, a trace, and policies in turn."""

from gorgo.lab.demo.options import DEFAULT_POLICIES, TUNED_POLICIES, DemoOptions
from gorgo.lab.demo.run import run_demo, show_demo

__all__ = ["DEFAULT_POLICIES", "TUNED_POLICIES", "DemoOptions", "run_demo", "show_demo"]
