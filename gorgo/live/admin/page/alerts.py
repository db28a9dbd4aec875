"""The health of each replica in a word, and the alerts of the page.

Owns the judgement of what is worth an alert. What is known is the Router's; stats are `stats`'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from gorgo import formatting
from gorgo.config.model import ReplicaConfig
from gorgo.config.replica_advice import remedy, without_api_path
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.live.admin.page.recent_stats import RecentStats

#: Ratio of failed requests above which they are an alert.
FAILED_SHARE = 0.01

_EJECTED = {
    "attempts": "requests to it failed",
    "refusals": "it refuses what other replicas answer",
    "answers": "its answers broke off or were too short",
    "busy": "its engine was busy for too long",
    "probes": "it does not answer probes",
    "region": "its whole region stopped answering",
}


#: States that are a warning, as they follow the replica's name.
_WARNINGS = {"draining": " is draining", "failing": "", "slow start": " is warming up"}


@dataclass(frozen=True, slots=True)
class Condition:
    """The health of a replica in a word, and the reason unless it is ready."""

    word: str
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """One line; `level` is `bad` where requests suffer, `warn` where they might."""

    level: str
    text: str


def condition_of(view: ReplicaSnapshot, failure: str | None = None) -> Condition:
    """Return ready, slow start, failing, draining, ejected or on trial; `failure` is the cause of its last one."""
    if view.state == "draining":
        left = f"{view.in_flight_requests} in flight" if view.in_flight_requests else "none in flight"
        return Condition("draining", f"no new requests, {left}")
    cause = "" if failure is None else f" ({failure})"
    because = _EJECTED.get(view.ejected_by or "", "it failed") + cause
    if view.state == "ejected":
        return Condition("ejected", f"{because}; retried in {view.ejected_for_s or 0:.0f} s")
    if view.state == "half_open":
        return Condition("on trial", f"{because}; the next response decides")
    if view.failures_in_a_row:
        return Condition("failing", f"{_many(view.failures_in_a_row, 'failure')} in a row{cause}")
    if view.slow_start_for_s is not None:
        most = f"at most {_many(view.slow_start_in_flight or 0, 'request')}"
        return Condition("slow start", f"{most} for another {ceil(view.slow_start_for_s)} s")
    return Condition("ready")


def alerts(
    views: Sequence[ReplicaSnapshot],
    stats: RecentStats,
    *,
    unreachable_regions: frozenset[str],
    queued: int,
    stopping: bool,
    config_refused: bool,
    out_of_range: Sequence[str],
    replicas: Mapping[str, ReplicaConfig],
    not_ready: str | None = None,
    waiting: Sequence[str] = (),
    failures: Mapping[str, str | None] | None = None,
    sources: Iterable[Mapping[str, Any]] = (),
    store: Mapping[str, Any] | None = None,
) -> list[Alert]:
    """Return all alerts, worst first.

    `failures` has the cause of a replica's last failure, `not_ready` why no request could be served, `sources` the rows
    of fleet sources, `store` the link to the store of several routers.
    """
    failures = failures or {}
    found = [
        *_of_refusals(views, replicas),
        *_of_proxy(stopping=stopping, config_refused=config_refused),
        *_of_fleet(views, unreachable_regions, not_ready),
        *_of_traffic(stats, queued),
        *(alert for view in views for alert in _of_replica(view, unreachable_regions, failures.get(view.name))),
    ]
    found += [alert for source in sources for alert in _of_source(source)]
    found += [] if store is None else _of_store(store)
    found += [Alert("warn", f"Edit not in force: {text}") for text in waiting]
    if out_of_range:
        found.append(Alert("warn", f"Weights outside the policy's box: {', '.join(out_of_range)}"))
    return sorted(found, key=lambda alert: alert.level != "bad")


def _of_refusals(views: Sequence[ReplicaSnapshot], replicas: Mapping[str, ReplicaConfig]) -> Iterator[Alert]:
    """First of all: such a replica never gets well by itself, because its configuration is at fault."""
    for view in views:
        if view.refusal is not None:
            advice = _remedy(view, view.refusal, replicas.get(view.name))
            yield Alert("bad", f"{view.name} answers {view.refusal}{'' if advice is None else f': {advice}'}")


def _remedy(view: ReplicaSnapshot, status: int, replica: ReplicaConfig | None) -> str | None:
    if replica is None:
        return None
    if status == 404 and view.answers and replica.url.rstrip("/") == without_api_path(replica.url):
        return f"compare the model's name in requests and its models with {replica.url}/v1/models"
    return remedy(status, url=replica.url, api_key_env=replica.api_key_env)


def _of_proxy(*, stopping: bool, config_refused: bool) -> Iterator[Alert]:
    if stopping:
        yield Alert("bad", "This proxy is stopping: open requests may finish, new ones are rejected")
    if config_refused:
        yield Alert("warn", "The newest regions.yaml was refused; the log has the reason")


def _of_fleet(
    views: Sequence[ReplicaSnapshot], unreachable_regions: Iterable[str], not_ready: str | None
) -> Iterator[Alert]:
    if not_ready is not None:
        yield Alert("bad", f"{not_ready[0].upper()}{not_ready[1:]}")
    elif any(view.panic for view in views):
        yield Alert(
            "bad", "Too few replicas are healthy: ejected ones are retried soon, and used if no other is eligible"
        )
    for region in sorted(unreachable_regions):
        yield Alert("bad", f"Region {region} is unreachable: no replica there answers a probe")


def _of_traffic(stats: RecentStats, queued: int) -> Iterator[Alert]:
    if stats.n and stats.failed / stats.n >= FAILED_SHARE:
        yield Alert("bad", f"{stats.failed} of the last {stats.n} requests failed")
    if queued:
        yield Alert("warn", f"{queued} {_requests(queued)} for a replica")


def _of_replica(view: ReplicaSnapshot, unreachable_regions: frozenset[str], failure: str | None) -> Iterator[Alert]:
    how = condition_of(view, failure)
    if how.word in ("ejected", "on trial") and view.region not in unreachable_regions:
        yield Alert("bad" if how.word == "ejected" else "warn", f"{view.name} is {how.word}: {how.why}")
    elif how.word in _WARNINGS:
        yield Alert("warn", f"{view.name}{_WARNINGS[how.word]}: {how.why}")
    if view.rtt_ms is None and how.word != "ejected":
        yield Alert("warn", f"{view.name}: unknown RTT: no recent probe was answered")


def _of_source(source: Mapping[str, Any]) -> Iterator[Alert]:
    name, n = source["name"], source["problem_count"]
    if source["error"] is not None:
        stay = f"; its {_many(source['replicas'], 'replica')} stay{'s' if source['replicas'] == 1 else ''}"
        yield Alert("warn", f"Fleet source {name} is down: {source['error']}{stay if source['replicas'] else ''}")
    if n:
        more = f" (and {n - 1} more)" if n > 1 else ""
        yield Alert("warn", f"Fleet source {name}: no replica of {source['problems'][0]}{more}")


def _of_store(store: Mapping[str, Any]) -> Iterator[Alert]:
    if store["fault"] is not None:
        line = formatting.store_line(store)
        yield Alert("warn", f"{line[0].upper()}{line[1:]} ({store['error']})")
    for row in store["peers"]:
        if row["differences"]:
            yield Alert("warn", f"Router {row['router']}: {'; '.join(row['differences'].values())}")


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _requests(n: int) -> str:
    return "request is queued" if n == 1 else "requests are queued"
