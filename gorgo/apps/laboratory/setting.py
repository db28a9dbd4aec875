"""What a target is measured on: requests, load and scenario, and a run of it.

Owns the records `Setting` (where) and `Bench` (what is the same everywhere), and the step from them to a `SimJob`.
Which settings there are is `targets`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gorgo.apps.simulate import SimJob
from gorgo.apps.simulate.job import STEADY
from gorgo.apps.traces import TraceFilters
from gorgo.core.limits import RouterLimits
from gorgo.sim.fleet import SimFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Requests at a load.

    Parameters
    ----------
    name:
        For people, without the load.
    traces:
        Files, or names of data sets or shapes. Seed s has the one at s modulo their number; a shape is drawn with it.
    filters:
        What is kept of them.
    time_scale:
        2.0 is half the load.
    scenario:
        What goes wrong, or is different.

    Example
    -------
    >>> window = Setting(name="windows", traces=("one", "two"), time_scale=2.0)
    >>> window.label, window.trace_of(3)
    ('windows x2', 'two')
    """

    name: str
    traces: Sequence[str]
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    scenario: str = STEADY

    @property
    def label(self) -> str:
        """The name with the load and, unless nothing happens, the scenario."""
        label = f"{self.name} x{self.time_scale:g}"
        return label if self.scenario == STEADY else f"{label}, {self.scenario}"

    def trace_of(self, seed: int) -> str:
        return self.traces[seed % len(self.traces)]

    def at(self, time_scale: float) -> Setting:
        """The same at another load."""
        return replace(self, time_scale=time_scale)

    def under(self, scenario: str) -> Setting:
        """The same while something happens."""
        return replace(self, scenario=scenario)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all runs share.

    Parameters
    ----------
    fleet:
        Told the truth about its engines; a scenario may change that.
    limits, probe_interval_s, scrape_interval_s:
        As in `SimJob`.
    first_requests:
        Of each setting only so many; None: all. For a quick look.
    """

    fleet: SimFleet
    limits: RouterLimits | None = None
    probe_interval_s: float = 30.0
    scrape_interval_s: float = 30.0
    first_requests: int | None = None

    def job(self, setting: Setting, policy: str, seed: int) -> SimJob:
        """One run, the policy with its default weights."""
        return SimJob(
            trace=setting.trace_of(seed),
            policy=policy,
            fleet=self.fleet,
            filters=self._filters(setting),
            time_scale=setting.time_scale,
            seed=seed,
            scenario=setting.scenario,
            limits=self.limits,
            probe_interval_s=self.probe_interval_s,
            scrape_interval_s=self.scrape_interval_s,
        )

    def _filters(self, setting: Setting) -> TraceFilters:
        limits = [limit for limit in (setting.filters.limit, self.first_requests) if limit is not None]
        return replace(setting.filters, limit=min(limits, default=None))
