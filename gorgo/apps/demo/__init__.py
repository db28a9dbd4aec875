"""`gorgo demo`: three simulated regions, the proxy, a trace, and policies in turn."""

from gorgo.apps.demo.options import DEFAULT_POLICIES, TUNED_POLICIES, DemoOptions
from gorgo.apps.demo.run import run_demo
from gorgo.apps.demo.show import show_demo

__all__ = ["DEFAULT_POLICIES", "TUNED_POLICIES", "DemoOptions", "run_demo", "show_demo"]
