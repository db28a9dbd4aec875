"""The whole thing with one command: three simulated regions, the proxy, a trace, policies in turn."""

from gorgo.apps.demo.options import DEFAULT_POLICIES, DemoOptions

__all__ = ["DEFAULT_POLICIES", "DemoOptions"]
