"""The last decisions: a line each, with every candidate's terms inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan

from gorgo import formatting
from gorgo.core.messages.decision import Decision
from gorgo.live.admin.page.charts import term_bar
from gorgo.live.admin.page.markup import Html, joined, tag
from gorgo.live.admin.page.snapshot import DecisionStatus, Snapshot

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
        for row in status.decisions:
            key = (
                row.decision.decided_s,
                row.decision.request_id,
                row.decision.attempt,
                row.sample is None,
                row.followed,
            )
            html = self._written[key] = before.get(key) or _decision(row)
            yield html


def _decision(row: DecisionStatus) -> Html:
    decision = row.decision
    line = tag("summary", tag("div", *_line(row), class_="line"))
    key = f"d-{decision.request_id}-{decision.attempt}"
    return tag("details", line, tag("div", *_inside(row), class_="inside"), id=key)


def _line(row: DecisionStatus) -> list[Html]:
    decision, sample = row.decision, row.sample
    cached = decision.estimated_cached_tokens / decision.prompt_tokens if decision.prompt_tokens else None
    again = f" · attempt {decision.attempt}" if decision.attempt > 1 else ""
    predicted_ms = None if decision.predicted_ttft_s is None else decision.predicted_ttft_s * 1e3
    return [
        tag("span", formatting.clock(decision.decided_s)),
        tag("span", decision.replica, again, class_="who", title=row.region),
        tag("span", formatting.count(decision.prompt_tokens)),
        tag("span", formatting.share(cached)),
        tag("span", formatting.ms(predicted_ms)),
        tag("span", formatting.ms(None if sample is None else sample.ttft_ms), class_="seen"),
        tag("span", formatting.signed_ms(row.error_ms), class_=_off_class(row, predicted_ms)),
        _outcome(row),
        tag("span", decision.request_id, class_="id", title=decision.request_id),
    ]


def _off_class(row: DecisionStatus, predicted_ms: float | None) -> str | None:
    """Mark an error larger than the prediction and than 250 ms."""
    error_ms = row.error_ms
    return "bad" if error_ms is not None and predicted_ms is not None and error_ms > max(predicted_ms, 250.0) else None


def _outcome(row: DecisionStatus) -> Html:
    if row.sample is not None:
        status = row.sample.status
        return tag("span", status, class_="bad" if status >= 500 else None)
    return tag("span", "retried" if row.followed else "open", class_="quiet")


def _inside(row: DecisionStatus) -> list[Html | None]:
    decision = row.decision
    if not decision.terms:
        return [_why(decision), _facts(row)]
    return [_why(decision), tag("div", _terms(decision), class_="wide"), _excluded(decision), _facts(row)]


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
    most = max((_sum(decision, place) for place in order), default=0.0)
    heads = [tag("th", tag("i", class_=f"t{at % 6}"), name, scope="col") for at, name in enumerate(names)]
    head = tag(
        "tr", tag("th", "replica", scope="col", class_="name"), *heads, tag("th", "cost", scope="col"), tag("th")
    )
    rows = [_candidate(decision, names, place, most) for place in order]
    left = len(decision.candidates) - len(order)
    more = tag("caption", f"{left} candidates of higher cost are not shown") if left else None
    return tag("table", more, tag("thead", head), tag("tbody", *rows), class_="terms")


def _candidate(decision: Decision, names: Sequence[str], place: int, most: float) -> Html:
    chosen = decision.candidates[place] == decision.replica
    values = [float(decision.terms[name][place]) for name in names]
    cost = None if decision.cost is None else float(decision.cost[place])
    mark = tag("span", "chosen", class_="chip ready") if chosen else None
    cells = [tag("td", formatting.term(value)) for value in (*values, cost)]
    known = [0.0 if isnan(value) else value for value in values]
    name = tag("th", decision.candidates[place], " ", mark, scope="row", class_="name")
    return tag(
        "tr", name, *cells, tag("td", term_bar(known, most), class_="drawn"), class_="chosen" if chosen else None
    )


def _by_cost(decision: Decision) -> list[int]:
    """Return rows by cost, without a cost last; the chosen one first among equals."""
    cost = decision.cost

    def key(place: int) -> tuple[float, bool]:
        known = inf if cost is None or isnan(cost[place]) else float(cost[place])
        return known, decision.candidates[place] != decision.replica

    order = sorted(range(len(decision.candidates)), key=key)
    chosen = list(decision.candidates).index(decision.replica)
    if order.index(chosen) >= CANDIDATES_SHOWN:
        order.remove(chosen)
        order.insert(CANDIDATES_SHOWN - 1, chosen)
    return order


def _sum(decision: Decision, place: int) -> float:
    return sum(max(0.0, float(column[place])) for column in decision.terms.values() if not isnan(column[place]))


def _excluded(decision: Decision) -> Html | None:
    if not decision.excluded:
        return None
    return tag("p", "Excluded: ", ", ".join(f"{name} ({why})" for name, why in sorted(decision.excluded.items())), ".")


def _facts(row: DecisionStatus) -> Html:
    """Return the measured values, as far as the request has ended."""
    decision, sample = row.decision, row.sample
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
