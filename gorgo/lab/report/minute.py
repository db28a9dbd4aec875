"""One slow minute as a page: who waited, for what, where, behind whose load, and what an oracle would have done.

Owns the comparison of a minute of a request log with the hour before it, and its tables and plot. Leaves the twin's
runs to `gorgo.cli.measure.report`, and the page's form to `report`.

Theory of operation. A request belongs to the minute in which it was received. The parts of its time to a first token
are those that the router logged. Its wait is laid to clients by what was before it: the uncached prompt tokens of each
client whose first token had not come yet, of all replicas for the time at the router, and of its own replica for the
engine's queue and the unexplained rest. The share of a client is that of the tokens, weighted by the waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gorgo.core.latency.ttft import PARTS
from gorgo.errors import ReportError
from gorgo.formatting import clock, ms, share
from gorgo.lab.report.report import MAX_ROWS, PageTable, Section, TableRow, render_page
from gorgo.lab.report.style import BROAD, COLOURS, NARROW, Layout, panels, svg_document, svg_element
from gorgo.lab.request_log import LoggedRequest
from gorgo.lab.simulate.compare import mean_of_known

#: Of the page's minute, and of what it is compared with.
MINUTE_S, BEFORE_S = 60.0, 3600.0
#: Rows of the slowest requests.
SLOWEST = 20
#: Fewer requests make no usual time.
LEAST_BEFORE = 10
#: Less is what a log rounds away.
_LEAST_MORE_S = 0.001
#: Parts that wait for others' work: before all replicas, and at one.
_WAITS_ANYWHERE, _WAITS_THERE = ("router",), ("queue", "residual")
#: A client without a name.
NO_KEY = "(no key)"


@dataclass(frozen=True, slots=True)
class PartRow:
    """Mean times of the minute's requests and of those of the hour before, s; `None` without requests."""

    part: str
    minute_s: float | None
    before_s: float | None

    @property
    def more_s(self) -> float | None:
        """Return how much longer it took in the minute."""
        return None if self.minute_s is None or self.before_s is None else self.minute_s - self.before_s


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What a replica or a client had: requests and tokens of the minute, the same of a usual minute, median TTFT, s."""

    name: str
    requests: int
    uncached_tokens: int
    output_tokens: int
    failed: int
    usual_requests: float
    usual_uncached_tokens: float
    ttft_s: float | None
    usual_ttft_s: float | None
    #: Most requests that a replica had at once; of the waits of the minute, the share behind a client's requests.
    most_at_once: int = 0
    blame: float | None = None


@dataclass(frozen=True, slots=True)
class TwinRow:
    """The same minute in the simulation under a rule: requests, median and p95 of their TTFT, s."""

    name: str
    requests: int
    ttft_s_p50: float | None
    ttft_s_p95: float | None


@dataclass(frozen=True, slots=True)
class SlowMinute:
    """The minute that begins at `start_s`, a date."""

    start_s: float
    requests: tuple[LoggedRequest, ...]
    before: tuple[LoggedRequest, ...]
    parts: tuple[PartRow, ...]
    replicas: tuple[LoadRow, ...]
    clients: tuple[LoadRow, ...]

    @property
    def verdict(self) -> str:
        """Return in a sentence which part grew most, where, and behind whose load."""
        grown = [(part_row.more_s, part_row.part) for part_row in self.parts if part_row.more_s is not None]
        if not grown:
            return "There is no usual minute to compare it with: the log has too few requests before it."
        more_s, part = max(grown)
        if more_s < _LEAST_MORE_S:
            return "No part took longer than in the hour before."
        words = f"{part} took {ms(more_s * 1e3)} ms longer per request than in the hour before"
        slower = [replica for replica in self.replicas if (replica.ttft_s or 0.0) > 1.5 * (replica.usual_ttft_s or inf)]
        if slower:
            names = ", ".join(replica.name for replica in slower[:3])
            words += f", {'at all replicas' if len(slower) == len(self.replicas) > 1 else f'at {names}'}"
        blamed = max(self.clients, key=lambda client: client.blame or 0.0)
        if part in (*_WAITS_ANYWHERE, *_WAITS_THERE) and (blamed.blame or 0.0) >= 0.5 and len(self.clients) > 1:
            words += f", for {share(blamed.blame)} behind requests of {blamed.name}"
        return f"{words[0].upper()}{words[1:]}."


def p95(values: Sequence[float]) -> float | None:
    """Return the 95th percentile, as the least value that no more than 5 % exceed; `None` of nothing.

    >>> p95([float(number) for number in range(1, 101)])
    95.0
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * 95 // 100) - 1)] if ordered else None


