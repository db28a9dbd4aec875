"""`gorgo status`: the fleet as the proxy sees it, or as several do, once or every two seconds.

Owns the command, the console, the loop, which polls on while the proxy does not answer, and the tables: alerts, the
fleet by region, the last decisions, weights with history. The status page formats numbers and ages. Text from clients
and operators is printed without markup and without control characters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gorgo import formatting
from gorgo.cli import options
from gorgo.cli.admin.call import CallError, call_admin, request_admin
from gorgo.cli.admin.explain import by_cost
from gorgo.formatting import first_names


def status(
    url: options.AdminUrls = options.ADMIN_URLS,
    watch: Annotated[bool, typer.Option("--watch", help="Poll every two seconds, until Ctrl-C.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the fleet as the proxy sees it.

    Alerts, the fleet by region, the last decisions with the terms of every candidate, and the weights with their
    history; `-` is unknown or stale. A line has the weights in force and whether they are frozen, the last one the
    model of a policy that learns. The status page shows the rest too. With --watch, --json prints a line per poll.
    Several --url are shown in turn; a last line compares their weights.
    """
    from gorgo.cli.admin.call import as_expected, call_each, end_with, group_line, print_json

    token = options.admin_token()
    if watch:
        if len(url) > 1:
            raise typer.BadParameter("--watch: expected one --url")
        with as_expected(url[0]):
            watch_status(url[0], token, as_json=as_json)
        return
    answers, failures = call_each("GET", url, STATUS_PATH, token)
    if as_json:
        print_json(answers, of=len(url))
    else:
        for address, shown in answers.items():
            with as_expected(address):
                if len(url) > 1:
                    typer.echo(f"{address}:")
                _show(address, shown, token)
        if len(answers) > 1:
            with as_expected(", ".join(answers)):
                typer.echo(group_line({address: shown["routing"] for address, shown in answers.items()}))
    end_with(failures, of=len(url))


def _show(url: str, shown: Mapping[str, Any], token: str | None) -> None:
    """Print the status of one proxy and the line of a model."""
    from gorgo.cli.admin.call import CallError, request_admin
    from gorgo.live.training_status import model_line

    show_status(shown)
    with suppress(CallError):  # an older proxy has no such route
        learned = model_line(request_admin("GET", url, "/admin/model", token))
        if learned is not None:
            typer.echo(plain(learned).plain)


STATUS_PATH = "/admin/status"
INTERVAL_S = 2.0
#: Lines for a file or a pipe: every column, whatever the terminal, unless `COLUMNS` says how wide.
PIPE_WIDTH = 240


def show_status(status: Mapping[str, Any]) -> None:
    """Print the status once."""
    console = _console()
    console.print(status_view(status, width=console.width))


def watch_status(url: str, token: str | None, *, as_json: bool) -> None:
    """Show the status until Ctrl-C, which is no failure; exit code 1 only if the first call fails."""
    polls = _polls(url, token)
    try:
        if as_json:
            for status in polls:
                typer.echo(json.dumps(status, allow_nan=False))
        else:
            _follow(polls)
    except KeyboardInterrupt:
        return


