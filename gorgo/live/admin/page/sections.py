"""The two large sections of the page: the fleet by region with its sources, and the last decisions.

The fleet is a table of health, RTT, load, learned values and recent results. Leaves the data to `snapshot`, and all
other sections to `document`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf, isnan
from typing import Any

from gorgo import formatting
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.messages.decision import Decision
from gorgo.live.admin.page.charts import Child, Html, joined, probe_line, tag, term_bar
from gorgo.live.admin.page.snapshot import DecisionStatus, ReplicaStatus, Snapshot

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
            ("tpot ms", "time per output token of the last streams"),
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
        tag("th", name, scope="col", class_="name" if index == 0 else None) for index, name in enumerate(_SOURCE_HEADS)
    ]
    table = tag(
        "table", tag("thead", tag("tr", *heads)), tag("tbody", *map(_source, status.fleet_sources)), class_="versions"
    )
    yield tag("section", tag("h2", "Fleet sources"), tag("div", table, class_="wide"))


_SCALING_HEADS = ("region", "model", "wanted", "serving", "in time", "predicted", "prefill per s", "expected")


def scaling_section(status: Snapshot) -> Iterator[Html]:
    """Yield the wanted replicas; nothing without an objective."""
    if not status.scaling:
        return
    heads = [
        tag("th", name, scope="col", class_="name" if index < 2 else None) for index, name in enumerate(_SCALING_HEADS)
    ]
    rows = [
        tag(
            "tr",
            tag("th", one.region, scope="row", class_="name"),
            tag("td", one.model or "none", class_="name"),
            tag("td", formatting.count(one.wanted)),
            tag("td", formatting.count(one.replicas)),
            tag("td", formatting.share(one.attainment)),
            tag("td", formatting.share(one.expected_attainment)),
            tag("td", f"{one.work:.2f} s"),
            tag("td", f"{one.expected_work:.2f} s"),
        )
        for one in status.scaling
    ]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="versions")
    yield tag("section", tag("h2", "Wanted replicas"), tag("div", table, class_="wide"))


def _source(source: Mapping[str, Any]) -> Html:
    state = formatting.source_state(source)
    why = tag("small", source["error"]) if source["error"] is not None else None
    more = source["problem_count"] - len(source["problems"][:PROBLEMS_SHOWN])
    lines = [*source["problems"][:PROBLEMS_SHOWN], *([f"and {more} more"] if more else [])]
    return tag(
        "tr",
        tag("th", source["name"], scope="row", class_="name"),
        tag("td", source["kind"]),
        tag("td", tag("span", state, class_=_SOURCE_CHIPS[state]), why, class_="state"),
        tag("td", formatting.count(source["replicas"])),
        tag("td", formatting.age(source["age_s"])),
        tag("td", *(tag("p", line) for line in lines), class_="reason"),
    )


@cache
def _head() -> Html:
    groups = [tag("th", name, colspan=len(columns), scope="colgroup", class_="first") for name, columns in COLUMNS]
    names = [
        tag("th", name, title=meaning, scope="col", class_="first" if index == 0 else None)
        for _, columns in COLUMNS
        for index, (name, meaning) in enumerate(columns)
    ]
    first = tag("th", "replica", scope="col", rowspan=2, class_="name")
    state = tag("th", "state", scope="col", rowspan=2)
    return tag("thead", tag("tr", first, state, *groups, class_="groups"), tag("tr", *names))


def _region(name: str, rows: Sequence[ReplicaStatus], status: Snapshot) -> Html:
    open_now = sum(replica.view.in_flight_requests for replica in rows)
    here = " · the proxy is here" if name == status.region else ""
    cut = tag("span", "unreachable", class_="chip ejected") if name in status.unreachable_regions else None
    many = f" · {len(rows)} replicas, {open_now} open" if len(rows) > 1 else ""
    title = tag("th", tag("b", name), here, many, " ", cut, colspan=WIDTH, scope="rowgroup")
    return tag("tbody", tag("tr", title, class_="region"), joined(map(_replica, rows)))


def _replica(replica: ReplicaStatus) -> Html:
    models = ", ".join(replica.view.models[:MODELS_SHOWN]) or "any model"
    title = "; ".join(part for part in (formatting.engine(replica.engine), models) if part)
    first = tag("th", replica.view.name, scope="row", class_="name", title=title)
    groups = (_trip(replica), _sent(replica.view), _reported(replica.view), _learned(replica), _recent(replica))
    cells = [
        tag("td", cell, class_="first" if index == 0 else None) for group in groups for index, cell in enumerate(group)
    ]
    line = tag("tr", first, tag("td", _state(replica), class_="state"), *cells, data_replica=replica.view.name)
    return joined([line, _reason(replica)])


def _reason(replica: ReplicaStatus) -> Html | None:
    """Return a line below the replica's: a text of any length, which must not widen a table of 20 columns."""
    if replica.condition.why is None:
        return None
    cell = tag("td", tag("p", replica.condition.why), colspan=WIDTH, class_="reason")
    return tag("tr", cell, data_reason=replica.view.name)


