"""One replica as the proxy reaches it: connections, dialect, key, attempts in progress, and reports that it lacks.

By the number of attempts the connections of a removed replica are closed after its last stream. A report that the
replica does not make is logged once, with the engine's flag that turns it on (`ReportWatch`): without `cached_tokens`
the estimate of the prefix index is never checked, and without metrics the Router knows its own load only.

Theory of operation: an unreachable engine says nothing about its reports, so only an HTTP answer counts for metrics.
Some versions omit `cached_tokens` if nothing was cached, so only answers with an expected cache hit count, and
several in a row.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.config.model import LimitsConfig
from gorgo.config.router_settings import Deadlines
from gorgo.config.values import AUTO, WARM_CONNECTIONS
from gorgo.core.limits import BufferBudget
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import COMPLETED, EngineSample, Outcome
from gorgo.engines.base import EngineDialect
from gorgo.engines.discovery import FoundEngine
from gorgo.engines.registry import dialect
from gorgo.live.cache_push import PushSource
from gorgo.live.logs import log
from gorgo.live.replica_secrets import ReplicaSecrets
from gorgo.live.upstream.client import UpstreamClient
from gorgo.live.upstream.transport import PlainTransport

#: Two rounds of pings on warm connections: one that is refused may be an engine that restarts.
UNREACHABLE_PINGS = 2 * WARM_CONNECTIONS


#: The reason of an answer that goes on elsewhere because its replica drains or has left.
MOVED = "moved"


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
        reported = status == 200 and sample is not None and sample.running_requests is not None
        return self._set(Report.METRICS, ReportState.REPORTED if reported else ReportState.MISSING)

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


class RunningStream(Protocol):
    """A stream of a replica that could go on at another one."""

    @property
    def last_s(self) -> float:
        """Return when its last event came (monotonic s)."""
        ...

    def move(self, reason: str) -> bool:
        """Ask another replica for the rest of its answer; return whether one was asked."""
        ...


@dataclass(slots=True, eq=False)
class Target:
    """One replica as the proxy reaches it."""

    name: str
    region: str
    upstream: UpstreamClient
    dialect: EngineDialect
    #: Reports that the engine does not make.
    reports: ReportWatch
    #: For attempts from now on; those in progress have theirs.
    deadlines: Deadlines
    request_usage: bool = False
    secrets: ReplicaSecrets = field(default_factory=ReplicaSecrets)
    #: What its engine pushes of its cache.
    pushes: PushSource = field(default_factory=PushSource, init=False, repr=False)
    #: Where its KV events come from, and whether that has changed.
    kv_events: KvEventsConfig | None = None
    kv_events_changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    #: Why what it reports of its cache is not used, as last logged; `None` if it is.
    unused_reports: str | None = field(default=None, init=False)
    #: Whether the kind of engine is found by asking.
    detects_engine: bool = False
    #: Its streams that could go on elsewhere, the oldest first.
    streams: dict[RunningStream, None] = field(default_factory=dict, init=False)
    found_engine: FoundEngine | None = field(default=None, init=False)
    #: An attempt lost a connection, or had one refused, since the last scrape.
    connection_lost: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    #: Why the last attempt or probe found no connection or no answer, for operators; `None` after a good probe.
    last_failure: str | None = field(default=None, init=False)
    #: Pings in a row, of probes and warm connections, that found no connection.
    unconnected_pings: int = field(default=0, init=False)
    #: Attempts in progress, counted by `acquire` and `release`.
    active: int = field(default=0, init=False)
    #: Attempts since the start.
    attempts: int = field(default=0, init=False)
    #: Its answers in a row whose streams broke off behind the finish reason.
    cut_ends: int = field(default=0, init=False)
    _drained: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    @property
    def unreachable(self) -> bool:
        """Whether the last pings found no connection. Known in seconds; probes of long intervals eject later."""
        return self.unconnected_pings >= UNREACHABLE_PINGS

    def acquire(self) -> None:
        self.active += 1
        self.attempts += 1

    def release(self) -> None:
        self.active -= 1
        if not self.active:
            self._drained.set()

    def check_usage(self, dispatch: Dispatch, outcome: Outcome) -> None:
        """Log once if the usage of the replica's answers lacks what its engine should report."""
        if outcome.result is COMPLETED and outcome.prompt_tokens is not None:
            estimated = dispatch.decision.estimated_cached_tokens
            missing = self.reports.on_answer(cached_tokens=outcome.cached_tokens, estimated_tokens=estimated)
            if missing is not None:
                self._log_missing(missing)

    def check_metrics(self, status: int | None, sample: EngineSample | None) -> None:
        """Log once if a scrape shows that the engine has no metrics."""
        missing = self.reports.on_scrape(status, sample)
        if missing is not None:
            self._log_missing(missing)

    def _log_missing(self, missing: MissingReport) -> None:
        level, report = logging.WARNING, missing.report.value
        log("report_missing", level=level, replica=self.name, report=report, advice=missing.advice)

    async def wait_drained(self) -> None:
        """Return when no attempt is in progress."""
        while self.active:
            self._drained.clear()
            await self._drained.wait()

    @property
    def api_key(self) -> str | None:
        """The replica's own key."""
        return self.secrets.api_key

    @property
    def engine(self) -> Mapping[str, object]:
        """The kind of engine in use, its version if known, and whether both were found by asking."""
        engine = self.found_engine
        identified = engine is not None or not self.detects_engine
        return {
            "name": self.dialect.name if identified else None,
            "version": None if engine is None else engine.version,
            "found": self.detects_engine,
        }

    def use_engine(self, engine: FoundEngine) -> None:
        """Speak to the engine that was found; what another kind reports is no longer of interest."""
        if engine.name != self.dialect.name:
            self.dialect = dialect(engine.name)
            self.reports = ReportWatch(self.dialect)
        self.found_engine = engine

    def update(
        self, replica: ReplicaConfig, limits: LimitsConfig, deadlines: Deadlines, secrets: ReplicaSecrets
    ) -> None:
        """Update the settings of the same process; streams in progress go on."""
        self.region, self.request_usage, self.secrets = replica.region, replica.request_usage, secrets
        self.deadlines = deadlines
        if replica.kv_events != self.kv_events:
            self.kv_events = replica.kv_events
            self.kv_events_changed.set()
        self.upstream.set_limits(connections=limits.connections_per_replica, connect_timeout_s=deadlines.connect_s)
        self.upstream.refuse_addresses(replica.refuses)


def make_target(
    replica: ReplicaConfig,
    limits: LimitsConfig,
    deadlines: Deadlines,
    secrets: ReplicaSecrets,
    tls: ssl.SSLContext,
    buffers: BufferBudget,
    *,
    plain: bool = False,
) -> Target:
    """Return a target. Needs a running loop: connection pools belong to one. `plain`: requests by httpx."""
    engine = dialect(replica.engine)
    upstream = UpstreamClient(
        replica.url,
        connections=limits.connections_per_replica,
        connect_timeout_s=deadlines.connect_s,
        tls=tls,
        buffers=buffers,
        new_transport=PlainTransport if plain else None,
    )
    upstream.refuse_addresses(replica.refuses)
    return Target(
        name=replica.name,
        region=replica.region,
        upstream=upstream,
        dialect=engine,
        reports=ReportWatch(engine),
        deadlines=deadlines,
        request_usage=replica.request_usage,
        secrets=secrets,
        kv_events=replica.kv_events,
        detects_engine=replica.engine == AUTO,
    )