def slow_minute(rows: Sequence[LoggedRequest], start_s: float) -> SlowMinute:
    """Return the minute from `start_s` on, of rows in order of time. Raises `ReportError` if it has no request."""
    inside = tuple(request for request in rows if start_s <= request.received_s < start_s + MINUTE_S)
    before = tuple(request for request in rows if start_s - BEFORE_S <= request.received_s < start_s)
    if not inside:
        first, last = clock(rows[0].received_s), clock(rows[-1].received_s)
        problem = f"no request was received in the minute from {clock(start_s)} UTC"
        raise ReportError(f"{problem}; expected a minute between {first} and {last} UTC, which the log has")
    enough = before if len(before) >= LEAST_BEFORE else ()
    running = [request for request in rows if request.received_s < start_s + MINUTE_S and _end_s(request) > start_s]
    blame = _blame(inside, running)
    minutes = max(1.0, (start_s - enough[0].received_s) / MINUTE_S) if enough else 1.0

    def loads(name_of: Callable[[LoggedRequest], str | None]) -> list[LoadRow]:
        names = dict.fromkeys(name_of(request) for request in (*inside, *enough))
        loads_by_name = [_load(name, inside, enough, minutes, name_of) for name in names if name is not None]
        return sorted(loads_by_name, key=lambda load: -load.uncached_tokens)

    replicas = [
        replace(load, most_at_once=_most_at_once([one for one in running if one.replica == load.name], start_s))
        for load in loads(lambda logged: logged.replica)
    ]
    clients = [replace(load, blame=blame.get(load.name)) for load in loads(client_of)]
    return SlowMinute(start_s, inside, before, _parts(inside, enough), tuple(replicas), tuple(clients))


def client_of(request: LoggedRequest) -> str:
    """Return the name of a request's client."""
    return NO_KEY if request.client is None else request.client


def _end_s(request: LoggedRequest) -> float:
    return request.received_s + (request.e2e_s or 0.0)


def _parts(inside: Sequence[LoggedRequest], before: Sequence[LoggedRequest]) -> tuple[PartRow, ...]:
    part_rows = []
    for index, part in enumerate(PARTS):
        minute_s, before_s = (
            mean_of_known(request.ttft_parts_s[index] for request in rows if request.ttft_parts_s)
            for rows in (inside, before)
        )
        part_rows.append(PartRow(part, minute_s, before_s))
    return (*part_rows, PartRow("decode", mean_of_known(map(_decode_s, inside)), mean_of_known(map(_decode_s, before))))


def _decode_s(request: LoggedRequest) -> float | None:
    return None if request.ttft_s is None or request.e2e_s is None else max(0.0, request.e2e_s - request.ttft_s)


def _uncached(request: LoggedRequest) -> int:
    return max(0, request.input_tokens - (request.cached_tokens or 0))


def _load(
    name: str,
    inside: Sequence[LoggedRequest],
    before: Sequence[LoggedRequest],
    minutes: float,
    name_of: Callable[[LoggedRequest], str | None],
) -> LoadRow:
    mine, usual = ([request for request in rows if name_of(request) == name] for rows in (inside, before))
    return LoadRow(
        name=name,
        requests=len(mine),
        uncached_tokens=sum(map(_uncached, mine)),
        output_tokens=sum(request.output_tokens or 0 for request in mine),
        failed=sum(request.status >= 500 for request in mine),
        usual_requests=len(usual) / minutes,
        usual_uncached_tokens=sum(map(_uncached, usual)) / minutes,
        ttft_s=_median(mine),
        usual_ttft_s=_median(usual),
    )


