"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run, and no limit on the time of one: the cores are shared, and a slow machine is no fault.
settings.register_profile("gorgo", derandomize=True, deadline=None)
settings.load_profile("gorgo")
