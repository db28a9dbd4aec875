"""The whole page and its parts by name: one markup for the first response and for each update.

It works without scripts: a snapshot with a link that reloads it. `page.js` replaces parts by newer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from gorgo import formatting
from gorgo.live.admin.page.clients_section import clients_section
from gorgo.live.admin.page.decisions_section import DecisionsSection
from gorgo.live.admin.page.fleet_section import fleet_section, sources_section
from gorgo.live.admin.page.markup import Child, Html, joined, tag, void
from gorgo.live.admin.page.peers_section import peers_section
from gorgo.live.admin.page.snapshot import Snapshot
from gorgo.live.admin.page.summary_section import alerts_section, chart_section, stats_section
from gorgo.live.admin.page.weights_section import WeightsSection

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
            "sources": sources_section,
            "peers": peers_section,
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
        _part(parts, "sources"),
        _part(parts, "peers"),
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