def _median(rows: Sequence[LoggedRequest]) -> float | None:
    ttfts_s = [request.ttft_s for request in rows if request.ttft_s is not None]
    return median(ttfts_s) if ttfts_s else None


def _most_at_once(rows: Sequence[LoggedRequest], start_s: float) -> int:
    """Return the most requests that were in flight at one moment of the minute."""
    changes = [(max(request.received_s, start_s), 1) for request in rows]
    changes += [(_end_s(request), -1) for request in rows]
    most = count = 0
    for at_s, change in sorted(changes):
        if at_s >= start_s + MINUTE_S:
            break
        count += change
        most = max(most, count)
    return most


def _blame(inside: Sequence[LoggedRequest], running: Sequence[LoggedRequest]) -> dict[str, float]:
    """Return of the waits of the minute's requests the share of each client whose prompts were before them."""
    waits: dict[str, float] = defaultdict(float)
    for request in inside:
        before = [other for other in running if other.received_s < request.received_s < _first_s(other)]
        there = [other for other in before if other.replica == request.replica]
        for parts, others in ((_WAITS_ANYWHERE, before), (_WAITS_THERE, there)):
            waited_s = sum(request.ttft_parts_s[PARTS.index(part)] for part in parts) if request.ttft_parts_s else 0.0
            total = sum(map(_uncached, others))
            for other in others if total else ():
                waits[client_of(other)] += waited_s * _uncached(other) / total
    total_s = sum(waits.values())
    return {client: waited_s / total_s for client, waited_s in waits.items()} if total_s else {}


def _first_s(request: LoggedRequest) -> float:
    """Return when the prompt of a request had been computed."""
    return _end_s(request) if request.ttft_s is None else request.received_s + request.ttft_s


# The page.


def minute_page(minute: SlowMinute, twins: Sequence[TwinRow] = ()) -> str:
    """Return the page of a minute; `twins` are what the simulation made of it."""
    tables = [_parts_table(minute), *([_twin_table(minute, twins)] if twins else [])]
    tables += [_replicas_table(minute), _clients_table(minute), _slowest_table(minute)]
    section: Section = {"title": minute.verdict, "note": "", "tables": tables, "plots": [_plot(minute)], "files": ()}
    return render_page(f"The minute from {clock(minute.start_s)} UTC", [section], footnotes=False)


def _ms(seconds: float | None) -> str:
    return ms(None if seconds is None else seconds * 1e3)


def _parts_table(minute: SlowMinute) -> PageTable:
    rows = [
        TableRow(part_row.part, (_ms(part_row.minute_s), _ms(part_row.before_s), _ms(part_row.more_s)))
        for part_row in minute.parts
    ]
    note = "Means per request. Router includes its queue; residual is what no estimate explains, as foreign load."
    header = ("part", "this minute", "hour before", "more")
    return PageTable("What the time consisted of, ms", header, tuple(rows), note=note)


def _replicas_table(minute: SlowMinute) -> PageTable:
    header = (
        "replica",
        "requests",
        "usual",
        "uncached tokens",
        "usual",
        "most at once",
        "failed",
        "TTFT p50 ms",
        "usual",
    )
    rows = [
        TableRow(
            load.name,
            (
                f"{load.requests:,}",
                f"{load.usual_requests:,.1f}",
                f"{load.uncached_tokens:,}",
                f"{load.usual_uncached_tokens:,.0f}",
                f"{load.most_at_once:,}",
                f"{load.failed:,}",
                _ms(load.ttft_s),
                _ms(load.usual_ttft_s),
            ),
        )
        for load in minute.replicas[:MAX_ROWS]
    ]
    note = f"Usual: of a minute of the hour before, which has {len(minute.before):,} requests."
    return PageTable("The fleet", header, tuple(rows), max(0, len(minute.replicas) - MAX_ROWS), note)


