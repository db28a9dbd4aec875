"""Reports that a replica does not make, and the flag of the engine that turns each on.

Owns the detection; each missing report is returned once. The proxy passes answers and scrapes in, and logs the result.
Without `cached_tokens` the estimate of the prefix index is never checked; without metrics the Router knows its own load
only.

Theory of operation: an unreachable engine says nothing about its reports, so only an HTTP answer counts for metrics.
Some versions omit `cached_tokens` if nothing was cached, so only answers with an expected cache hit count, and several
in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import EngineDialect

#: Answers in a row that lack an expected report of cached tokens: one may be a wrong estimate, five are a setting.
_SILENT_ANSWERS = 5


class Report(Enum):
    """Reports that an engine can make."""

    CACHED_TOKENS = "cached_tokens"
    METRICS = "metrics"


class ReportState(Enum):
    """`UNKNOWN` until something was seen; plain OpenAI's metrics stay so, because nothing is expected of them."""

    UNKNOWN = "unknown"
    REPORTED = "reported"
    MISSING = "missing"


_COST = {
    Report.CACHED_TOKENS: "the router's estimate of that cache cannot be checked",
    Report.METRICS: "the router knows only the load that it sends there itself",
}


@dataclass(frozen=True, slots=True)
class MissingReport:
    """A missing report; returned once per replica and report."""

    report: Report
    engine: str
    #: The engine's own flag; `None` where it has none.
    flag: str | None

    @property
    def advice(self) -> str:
        """One sentence for the operator."""
        remedy = f"start the engine with {self.flag}" if self.flag else "this kind of engine has no flag for it"
        return f"{self.engine} does not report {self.report.value}: {_COST[self.report]}; {remedy}"


@dataclass(slots=True)
class ReportWatch:
    """The reports of one replica.

    Each method returns a `MissingReport` when a report is first found missing, else `None`. `states` follows the
    current behaviour: a restart with the flag clears it.

    Example
    -------
    >>> from gorgo.engines.registry import dialect
    >>> watch = ReportWatch(dialect("sglang"))
    >>> watch.on_scrape(404, None).flag
    '--enable-metrics'
    >>> watch.on_scrape(404, None) is None
    True
    """

    dialect: EngineDialect
    states: dict[Report, ReportState] = field(default_factory=lambda: dict.fromkeys(Report, ReportState.UNKNOWN))
    _silent: int = 0
    #: That state, for most answers: to hash a key takes longer.
    _reports_cached: bool = False
    _said: set[Report] = field(default_factory=set)

    def on_answer(self, *, cached_tokens: int | None, estimated_tokens: float) -> MissingReport | None:
        """Record an answer with usage; `estimated_tokens` of its prompt were estimated as cached."""
        if cached_tokens is not None:
            self._silent = 0
            if self._reports_cached:
                return None
            self._reports_cached = True
            return self._set(Report.CACHED_TOKENS, ReportState.REPORTED)
        self._silent += estimated_tokens > 0
        missing = self._silent >= _SILENT_ANSWERS
        if missing:
            self._reports_cached = False
        return self._set(Report.CACHED_TOKENS, ReportState.MISSING) if missing else None

    def on_scrape(self, status: int | None, sample: EngineSample | None) -> MissingReport | None:
        """Record a scrape of `metrics_path`: its HTTP status (`None`: no answer) and the values read."""
        if self.dialect.metrics_path is None or status is None or status in _PASSING:
            return None
        known = status == 200 and sample is not None and sample.running_requests is not None
        return self._set(Report.METRICS, ReportState.REPORTED if known else ReportState.MISSING)

    def _set(self, report: Report, state: ReportState) -> MissingReport | None:
        self.states[report] = state
        if state is not ReportState.MISSING or report in self._said:
            return None
        self._said.add(report)
        return MissingReport(report, self.dialect.name, self.dialect.report_flags.get(report.value))

    def as_dict(self) -> Mapping[str, str]:
        """For `/admin/fleet`."""
        return {report.value: state.value for report, state in self.states.items()}


#: Says that the engine is busy, starting or broken, not that it has no metrics.
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