def _state(replica: ReplicaStatus) -> Html:
    word = replica.condition.word
    chip = tag("span", word, class_=f"chip {word.replace(' ', '-')}")
    since = None if replica.view.in_state_for_s is None else f"since {formatting.age(replica.view.in_state_for_s)}"
    registered = "registered" if replica.registered else None
    notes = " · ".join(note for note in (since, registered) if note)
    return joined([chip, tag("small", notes) if notes else None])


def _trip(replica: ReplicaStatus) -> Iterator[Child]:
    yield formatting.ms(replica.view.rtt_ms)
    yield probe_line(replica.probes)
    yield formatting.age(replica.view.probe_age_s)


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


def _learned(replica: ReplicaStatus) -> Iterator[Child]:
    view, cache = replica.view, replica.cache
    yield formatting.count(view.index_tokens)
    if cache is None:
        yield formatting.UNKNOWN
    else:
        source = cache.stats.source if cache.unused is None else "history"
        yield tag("span", source, title=formatting.cache_line(cache.as_dict()))
    factor = view.prefill_slowdown
    yield tag("span", formatting.count(view.prefill_tokens_per_s), title=f"prefills take {factor:.2f} times the prior")
    gaps = f"p95 of inter-token times {formatting.ms(view.itl_ms_p95)} ms"
    yield tag("span", formatting.ms(view.tpot_ms), title=gaps)


def _recent(replica: ReplicaStatus) -> Iterator[Child]:
    stats = replica.stats
    yield formatting.count(stats.n)
    yield formatting.ms(stats.ttft_ms_p50)
    yield formatting.ms(stats.ttft_ms_p95)
    yield formatting.share(stats.cached_share)
    yield tag("span", stats.failed, class_="bad") if stats.failed else "0"


def _kv_share(view: ReplicaSnapshot) -> float | None:
    if view.used_tokens is None or not view.kv_capacity_tokens:
        return None
    return view.used_tokens / view.kv_capacity_tokens


# The last decisions: a line each, with every candidate's terms inside.


#: Candidates shown per decision, by cost; each costs time.
CANDIDATES_SHOWN = 16

_HEADS = ("time, UTC", "replica", "prompt", "cached", "predicted", "observed", "off", "status", "request")


class DecisionsSection:
    """The list, newest first. A row is rendered when it is made and when its request ends."""

    def __init__(self) -> None:
        self._written: dict[tuple[object, ...], Html] = {}

    def __call__(self, status: Snapshot) -> Iterator[Html]:
        if not status.decisions:
            yield tag("p", "No request has been routed yet.", class_="quiet")
            return
        yield tag("div", *(tag("span", name) for name in _HEADS), class_="line head", aria_hidden="true")
        before, self._written = self._written, {}
        for entry in status.decisions:
            key = (
                entry.decision.decided_s,
                entry.decision.request_id,
                entry.decision.attempt,
                entry.sample is None,
                entry.followed,
            )
            html = self._written[key] = before.get(key) or _decision(entry)
            yield html


def _decision(entry: DecisionStatus) -> Html:
    decision = entry.decision
    line = tag("summary", tag("div", *_line(entry), class_="line"))
    key = f"d-{decision.request_id}-{decision.attempt}"
    return tag("details", line, tag("div", *_inside(entry), class_="inside"), id=key)


def _line(entry: DecisionStatus) -> list[Html]:
    decision, sample = entry.decision, entry.sample
    cached = decision.estimated_cached_tokens / decision.prompt_tokens if decision.prompt_tokens else None
    again = f" · attempt {decision.attempt}" if decision.attempt > 1 else ""
    predicted_ms = None if decision.predicted_ttft_s is None else decision.predicted_ttft_s * 1e3
    return [
        tag("span", formatting.clock(decision.decided_s)),
        tag("span", decision.replica, again, class_="who", title=entry.region),
        tag("span", formatting.count(decision.prompt_tokens)),
        tag("span", formatting.share(cached)),
        tag("span", formatting.ms(predicted_ms)),
        tag("span", formatting.ms(None if sample is None else sample.ttft_ms), class_="seen"),
        tag("span", formatting.signed_ms(entry.error_ms), class_=_off_class(entry, predicted_ms)),
        _outcome(entry),
        tag("span", decision.request_id, class_="id", title=decision.request_id),
    ]


def _off_class(entry: DecisionStatus, predicted_ms: float | None) -> str | None:
    """Mark an error larger than the prediction and than 250 ms."""
    error_ms = entry.error_ms
    return "bad" if error_ms is not None and predicted_ms is not None and error_ms > max(predicted_ms, 250.0) else None


