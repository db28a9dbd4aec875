"""The other routers of the group: last report, policy, weights, drains, and what differs; nothing without a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gorgo import formatting
from gorgo.live.admin.page.markup import Html, tag
from gorgo.live.admin.page.snapshot import Snapshot

#: Rows; `/admin/status` has all.
PEERS_SHOWN = 32

_HEADS = ("router", "last report", "policy", "weights", "frozen", "draining", "ejected", "differs")


def peers_section(status: Snapshot) -> Iterator[Html]:
    """Yield the state of the link, and a row per router."""
    store = status.store
    if store is None:
        return
    line = tag("p", formatting.store_line(store), class_="quiet" if store["joined"] else "bad")
    heads = [tag("th", name, scope="col", class_="name" if place == 0 else None) for place, name in enumerate(_HEADS)]
    rows = [_row(row) for row in store["peers"][:PEERS_SHOWN]]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="clients") if rows else None
    yield tag("section", tag("h2", "Routers"), line, tag("div", table, class_="wide") if table else None)


def _row(row: Mapping[str, Any]) -> Html:
    known = "format" not in row["differences"]
    cells = (
        row["policy"],
        row["weights_version"],
        "yes" if row["frozen"] else "no",
        len(row["draining"]),
        len(row["ejected"]),
    )
    return tag(
        "tr",
        tag("th", row["router"], scope="row", class_="name"),
        tag("td", formatting.age(row["age_s"]), class_=None if row["counts"] else "bad"),
        *(tag("td", cell if known else formatting.UNKNOWN) for cell in cells),
        tag("td", "; ".join(row["differences"].values()), class_="bad" if row["differences"] else None),
    )