def _clients_table(minute: SlowMinute) -> PageTable:
    header: tuple[str, ...] = ("client", "requests", "usual", "uncached tokens", "usual", "output tokens")
    header = (*header, "TTFT p50 ms", "usual", "waits behind it")
    rows = [
        TableRow(
            load.name,
            (
                f"{load.requests:,}",
                f"{load.usual_requests:,.1f}",
                f"{load.uncached_tokens:,}",
                f"{load.usual_uncached_tokens:,.0f}",
                f"{load.output_tokens:,}",
                _ms(load.ttft_s),
                _ms(load.usual_ttft_s),
                share(load.blame),
            ),
        )
        for load in minute.clients[:MAX_ROWS]
    ]
    note = "Waits behind it: of the time at the router, in engines' queues and unexplained, by the prompts before."
    return PageTable("Whose load", header, tuple(rows), max(0, len(minute.clients) - MAX_ROWS), note)


def _slowest_table(minute: SlowMinute) -> PageTable:
    slowest = sorted(minute.requests, key=lambda request: -(request.ttft_s or request.e2e_s or 0.0))
    rows = []
    for request in slowest[:SLOWEST]:
        parts = [_ms(part) for part in request.ttft_parts_s] or ["-"] * len(PARTS)
        what = (
            client_of(request),
            request.replica or "-",
            f"{request.status}",
            f"{request.attempts}",
            f"{request.input_tokens:,}",
        )
        rows.append(
            TableRow(clock(request.received_s), (*what, f"{request.cached_tokens or 0:,}", _ms(request.ttft_s), *parts))
        )
    header = ("received", "client", "replica", "status", "attempts", "tokens", "cached", "TTFT ms", *PARTS)
    return PageTable("The slowest requests, parts in ms", header, tuple(rows), max(0, len(slowest) - SLOWEST))


def _twin_table(minute: SlowMinute, twins: Sequence[TwinRow]) -> PageTable:
    ttfts_s = [request.ttft_s for request in minute.requests if request.ttft_s is not None]
    rows = [TableRow("as it was", (f"{len(ttfts_s):,}", _ms(median(ttfts_s) if ttfts_s else None), _ms(p95(ttfts_s))))]
    for twin in twins:
        cells = f"{twin.requests:,}", _ms(twin.ttft_s_p50), _ms(twin.ttft_s_p95)
        rows.append(TableRow(f"{twin.name}, simulated", cells, is_reference=twin.name == "oracle"))
    note = (
        "The same requests in virtual time on the fleet of regions.yaml. Compare the oracle, which knows the state of "
        "every engine, with the simulated policy, not with what was: engines and network are models."
    )
    header = ("rule", "requests", "TTFT p50 ms", "p95 ms")
    return PageTable("Had the policy known better", header, tuple(rows), note=note)


def _plot(minute: SlowMinute) -> dict[str, object]:
    """Draw each request of the minute as a bar of its parts, in the order of time."""
    title = "Each request by its parts"
    drawn = {
        name: svg_document(partial(_draw, minute, layout), key=name)
        for name, layout in (("minute", BROAD), ("minute-narrow", NARROW))
    }
    broad, narrow = (Markup(svg_element(text, key=name, title=title)) for name, text in drawn.items())
    return {"title": title, "note": "", "broad": broad, "narrow": narrow, "files": ()}


def _draw(minute: SlowMinute, layout: Layout) -> Figure:
    figure, (panel,) = panels(1, layout, height=3.2)
    rows = [request for request in minute.requests if request.ttft_parts_s]
    x = [request.received_s - minute.start_s for request in rows]
    base = [0.0] * len(rows)
    for index in range(len(PARTS)):
        heights = [request.ttft_parts_s[index] for request in rows]
        panel.bar(x, heights, width=0.35, bottom=base, color=COLOURS[index])
        base = [below + height for below, height in zip(base, heights, strict=True)]
    panel.set_xlim(-1.0, MINUTE_S + 1.0)
    panel.set_xlabel("received, s of the minute")
    panel.set_ylabel("time to first token, s")
    patches = [Patch(color=colour, label=part) for part, colour in zip(PARTS, COLOURS, strict=False)]
    figure.legend(handles=patches, loc="outside upper left", ncols=layout.columns + 2, fontsize=8.5)
    return figure
