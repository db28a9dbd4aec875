"""Tables of views, written into the pages that show them."""

from __future__ import annotations

import re
from pathlib import Path

from gorgo.config.atomic import PUBLIC, write_atomically
from tests.figures.marked import Table, View


def markdown(table: Table) -> str:
    """Return a table as a page has it: the labels, then the columns of the first row."""
    columns = [*next(iter(table.rows.values()))]
    lines = [f"| {' | '.join((*table.labels, *columns))} |", "|---" * (len(table.labels) + len(columns)) + "|"]
    lines += [f"| {' | '.join((*label, *map(str, cells.values())))} |" for label, cells in table.rows.items()]
    return "\n".join(lines) + "\n"


def write_table(page: Path, name: str, view: View) -> None:
    """Replace what stands between `<!-- figures: NAME -->` and its end by the first table of the view."""
    part = re.compile(rf"(?<=<!-- figures: {name} -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
    text, count = part.subn(lambda _: markdown(view.tables[0]), page.read_text())
    if not count:
        raise LookupError(f"{page.name} has no part for the figure {name}")
    write_atomically(page, text.encode(), mode=PUBLIC)
