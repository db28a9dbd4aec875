"""The last minute of each client: requests, tokens, 429s. Nothing while clients need no key."""

from __future__ import annotations

from collections.abc import Iterator

from gorgo import formatting
from gorgo.live.admin.page.markup import Html, tag
from gorgo.live.admin.page.snapshot import Snapshot

#: Clients shown, by tokens; metrics have all.
CLIENTS_SHOWN = 24

_HEADS = ("client", "requests/min", "tokens/min", "429/min")


def clients_section(status: Snapshot) -> Iterator[Html]:
    """Yield the table."""
    if not status.clients:
        return
    heads = [tag("th", name, scope="col", class_="name" if place == 0 else None) for place, name in enumerate(_HEADS)]
    rows = [
        tag(
            "tr",
            tag("th", row.name, scope="row", class_="name"),
            tag("td", formatting.count(row.requests)),
            tag("td", formatting.count(row.tokens)),
            tag("td", formatting.count(row.rejected), class_="bad" if row.rejected else None),
        )
        for row in status.clients[:CLIENTS_SHOWN]
    ]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="clients")
    yield tag("section", tag("h2", "Clients"), tag("div", table, class_="wide"))
