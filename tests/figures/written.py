"""Tables of views, written into the pages that show them."""

from __future__ import annotations

import re
from pathlib import Path

from gorgo.config.atomic import PUBLIC, write_atomically
from tests.figures.marked import Table


def markdown(table: Table) -> str:
    """Return a table as a page has it: the labels, then the columns of the first row."""
    columns = [*next(iter(table.rows.values()))]
    lines = [f"| {' | '.join((*table.labels, *columns))} |", "|---" * (len(table.labels) + len(columns)) + "|"]
    lines += [f"| {' | '.join((*label, *map(str, cells.values())))} |" for label, cells in table.rows.items()]
    return "\n".join(lines) + "\n"


def write_table(page: Path, name: str, table: Table) -> None:
    """Replace what stands between `<!-- figures: NAME -->` and its end, at every such place of the page."""
    # Not by what is around: an empty part would be found a second time, up to the end of the next one.
    part = re.compile(rf"(<!-- figures: {name} -->\n).*?(<!-- /figures -->)", re.DOTALL)
    text, count = part.subn(lambda found: found[1] + markdown(table) + found[2], page.read_text())
    if not count:
        raise LookupError(f"{page.name} has no part for the figure {name}")
    write_atomically(page, text.encode(), mode=PUBLIC)