def _follow(polls: Iterator[Mapping[str, Any]]) -> None:
    console = _console()
    if not console.is_terminal:
        for status in polls:
            console.print(_shown(status, console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in polls:
            live.update(_shown(status, console.width), refresh=True)


def _shown(status: Mapping[str, Any], width: int) -> RenderableType:
    failure = status.get("failure")
    if failure is None:
        return status_view(status, width=width)
    return Group(Text("no answer; polling every two seconds", style="bold red"), plain(failure))


def _polls(url: str, token: str | None) -> Iterator[Mapping[str, Any]]:
    """Yield one status after another; `{"failure": TEXT}` without an answer."""
    yield call_admin("GET", url, STATUS_PATH, token)
    while True:
        time.sleep(INTERVAL_S)
        try:
            yield request_admin("GET", url, STATUS_PATH, token)
        except CallError as failure:
            yield {"failure": str(failure)}


def _console() -> Console:
    sized = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if sized else PIPE_WIDTH, highlight=False)


# The tables.


#: On narrower terminals columns are left out rather than cut.
WIDE = 181
CANDIDATES_SHOWN = 8
DECISIONS_SHOWN = 3
CLIENTS_SHOWN = 12
VERSIONS_SHOWN = 6
ENGINES_SHOWN = 6
CACHES_SHOWN = 6
NAMES_SHOWN = 6

Row = Mapping[str, Any]
#: Name of a column, its text for a replica, and its place in the order in which a narrow terminal gets columns, as many
#: as fit; 0 is wide terminals alone.
Column = tuple[str, Callable[[Row], str], int]

_STYLES = {"ready": "green", "ejected": "bold red"}


def status_view(status: Row, *, width: int) -> RenderableType:
    """Return all tables, for a terminal of `width` columns."""
    parts: list[RenderableType] = [_headline(status), *_alerts(status), _stats(status["recent_stats"], status)]
    parts += [*_streams(status), Text()]
    parts.append(_fleet(status, width=width))
    parts += [
        *_engines(status),
        *_caches(status),
        *_sources(status),
        *_scaling(status),
        *_peers(status),
        *_workers(status),
        *_routes(status),
    ]
    if status["clients"]:
        parts += [Text(), _clients(status["clients"])]
    if status["decisions"]:
        parts += [Text(), _decisions(status["decisions"][:DECISIONS_SHOWN], width=width)]
    return Group(*parts, Text(), _history(status), *_differences(status), _in_force(status))


def plain(text: object) -> Text:
    """Return a text from outside without markup and control characters.

    >>> plain("[red]\\x1b[2J").plain
    '[red]?[2J'
    """
    return Text("".join(character if character.isprintable() else "?" for character in str(text)))


def _headline(status: Row) -> Text:
    line = Text("GORGO ", style="bold").append_text(plain(status["region"]))
    line.append(
        f", {formatting.clock(status['now_s'])} UTC, up for {formatting.age(status['up_s'])}", style="not bold dim"
    )
    return line


def _alerts(status: Row) -> Iterator[Text]:
    for alert in status["alerts"]:
        line = plain(f"! {alert['text']}")
        line.stylize("bold red" if alert["level"] == "bad" else "yellow")
        yield line
    if not status["alerts"]:
        n = len(status["replicas"])
        yield Text("the one replica is ready" if n == 1 else f"all {n} replicas are ready", style="green")


def _stats(recent: Row, status: Row) -> Text:
    """Return the sentence of the recent requests; what is unknown is left out."""
    parts = [_finished(recent), f"{status['in_flight']} in flight, {status['queued']} queued"]
    if recent["ttft_ms_p50"] is not None:
        parts.append(
            f"TTFT median {formatting.ms(recent['ttft_ms_p50'])} ms, p95 {formatting.ms(recent['ttft_ms_p95'])} ms"
        )
    if recent["cached_share"] is not None:
        estimated = f"({formatting.share(recent['estimated_share'])} estimated)"
        parts.append(f"{formatting.share(recent['cached_share'])} of prompts in cache {estimated}")
    if recent["error_ms_p50"] is not None:
        parts.append(f"median prediction error {formatting.ms(recent['error_ms_p50'])} ms")
    return Text("; ".join(parts))


def _finished(recent: Row) -> str:
    n, failed, span = recent["n"], recent["failed"], formatting.age(recent["span_s"])
    if not n:
        return f"no request finished in {span}"
    rate = f" ({recent['per_s']:.1f}/s)" if recent["per_s"] is not None else ""
    return f"{n:,} request{'' if n == 1 else 's'} in {span}{rate}, {failed or 'none'} failed"


# -- the fleet


def _kv(replica: Row) -> str:
    used, size = replica["used_tokens"], replica["kv_capacity_tokens"]
    return formatting.share(None if used is None or not size else used / size)


FLEET: tuple[Column, ...] = (
    ("rtt ms", lambda replica: formatting.ms(replica["rtt_ms"]), 4),
    ("age", lambda replica: formatting.age(replica["probe_age_s"]), 0),
    ("open", lambda replica: formatting.count(replica["in_flight_requests"]), 2),
    ("tokens", lambda replica: formatting.count(replica["in_flight_tokens"]), 0),
    ("to prefill", lambda replica: formatting.count(replica["queued_prefill_tokens"]), 8),
    ("work ms", lambda replica: formatting.ms(replica["backlog_s"] * 1e3) if replica["backlog_s"] else "0", 6),
    ("running", lambda replica: formatting.count(replica["running_requests"]), 0),
    ("queued", lambda replica: formatting.count(replica["queued_requests"]), 5),
    ("kv", _kv, 0),
    ("age", lambda replica: formatting.age(replica["scrape_age_s"]), 0),
    ("cached", lambda replica: formatting.count(replica["index_tokens"]), 0),
    ("prefill/s", lambda replica: formatting.count(replica["prefill_tokens_per_s"]), 0),
    ("tpot ms", lambda replica: formatting.ms(replica["tpot_ms"]), 0),
    ("n", lambda replica: formatting.count(replica["recent_stats"]["n"]), 7),
    ("p50 ms", lambda replica: formatting.ms(replica["recent_stats"]["ttft_ms_p50"]), 0),
    ("p95 ms", lambda replica: formatting.ms(replica["recent_stats"]["ttft_ms_p95"]), 3),
    ("hit", lambda replica: formatting.share(replica["recent_stats"]["cached_share"]), 0),
    ("failed", lambda replica: formatting.count(replica["recent_stats"]["failed"]), 1),
)


def _fleet(status: Row, *, width: int) -> Table:
    named = [
        ("region", _regions(status["replicas"])),
        ("replica", [plain(replica["name"]) for replica in status["replicas"]]),
    ]
    named.append(("state", [_state(replica) for replica in status["replicas"]]))
    if width < WIDE and sum(_width(name, cells) for name, cells in named) > width + 1:
        del named[0]
    measures = [(name, [Text(show(replica)) for replica in status["replicas"]]) for name, show, _ in FLEET]
    ranks = [rank if rank or width >= WIDE else None for _, _, rank in FLEET]
    left = width + 1 - sum(_width(name, cells) for name, cells in named)  # no divider behind the last
    shown = _fitting([_width(name, cells) for name, cells in measures], ranks, left)
    table = _table(*(name for name, _ in named))
    for index in shown:
        table.add_column(measures[index][0], justify="right", no_wrap=True)
    columns = [*named, *(measures[index] for index in shown)]
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _regions(rows: Sequence[Row]) -> list[Text]:
    """Return the region of each row, named where it begins."""
    before = [None, *(replica["region"] for replica in rows)]
    return [
        plain("" if replica["region"] == last else replica["region"])
        for replica, last in zip(rows, before, strict=False)
    ]


def _width(name: str, cells: Sequence[Text]) -> int:
    """Return the characters of a column, with its padding and the divider behind it."""
    return max(cell_len(name), *(cell.cell_len for cell in cells), 0) + 2


def _fitting(widths: Sequence[int], ranks: Sequence[int | None], left: int) -> list[int]:
    """Return the places of the columns that fit into `left` characters, those of lower ranks first; `None` is none."""
    shown: list[int] = []
    for _, index in sorted((rank, index) for index, rank in enumerate(ranks) if rank is not None):
        if widths[index] <= left:
            left -= widths[index]
            shown.append(index)
    return sorted(shown)


def _engines(status: Row) -> Iterator[Text]:
    """Yield a line per kind of engine, accelerator and list of models, for replicas that have all in common."""
    alike: dict[tuple[str, str | None, tuple[str, ...]], list[str]] = {}
    for replica in status["replicas"]:
        accelerator = replica.get("accelerator")  # an older proxy has none
        key = formatting.engine(replica["engine"]), accelerator, tuple(replica["models"])
        alike.setdefault(key, []).append(replica["name"])
    for (engine, accelerator, models), names in list(alike.items())[:ENGINES_SHOWN]:
        listed = f"models {first_names(models, NAMES_SHOWN)}" if models else "any model"
        yield plain(f"{first_names(names, NAMES_SHOWN)}: {', '.join(filter(None, (engine, accelerator, listed)))}")


def _caches(status: Row) -> Iterator[Text]:
    """Yield a line per replica whose cache is known by reports, or whose feed has a fault."""
    reporting = [replica for replica in status["replicas"] if formatting.reports_cache(replica.get("cache"))]
    for replica in reporting[:CACHES_SHOWN]:
        yield plain(f"{replica['name']}: cache by {formatting.cache_line(replica['cache'])}")
    if len(reporting) > CACHES_SHOWN:
        yield Text(f"caches of {len(reporting) - CACHES_SHOWN} more replicas: GET /admin/fleet")


def _scaling(status: Row) -> Iterator[Text]:
    """Yield a line per region and model with a wanted number of replicas."""
    for demand in status.get("scaling", ()):  # an older proxy has none
        yield plain(formatting.wanted_line(demand))


def _sources(status: Row) -> Iterator[Text]:
    """Yield a line per fleet source, and one per object without a replica."""
    for source in status.get("fleet_sources", ()):  # an older proxy has none
        yield plain(formatting.source_line(source))
        for problem in source["problems"][:NAMES_SHOWN]:
            yield plain(f"  no replica of {problem}")


def _peers(status: Row) -> Iterator[Text]:
    """Yield the link to the store of several routers, and a line per peer."""
    store = status.get("peer_store")  # an older proxy has none
    if store is not None:
        yield plain(formatting.store_line(store))
        for peer in store["peers"][:NAMES_SHOWN]:
            yield plain(f"  {formatting.peer_line(peer)}")


def _workers(status: Row) -> Iterator[Text]:
    """Yield the processes of a router that has several."""
    line = formatting.workers_line(status.get("workers") or ())  # an older proxy has none
    if line is not None:
        yield plain(line)


def _streams(status: Row) -> Iterator[Text]:
    """Yield the answers that broke off since the start."""
    line = formatting.streams_line(status.get("streams") or {})  # an older proxy has none
    if line is not None:
        yield plain(line)


def _routes(status: Row) -> Iterator[Text]:
    """Yield the routes of a policy that learns some."""
    routes = status.get("routes")  # an older proxy has none
    if routes is not None:
        yield Text(formatting.routes_line(routes))


def _state(replica: Row) -> Text:
    """Return the health state, its age, and whether the replica registered by itself; alerts have the reason."""
    state = Text(replica["health_state"], style=_STYLES.get(replica["health_state"], "yellow"))
    since_s = replica["in_state_for_s"]
    if since_s is not None:
        state.append(f" {formatting.age(since_s)}", style="not bold dim")
    return state.append(", registered", style="not bold dim") if replica["registered"] else state


# -- clients


def _clients(clients: Sequence[Row]) -> Table:
    """Return a line per client with the counts of the last minute."""
    table = _table("client")
    for name in ("requests/min", "tokens/min", "429/min"):
        table.add_column(name, justify="right", no_wrap=True)
    for client in clients[:CLIENTS_SHOWN]:
        table.add_row(
            plain(client["name"]), *(formatting.count(client[name]) for name in ("requests", "tokens", "rejected"))
        )
    return table


# -- decisions


def _decisions(decisions: Sequence[Row], *, width: int) -> Table:
    """Return a line per candidate: the chosen one with a star, then the others by cost.

    A narrow terminal has as many terms as fit beside the cost.
    """
    terms = list(
        dict.fromkeys(name for one in decisions for candidate in one["candidates"] for name in candidate["terms"])
    )
    wide = width >= WIDE
    of_request = ("cached", "predicted", "observed", "off", "status") if wide else ("predicted", "observed")
    rows: list[list[Text]] = []
    chosen: list[bool] = []
    for decision in decisions:
        outcome = _outcome(decision)
        for index, candidate in enumerate(by_cost(decision)[:CANDIDATES_SHOWN]):
            request = "" if index else _short(decision["request_id"], decision["attempt"])
            numbers = [formatting.term(candidate["terms"].get(name)) for name in terms]
            cells = ["" if index else outcome[column] for column in of_request]
            line = (
                request,
                f"{'  ' if index else '* '}{candidate['replica']}",
                *numbers,
                formatting.term(candidate["cost"]),
                *cells,
            )
            rows.append([plain(text) for text in line])
            chosen.append(not index)
    names = ["request", "candidate", *terms, "cost", *of_request]
    widths = [_width(name, [line[index] for line in rows]) for index, name in enumerate(names)]
    # The terms come last: what they add up to is in the cost.
    ranks = [index if wide or not 2 <= index < 2 + len(terms) else index + len(names) for index in range(len(names))]
    shown = list(range(len(names))) if wide else _fitting(widths, ranks, width + 1)
    table = _table(*(names[index] for index in shown if index < 2))
    for index in shown:
        if index >= 2:
            table.add_column(plain(names[index]), justify="right", no_wrap=True)
    for texts, best in zip(rows, chosen, strict=True):
        table.add_row(*(texts[index] for index in shown), style="bold" if best else None)
    return table


def _outcome(decision: Row) -> dict[str, str]:
    cached = decision["estimated_cached_tokens"] / decision["prompt_tokens"] if decision["prompt_tokens"] else None
    sample = decision["sample"]
    status = "retried" if decision["followed"] else "open"
    return {
        "cached": formatting.share(cached),
        "predicted": formatting.ms(decision["predicted_ttft_ms"]),
        "observed": formatting.ms(None if sample is None else sample["ttft_ms"]),
        "off": formatting.signed_ms(decision["error_ms"]),
        "status": status if sample is None else str(sample["status"]),
    }


def _short(request_id: str, attempt: int) -> str:
    """Return enough of an id to find it in a log."""
    cut = request_id if len(request_id) <= 20 else f"{request_id[:19]}…"
    return cut if attempt == 1 else f"{cut} #{attempt}"


# -- weights


def _history(status: Row) -> Table:
    table = _table("version", "since, UTC", "policy")
    for name in ("weights", "set by", "reason"):
        table.add_column(name, overflow="fold")
    for change in reversed(status["history"][-VERSIONS_SHOWN:]):
        values = ", ".join(f"{name} {value:g}" for name, value in change["weights"].items())
        by = change["source"] if change["by"] is None else f"{change['by']} ({change['source']})"
        cells = (
            change["version"],
            formatting.moment(change["at"]),
            change["policy"],
            values,
            by,
            change["reason"] or "",
        )
        table.add_row(*map(plain, cells))
    return table


def _differences(status: Row) -> Iterator[Text]:
    """What was set at run time; edits of regions.yaml that wait are alerts."""
    for difference in status["differences"]:
        if not difference["waits"]:
            yield plain(difference["text"])


def _in_force(status: Row) -> Text:
    from gorgo.cli.admin.routing import routing_line

    return plain(routing_line(status["routing"]))


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    return table
