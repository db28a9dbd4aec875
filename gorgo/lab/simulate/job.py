"""One simulated run and its result, as records that can be sent to another process.

Owns the records, the digest of what determines a run, the names of the three baselines, and goodput;
`gorgo.lab.simulate.run` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any

from gorgo import __version__
from gorgo.core.limits import RouterLimits
from gorgo.lab.datasets import content_digest
from gorgo.lab.results import ResultRow, is_good
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import LATER
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.routers import ONE_ROUTER, RouterGroup
from gorgo.lab.sim.scenarios import Scenario
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.traces import TraceFilters

# The bounds of goodput are those of `gorgo.lab.results`. A rejected or failed request was offered and not served well.


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of one run; ratios are of all requests offered.

    `good` is the ratio with a first token within 2 s and a last one within 10 s, `per_s` their rate over the workload.
    `rejected` were rejected or failed, `queued` waited at the proxy, `hedged` had a second attempt.
    """

    offered: int
    good: float
    per_s: float
    rejected: float
    queued: float
    hedged: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput_of(records: Sequence[SimRecord]) -> Goodput | None:
    """Return the goodput; None for a run without a request."""
    if not records:
        return None
    n = len(records)
    good = sum(map(is_good, records))
    lasted_s = records[-1].scheduled_s - records[0].scheduled_s
    return Goodput(
        offered=n,
        good=good / n,
        per_s=good / lasted_s if lasted_s > 0 else float(good),
        rejected=sum(record.error is not None for record in records) / n,
        queued=sum(record.queued_s > 0.0 for record in records) / n,
        hedged=sum(record.hedged for record in records) / n,
    )


# What determines a run.
#
# The code is named by its version alone: a policy that was edited in between gives equal digests and unlike figures,
# which `gorgo report` says.


def setting_of(job: SimJob) -> str | None:
    """Return a digest of what determines a run, but its policy, weights, seed and time scale.

    That is the version, the bytes of the trace, its filters, the fleet with its engines and links, the scenario, the
    limits (with the queue), the clients and the routers. None for a feed in memory, or a trace that is no regular file.
    """
    content = None if job.feed is not None else content_digest(job.trace)
    if content is None:
        return None
    rest = (job.scenario, job.limits, job.probe_interval_s, job.scrape_interval_s, job.client_concurrency)
    filters = replace(job.filters, seed=0)  # a run's own seed takes its place
    given = (job.slo_ttft_ms, job.block_tokens, job.routers, job.closed_loop, job.warm_s, job.windows)
    return _digest([__version__, content, filters, job.fleet, *rest, *given])


def run_digest(
    job: SimJob, setting: str | None, weights: Mapping[str, float] | None, window: int | None = None
) -> str | None:
    """Return a digest of everything that determines a row of a run with these weights; None if its setting is unknown.

    `window` is that of the row, if it is of a part of its run.
    """
    if setting is None:
        return None
    return _digest([setting, job.policy, weights, job.seed, job.time_scale, *([] if window is None else [window])])


def _digest(value: object) -> str:
    return blake2b(json.dumps(_plain(value, {})).encode(), digest_size=8).hexdigest()


def _plain(value: object, made: dict[int, object]) -> object:
    """Return records as values of JSON, the same in every process; `made` has those of records met before.

    A fleet has few engines and links, each in many replicas.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value):
        plain = made.get(id(value))
        if plain is None:
            given = [(one, getattr(value, one.name)) for one in fields(value)]
            plain = made[id(value)] = {
                one.name: inner if inner is None or isinstance(inner, str | int | float) else _plain(inner, made)
                for one, inner in given
                if not (one.metadata == LATER and inner == one.default)
            }
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner, made) for inner in value]
    if isinstance(value, Mapping):
        return sorted([f"{key}", _plain(inner, made)] for key, inner in value.items())
    if isinstance(value, Set):
        return sorted(map(str, value))
    raise TypeError(f"{type(value).__name__} has no digest; expected records, texts and numbers")


#: Rows of every comparison that no proxy can run: the rule of `gorgo-ms` with full knowledge, sessions assigned with
#: knowledge of the whole trace, and a lower bound.
ORACLE, PINNED, FLOOR = "oracle", "pinned", "floor"
BASELINES = (ORACLE, PINNED, FLOOR)
#: The scenario in which nothing happens.
STEADY = "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """One policy on one feed.

    Parameters
    ----------
    trace:
        A file, or the name of a data set or a shape (which is drawn anew for each seed); in the result row.
    feed:
        The requests themselves, at time scale 1; then `trace` is a mere name and `filters` do nothing.
    policy:
        By name; `oracle`, `pinned` and `floor` are such names here.
    weights:
        The policy's defaults where None. Whether they lie in their box was minded by whoever made them.
    fleet:
        Before the scenario changes it.
    scenario:
        By name, or one's own.
    seed:
        Of the network's jitter, the Router's ties, the scatter of equal time stamps and the window of a shape: the same
        for every policy.
    limits:
        The Router's bounds; None: its own defaults, without a queue and without deadlines.
    client_concurrency:
        As in `Simulation`.
    slo_ttft_ms:
        Deadline that every request brings; None: that of `limits`, if it has one.
    keep_requests:
        Send a record per request back.
    shadow:
        A policy that scores each decision without a say; its rank of the replica chosen is in the requests.
    block_tokens:
        Tokens per block of a prompt's prefix; None: those of the shape, and 512 for files and feeds.
    routers:
        As in `Simulation`.
    closed_loop:
        A session's turn comes a think time after the end of the answer before it, not at its time in the trace.
    warm_s:
        Requests of the first so many seconds of the run are served and count in no row.
    windows:
        Rows of a run, each of the requests that came in one of so many windows of equal length.
    """

    trace: str
    policy: str
    fleet: SimFleet
    filters: TraceFilters = field(default_factory=TraceFilters)
    feed: Sequence[SimRequest] | None = None
    time_scale: float = 1.0
    weights: Mapping[str, float] | None = None
    seed: int = 0
    scenario: str | Scenario = STEADY
    limits: RouterLimits | None = None
    probe_interval_s: float = 30.0
    scrape_interval_s: float | None = None
    client_concurrency: int | None = None
    slo_ttft_ms: float | None = None
    keep_requests: bool = False
    shadow: str | None = None
    block_tokens: int | None = None
    routers: RouterGroup = ONE_ROUTER
    closed_loop: bool = False
    warm_s: float = 0.0
    windows: int = 1


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A finished run. `job` has no feed any more; `requests` is None unless `keep_requests` was set.

    `row` is of all requests behind the warm-up, and `windows` has a row per window where there are several.

    `cpu_s` is the processor time of the run in its process, with reading the feed unless already loaded. `goodput` is
    None without a request. `key_share` is the share of requests with the most common key, under a policy that is keyed
    by session. `warning` is of the trace's time stamps.
    """

    job: SimJob
    row: ResultRow
    requests: Sequence[SimRecord] | None = None
    cpu_s: float | None = None
    goodput: Goodput | None = None
    key_share: float | None = None
    warning: str | None = None
    windows: Sequence[ResultRow] = ()

    @property
    def result_rows(self) -> Sequence[ResultRow]:
        """Return the rows to store: those of its windows, or the one of the whole run."""
        return self.windows or (self.row,)
