"""The whole page and its parts by name: one markup for the first response and for each update.

It works without scripts: a snapshot with a link that reloads it. `page.js` replaces parts by newer ones. Owns the
sections of alerts, statistics, weights, clients and peers, and the forms around them. Leaves the fleet and the
decisions to `sections`, and the data to `snapshot`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gorgo import formatting
from gorgo.live.admin.page.charts import Child, Html, box_line, joined, tag, ttft_chart, void
from gorgo.live.admin.page.sections import DecisionsSection, fleet_section, scaling_section, sources_section
from gorgo.live.admin.page.snapshot import Snapshot
from gorgo.live.control.transactions import WeightsChange

# The top of the page: alerts and statistics of recent requests.


def alerts_section(status: Snapshot) -> Iterator[Html]:
    """Yield the alerts."""
    lines = [tag("li", alert.text, class_=alert.level) for alert in status.alerts]
    many = f"({len(lines)}) " if lines else ""
    yield tag("ul", *(lines or [_all_ready(status)]), data_title=f"{many}GORGO {status.region}")


def stats_section(status: Snapshot) -> Iterator[Html]:
    """Yield the tiles and the window that they cover."""
    stats = status.stats
    failed = f"{stats.failed} failed" if stats.failed else "none failed"
    rate = formatting.UNKNOWN if status.per_s is None else f"{status.per_s:.1f}"
    estimated = f"estimated {formatting.share(stats.estimated_share)}"
    tiles = (
        ("TTFT, median", formatting.ms(stats.ttft_ms_p50), "ms", None),
        ("TTFT, p95", formatting.ms(stats.ttft_ms_p95), "ms", None),
        ("requests", rate, "/s", failed),
        ("in flight", formatting.count(status.in_flight), "", f"{status.queued} queued"),
        ("prompt in cache", formatting.share(stats.cached_share), "", estimated),
        ("prediction error", formatting.ms(stats.error_ms_p50), "ms", "median"),
    )
    requests = "request" if stats.n == 1 else "requests"
    covered = f"{stats.n:,} {requests} that finished in the last {formatting.age(status.span_s)}"
    up = f"up for {formatting.age(status.up_s)}"
    lines = [f"{covered}; {up}."]
    if (broken := formatting.streams_line(status.streams)) is not None:
        lines.append(f"Since the start, {broken}.")
    yield joined(
        [
            tag("div", *(_tile(*one) for one in tiles), class_="tiles"),
            *(tag("p", line, class_="quiet") for line in lines),
        ]
    )


def chart_section(status: Snapshot) -> Iterator[Html]:
    """Yield the chart of TTFT. Its labels are HTML, so they do not stretch with it."""
    chart, top = ttft_chart(status.ttft_series)
    scale = tag(
        "div",
        tag("span", f"{formatting.ms(top)} ms"),
        tag("span", formatting.ms(top / 2)),
        tag("span", "0"),
        class_="scale",
    )
    axis = tag(
        "div",
        tag("span", f"{formatting.age(sum(one.length_s for one in status.ttft_series))} ago"),
        tag("span", "now"),
        class_="axis",
    )
    legend = joined([tag("i", class_="p50"), "median ", tag("i", class_="p95"), "p95"])
    caption = tag("figcaption", tag("b", "Time to first token"), tag("span", legend, class_="legend"))
    yield tag("figure", caption, tag("div", scale, chart, class_="plot"), axis)


def _all_ready(status: Snapshot) -> Html:
    n = sum(len(rows) for rows in status.regions.values())
    return tag("li", "The one replica is ready" if n == 1 else f"All {n} replicas are ready", class_="good")


def _tile(name: str, value: str, unit: str, note: str | None) -> Html:
    shown = tag("b", value, tag("small", unit) if unit else None)
    return tag("div", tag("span", name), shown, tag("small", note) if note else None, class_="tile")


# Weights in force, freeze, and the history of versions.


#: Older ones are in a closed `details`.
VERSIONS_SHOWN = 6


class WeightsSection:
    """Weights in force and versions, newest first. Rendered again only after a change."""

    def __init__(self) -> None:
        self._written: tuple[object, Html] | None = None

    def __call__(self, status: Snapshot) -> Iterator[Html]:
        key = (status.policy, status.version, status.frozen, status.durable, *status.differences, *status.history[-1:])
        if self._written is None or self._written[0] != key:
            html = joined([_freeze_line(status), _in_force(status), _differences(status), _history(status.history)])
            self._written = key, html
        yield self._written[1]


def _freeze_line(status: Snapshot) -> Html:
    what = f"{status.policy}, version {status.version}"
    if status.frozen is None:
        free = tag("span", "not frozen", class_="chip plain")
        return tag("p", tag("b", what), " ", free, " operators and the tuner may change them")
    frozen = status.frozen
    by = "" if frozen.by is None else f" by {frozen.by}"
    reason = "" if frozen.reason is None else f": {frozen.reason}"
    chip = tag("span", "frozen", class_="chip frozen")
    lasting = "" if status.durable else " (no state file: the freeze ends with this process)"
    return tag("p", tag("b", what), " ", chip, f" since {formatting.moment(frozen.since)}{by}{reason}{lasting}")


def _in_force(status: Snapshot) -> Html | None:
    if not status.weights:
        return tag("p", f"{status.policy} has no weights.", class_="quiet")
    cells = []
    for name, value in status.weights.items():
        low, high = status.bounds.get(name, (value, value))
        box = tag("small", f"{low:g} … {high:g}")
        cells.append(tag("div", tag("span", name), tag("b", formatting.number(value)), box_line(value, low, high), box))
    return tag("div", *cells, class_="weights")


def _differences(status: Snapshot) -> Html | None:
    """What was set at run time; edits that wait are alerts."""
    lines = [tag("li", str(difference)) for difference in status.differences if not difference.waits]
    return tag("ul", *lines, class_="quiet") if lines else None


def _history(history: Sequence[WeightsChange]) -> Html:
    rows = [
        _version(change, before)
        for change, before in zip(reversed(history), [*reversed(history[:-1]), None], strict=True)
    ]
    shown, older = rows[:VERSIONS_SHOWN], rows[VERSIONS_SHOWN:]
    parts = [_table(shown)]
    if older:
        parts.append(
            tag("details", tag("summary", f"{len(older)} older versions"), _table(older), id="older", class_="older")
        )
    return joined(parts)


def _table(rows: Sequence[Html]) -> Html:
    heads = [
        tag("th", name, scope="col") for name in ("version", "since, UTC", "policy", "weights", "set by", "reason")
    ]
    return tag(
        "div", tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="versions"), class_="wide"
    )


def _version(change: WeightsChange, before: WeightsChange | None) -> Html:
    by = change.source if change.by is None else f"{change.by} ({change.source})"
    same = before is not None and before.policy == change.policy
    return tag(
        "tr",
        tag("td", change.version),
        tag("td", formatting.moment(change.at)),
        tag("td", change.policy),
        tag("td", _values(change.weights, before.weights if same and before is not None else change.weights)),
        tag("td", by),
        tag("td", change.reason, class_="reason"),
    )


def _values(weights: Mapping[str, float], before: Mapping[str, float]) -> Html:
    """What this version changed stands out."""
    shown = []
    for name, value in weights.items():
        text = f"{name} {formatting.number(value)}"
        shown.append(text if before.get(name) == value else tag("b", text))
    return joined(part for at, text in enumerate(shown) for part in ((", " if at else None), text))


# The last minute of each client: requests, tokens, 429s. Nothing while clients need no key.


#: Clients shown, by tokens; metrics have all.
CLIENTS_SHOWN = 24

_HEADS = ("client", "requests/min", "tokens/min", "429/min")


def clients_section(status: Snapshot) -> Iterator[Html]:
    """Yield the table."""
    if not status.clients:
        return
    heads = [tag("th", name, scope="col", class_="name" if index == 0 else None) for index, name in enumerate(_HEADS)]
    rows = [
        tag(
            "tr",
            tag("th", client.name, scope="row", class_="name"),
            tag("td", formatting.count(client.requests)),
            tag("td", formatting.count(client.tokens)),
            tag("td", formatting.count(client.rejected), class_="bad" if client.rejected else None),
        )
        for client in status.clients[:CLIENTS_SHOWN]
    ]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="clients")
    yield tag("section", tag("h2", "Clients"), tag("div", table, class_="wide"))


# The other routers of the group: last report, policy, weights, drains, and what differs; nothing without a store.


#: Rows; `/admin/status` has all.
PEERS_SHOWN = 32

_COLUMNS = ("router", "last report", "policy", "weights", "frozen", "draining", "ejected", "differs")


def routes_section(status: Snapshot) -> Iterator[Html]:
    """Yield the routes of a policy that learns some, with ages and evictions."""
    if status.routes is not None:
        line = tag("p", formatting.routes_line(asdict(status.routes)), class_="quiet")
        yield tag("section", tag("h2", "Routes"), line)


def peers_section(status: Snapshot) -> Iterator[Html]:
    """Yield the state of the link, and a row per router."""
    store = status.store
    if store is None:
        return
    line = tag("p", formatting.store_line(store), class_="quiet" if store["joined"] else "bad")
    heads = [tag("th", name, scope="col", class_="name" if index == 0 else None) for index, name in enumerate(_COLUMNS)]
    rows = [_row(peer) for peer in store["peers"][:PEERS_SHOWN]]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="clients") if rows else None
    yield tag("section", tag("h2", "Routers"), line, tag("div", table, class_="wide") if table else None)


def _row(peer: Mapping[str, Any]) -> Html:
    readable = "format" not in peer["differences"]
    cells = (
        peer["policy"],
        peer["weights_version"],
        "yes" if peer["frozen"] else "no",
        len(peer["draining"]),
        len(peer["ejected"]),
    )
    return tag(
        "tr",
        tag("th", peer["router"], scope="row", class_="name"),
        tag("td", formatting.age(peer["age_s"]), class_=None if peer["counts"] else "bad"),
        *(tag("td", cell if readable else formatting.UNKNOWN) for cell in cells),
        tag("td", "; ".join(peer["differences"].values()), class_="bad" if peer["differences"] else None),
    )


#: Path of the page and of its cookie.
ROOT = "/admin/page"

#: A part, piece by piece; each piece takes a millisecond or less.
Section = Callable[[Snapshot], Iterator[Html]]
Sections = Mapping[str, Html]


class Writer:
    """Writes the parts of one proxy's page, and caches parts that have not changed.

    Between two pieces everything else that waits gets its turn: streams go on while a page of 64 replicas is written.
    """

    def __init__(self) -> None:
        #: Updated parts, in the order of the page.
        self.parts: dict[str, Section] = {
            "alerts": alerts_section,
            "stats": stats_section,
            "chart": chart_section,
            "fleet": fleet_section,
            "scaling": scaling_section,
            "sources": sources_section,
            "peers": peers_section,
            "routes": routes_section,
            "clients": clients_section,
            "decisions": DecisionsSection(),
            "weights": WeightsSection(),
        }

    async def write(self, status: Snapshot) -> Sections:
        """Return every part of `status`."""
        return {name: joined([piece async for piece in _in_turns(part(status))]) for name, part in self.parts.items()}


async def _in_turns(pieces: Iterator[Html]) -> AsyncIterator[Html]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def status_page(status: Snapshot, parts: Sections, *, every_s: int | None = None) -> str:
    """Return the page. `every_s` makes it reload in browsers without scripts."""
    reload_it = void("meta", http_equiv="refresh", content=every_s) if every_s else None
    body = [
        _header(status),
        tag("noscript", _without_script(every_s)),
        tag("main", _part(parts, "alerts"), _part(parts, "stats"), _part(parts, "chart"), *_sections(parts)),
    ]
    return _page(f"GORGO {status.region}", body, head=[reload_it, tag("script", src=f"{ROOT}/page.js", defer=True)])


def login_page(*, wrong: bool = False) -> str:
    """Return the sign-in form."""
    field = void("input", type="password", name="token", id="token", required=True, autofocus=True, autocomplete="off")
    form = tag(
        "form",
        tag("label", "Admin token", for_="token"),
        field,
        tag("button", "Sign in"),
        tag("p", "Wrong token.", class_="bad", role="alert") if wrong else None,
        tag("p", "The value of GORGO_ADMIN_TOKEN at the proxy's start.", class_="quiet"),
        method="post",
        action=f"{ROOT}/login",
    )
    return _page("GORGO: sign in", [tag("main", tag("h1", "GORGO"), form, class_="login")])


def off_page(variable: str) -> str:
    """Return the page of a proxy without a token."""
    text = f"The admin API is off: start the proxy with a token in {variable}."
    return _page("GORGO", [tag("main", tag("h1", "GORGO"), tag("p", text), class_="login")])


def _header(status: Snapshot) -> Html:
    live = tag("span", f"snapshot of {formatting.clock(status.now)} UTC", id="live", class_="quiet", role="status")
    leave = tag("form", tag("button", "Sign out"), method="post", action=f"{ROOT}/logout")
    return tag("header", tag("h1", "GORGO ", tag("span", status.region)), live, leave)


def _without_script(every_s: int | None) -> Html:
    again = tag("a", "reload", href=ROOT)
    by_itself = tag("a", "reload every 10 s", href=f"{ROOT}?every=10")
    rest = f"; it reloads every {every_s} s." if every_s else joined([", or ", by_itself, "."])
    return tag("p", "Without scripts this is a snapshot: ", again, rest, class_="quiet")


def _sections(parts: Mapping[str, Html]) -> list[Html]:
    wait = tag("span", "newer ones wait while one is open", class_="quiet waits", hidden=True)
    return [
        tag("section", tag("h2", "Fleet"), _part(parts, "fleet")),
        _part(parts, "scaling"),
        _part(parts, "sources"),
        _part(parts, "peers"),
        _part(parts, "routes"),
        _part(parts, "clients"),
        tag("section", tag("h2", "Last decisions ", wait), _part(parts, "decisions")),
        tag("section", tag("h2", "Weights"), _part(parts, "weights")),
    ]


def _part(parts: Mapping[str, Html], name: str) -> Html:
    return tag("div", parts[name], id=name, data_part=True)


def _page(title: str, body: list[Html], *, head: list[Html | None] | None = None) -> str:
    metas: list[Child] = [
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        void("link", rel="icon", href=f"{ROOT}/icon.svg", type="image/svg+xml"),
        void("link", rel="stylesheet", href=f"{ROOT}/page.css"),
        *(head or []),
    ]
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *metas), tag('body', *body), lang='en')}\n"