def _outcome(entry: DecisionStatus) -> Html:
    if entry.sample is not None:
        status = entry.sample.status
        return tag("span", status, class_="bad" if status >= 500 else None)
    return tag("span", "retried" if entry.followed else "open", class_="quiet")


def _inside(entry: DecisionStatus) -> list[Html | None]:
    decision = entry.decision
    if not decision.terms:
        return [_why(decision), _facts(entry)]
    return [_why(decision), tag("div", _terms(decision), class_="wide"), _excluded(decision), _facts(entry)]


def _why(decision: Decision) -> Html:
    if decision.fallback is not None:
        rule = f"Fallback of {decision.policy}: {decision.fallback}."
    elif decision.cost is not None:
        rule = f"{decision.policy} chose the lowest cost, in {decision.unit}; weights version "
        rule += f"{decision.weights_version}."
    else:
        rule = f"{decision.policy} has no cost."
    return tag("p", rule)


def _terms(decision: Decision) -> Html:
    order = _by_cost(decision)[:CANDIDATES_SHOWN]
    names = list(decision.terms)
    most = max((_sum(decision, row) for row in order), default=0.0)
    heads = [tag("th", tag("i", class_=f"t{at % 6}"), name, scope="col") for at, name in enumerate(names)]
    head = tag(
        "tr", tag("th", "replica", scope="col", class_="name"), *heads, tag("th", "cost", scope="col"), tag("th")
    )
    rows = [_candidate(decision, names, row, most) for row in order]
    left = len(decision.candidates) - len(order)
    more = tag("caption", f"{left} candidates of higher cost are not shown") if left else None
    return tag("table", more, tag("thead", head), tag("tbody", *rows), class_="terms")


def _candidate(decision: Decision, names: Sequence[str], row: int, most: float) -> Html:
    chosen = decision.candidates[row] == decision.replica
    values = [float(decision.terms[name][row]) for name in names]
    cost = None if decision.cost is None else float(decision.cost[row])
    mark = tag("span", "chosen", class_="chip ready") if chosen else None
    cells = [tag("td", formatting.term(value)) for value in (*values, cost)]
    drawn = [0.0 if isnan(value) else value for value in values]
    name = tag("th", decision.candidates[row], " ", mark, scope="row", class_="name")
    return tag(
        "tr", name, *cells, tag("td", term_bar(drawn, most), class_="drawn"), class_="chosen" if chosen else None
    )


def _by_cost(decision: Decision) -> list[int]:
    """Return rows by cost, without a cost last; the chosen one first among equals."""
    cost = decision.cost

    def key(row: int) -> tuple[float, bool]:
        sort_cost = inf if cost is None or isnan(cost[row]) else float(cost[row])
        return sort_cost, decision.candidates[row] != decision.replica

    order = sorted(range(len(decision.candidates)), key=key)
    chosen = list(decision.candidates).index(decision.replica)
    if order.index(chosen) >= CANDIDATES_SHOWN:
        order.remove(chosen)
        order.insert(CANDIDATES_SHOWN - 1, chosen)
    return order


def _sum(decision: Decision, row: int) -> float:
    return sum(max(0.0, float(column[row])) for column in decision.terms.values() if not isnan(column[row]))


def _excluded(decision: Decision) -> Html | None:
    if not decision.excluded:
        return None
    return tag("p", "Excluded: ", ", ".join(f"{name} ({why})" for name, why in sorted(decision.excluded.items())), ".")


def _facts(entry: DecisionStatus) -> Html:
    """Return the measured values, as far as the request has ended."""
    decision, sample = entry.decision, entry.sample
    named = [f"{what} {name}" for what, name in (("client", decision.client), ("model", decision.model)) if name]
    facts = [
        *named,
        f"{decision.estimated_cached_tokens:,} of {decision.prompt_tokens:,} prompt tokens estimated cached there",
    ]
    if decision.best_cached_tokens > decision.estimated_cached_tokens:
        facts.append(f"{decision.best_cached_tokens:,} on the replica with most")
    if sample is not None:
        if sample.cached_tokens is not None:
            facts.append(f"{sample.cached_tokens:,} by the engine")
        if sample.output_tokens is not None:
            facts.append(f"{sample.output_tokens:,} tokens out")
        facts.append(f"{sample.e2e_s:.2f} s end to end")
        if sample.retries:
            facts.append(f"{sample.retries} retries")
        if sample.hedged:
            facts.append("hedged")
    parts = [tag("p", "; ".join(facts), ".", class_="quiet")]
    made_of = {} if sample is None or sample.ttft_parts_ms is None else sample.ttft_parts_ms
    if made_of:
        parts_text = ", ".join(f"{part} {formatting.ms(value)}" for part, value in made_of.items())
        parts.append(tag("p", f"The first token's time, in ms: {parts_text}.", class_="quiet"))
    return joined(parts)
