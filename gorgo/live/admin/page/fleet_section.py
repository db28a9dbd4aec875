"""The fleet by region, as a table: health, RTT, load, learned values and recent results; and its sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from gorgo import formatting
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.live.admin.page.charts import probe_line
from gorgo.live.admin.page.markup import Child, Html, joined, tag
from gorgo.live.admin.page.snapshot import ReplicaStatus, Snapshot

#: Groups of columns, and each column with what it means.
COLUMNS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "round trip, ms",
        (
            ("now", "smoothed, by probes from this proxy"),
            ("history", "the last probes; a mark at the bottom is a failed one"),
            ("age", "since the last probe"),
        ),
    ),
    (
        "sent from here",
        (
            ("open", "requests in flight"),
            ("tokens", "their prompt tokens"),
            ("to prefill", "prompt tokens before their first token"),
            ("backlog, ms", "by the prefill queue"),
        ),
    ),
    (
        "engine's report",
        (
            ("running", "requests in its batch"),
            ("queued", "requests in its own queue"),
            ("KV", "of its KV cache in use"),
            ("age", "since it was scraped"),
        ),
    ),
    (
        "learned",
        (
            ("cached", "prompt tokens estimated cached there"),
            ("by", "source of that: history of requests, KV events or pushes"),
            ("prefill/s", "prefill speed in tokens/s, prior and learned"),
        ),
    ),
    (
        "recent requests",
        (
            ("n", "recently finished there"),
            ("p50, ms", "median TTFT"),
            ("p95, ms", "TTFT, 95th percentile"),
            ("hit", "cached share of prompt tokens, by the engine"),
            ("failed", "with 5xx"),
        ),
    ),
)
WIDTH = 2 + sum(len(columns) for _, columns in COLUMNS)
#: Names in the tooltip of a replica; one with adapters has hundreds.
MODELS_SHOWN = 20
#: Objects of a source that make no replica; `GET /admin/fleet` has more.
PROBLEMS_SHOWN = 5

_SOURCE_HEADS = ("source", "kind", "state", "replicas", "last answer", "objects without a replica")
_SOURCE_CHIPS = {"up": "chip ready", "down": "chip failing", "pending": "chip"}


def fleet_section(status: Snapshot) -> Iterator[Html]:
    """Yield the table, a body per region."""
    yield Html('<div class="wide"><table class="fleet">')
    yield _head()
    for name, rows in status.regions.items():
        yield _region(name, rows, status)
    yield Html("</table></div>")


def sources_section(status: Snapshot) -> Iterator[Html]:
    """Yield the fleet sources; nothing without any."""
    if not status.fleet_sources:
        return
    heads = [
        tag("th", name, scope="col", class_="name" if place == 0 else None) for place, name in enumerate(_SOURCE_HEADS)
    ]
    table = tag(
        "table", tag("thead", tag("tr", *heads)), tag("tbody", *map(_source, status.fleet_sources)), class_="versions"
    )
    yield tag("section", tag("h2", "Fleet sources"), tag("div", table, class_="wide"))


def _source(row: Mapping[str, Any]) -> Html:
    state = formatting.source_state(row)
    why = tag("small", row["error"]) if row["error"] is not None else None
    more = row["problem_count"] - len(row["problems"][:PROBLEMS_SHOWN])
    lines = [*row["problems"][:PROBLEMS_SHOWN], *([f"and {more} more"] if more else [])]
    return tag(
        "tr",
        tag("th", row["name"], scope="row", class_="name"),
        tag("td", row["kind"]),
        tag("td", tag("span", state, class_=_SOURCE_CHIPS[state]), why, class_="state"),
        tag("td", formatting.count(row["replicas"])),
        tag("td", formatting.age(row["age_s"])),
        tag("td", *(tag("p", line) for line in lines), class_="reason"),
    )


@cache
def _head() -> Html:
    groups = [tag("th", name, colspan=len(columns), scope="colgroup", class_="first") for name, columns in COLUMNS]
    names = [
        tag("th", name, title=meaning, scope="col", class_="first" if place == 0 else None)
        for _, columns in COLUMNS
        for place, (name, meaning) in enumerate(columns)
    ]
    empty = tag("th", "replica", scope="col", rowspan=2, class_="name"), tag("th", "state", scope="col", rowspan=2)
    return tag("thead", tag("tr", *empty, *groups, class_="groups"), tag("tr", *names))


def _region(name: str, rows: Sequence[ReplicaStatus], status: Snapshot) -> Html:
    open_now = sum(row.view.in_flight_requests for row in rows)
    here = " · the proxy is here" if name == status.region else ""
    cut = tag("span", "unreachable", class_="chip ejected") if name in status.unreachable_regions else None
    many = f" · {len(rows)} replicas, {open_now} open" if len(rows) > 1 else ""
    title = tag("th", tag("b", name), here, many, " ", cut, colspan=WIDTH, scope="rowgroup")
    return tag("tbody", tag("tr", title, class_="region"), joined(map(_replica, rows)))


def _replica(row: ReplicaStatus) -> Html:
    models = ", ".join(row.view.models[:MODELS_SHOWN]) or "any model"
    title = "; ".join(part for part in (formatting.engine(row.engine), models) if part)
    first = tag("th", row.view.name, scope="row", class_="name", title=title)
    groups = (_trip(row), _sent(row.view), _reported(row.view), _learned(row), _recent(row))
    cells = [
        tag("td", cell, class_="first" if place == 0 else None) for group in groups for place, cell in enumerate(group)
    ]
    return tag("tr", first, tag("td", _state(row), class_="state"), *cells, data_replica=row.view.name)


def _state(row: ReplicaStatus) -> Html:
    word = row.condition.word
    chip = tag("span", word, class_=f"chip {word.replace(' ', '-')}")
    since = None if row.view.in_state_for_s is None else f"since {formatting.age(row.view.in_state_for_s)}"
    registered = "registered" if row.registered else None
    notes = " · ".join(note for note in (since, row.condition.why, registered) if note)
    return joined([chip, tag("small", notes) if notes else None])


def _trip(row: ReplicaStatus) -> Iterator[Child]:
    yield formatting.ms(row.view.rtt_ms)
    yield probe_line(row.probes)
    yield formatting.age(row.view.probe_age_s)


def _sent(view: ReplicaSnapshot) -> Iterator[Child]:
    yield formatting.count(view.in_flight_requests)
    yield formatting.count(view.in_flight_tokens)
    yield formatting.count(view.queued_prefill_tokens)
    yield formatting.ms(view.backlog_s * 1e3) if view.backlog_s else "0"


def _reported(view: ReplicaSnapshot) -> Iterator[Child]:
    yield formatting.count(view.running_requests)
    yield formatting.count(view.queued_requests)
    yield formatting.share(_kv_share(view))
    yield formatting.age(view.scrape_age_s)


def _learned(row: ReplicaStatus) -> Iterator[Child]:
    view, cache = row.view, row.cache
    yield formatting.count(view.index_tokens)
    if cache is None:
        yield formatting.UNKNOWN
    else:
        yield tag("span", cache.stats.source, title=formatting.cache_line(cache.as_dict()))
    factor = view.prefill_slowdown
    yield tag("span", formatting.count(view.prefill_tokens_per_s), title=f"prefills take {factor:.2f} times the prior")


def _recent(row: ReplicaStatus) -> Iterator[Child]:
    stats = row.stats
    yield formatting.count(stats.n)
    yield formatting.ms(stats.ttft_ms_p50)
    yield formatting.ms(stats.ttft_ms_p95)
    yield formatting.share(stats.cached_share)
    yield tag("span", stats.failed, class_="bad") if stats.failed else "0"


def _kv_share(view: ReplicaSnapshot) -> float | None:
    if view.used_tokens is None or not view.kv_capacity_tokens:
        return None
    return view.used_tokens / view.kv_capacity_tokens
