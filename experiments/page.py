"""The comparison as one HTML page, self-contained: a table per system, and below each row its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from experiments.published import WITHIN, WORDS, ComparedClaim, Word, shown

_COLOURS: Mapping[Word, str] = {
    "reproduced": "#009E73", "larger": "#0072B2", "smaller": "#B07D00", "reversed": "#C04000", "not tried": "#767676",
}  # fmt: skip
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
th, td { text-align: left; padding: .35rem .6rem; border-top: 1px solid #ddd; vertical-align: top; }
td small { color: #555; } .word { font-weight: 600; white-space: nowrap; }
"""
_HEADER = ("figure", "published", "reproduced here", "ours", "verdict")


def page_of(rows: Sequence[ComparedClaim], about: str) -> str:
    """Return the page; `about` says how the runs were made."""
    tables = "".join(
        _table(system, [row for row in rows if row.claim.system == system])
        for system in dict.fromkeys(row.claim.system for row in rows)
    )
    counts = ", ".join(f"{sum(row.word == word for row in rows)} {word}" for word in WORDS)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Published routing systems, simulated</title><style>{_STYLE}</style>"
        "<h1>Published routing systems, simulated</h1>"
        "<p>Each row is a published figure, the same figure of the same policy in this project's simulator, and that "
        f"of this project's policy on the same runs. A figure within {WITHIN - 1:.0%} of the published one is "
        f"reproduced; else the effect is larger, smaller or reversed. {escape(about)}</p>"
        f"<p>{len(rows)} rows: {counts}.</p>{tables}</html>\n"
    )


def _table(system: str, rows: Sequence[ComparedClaim]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _HEADER)
    return f"<h2>{escape(system)}</h2><table><tr>{head}</tr>{''.join(map(_row, rows))}</table>"


def _row(row: ComparedClaim) -> str:
    claim, published = row.claim, row.claim.published
    ours = (
        "-"
        if row.ours is None
        else f"{shown(row.ours)}<br><small>{escape(claim.ours_name)} {escape(claim.target)}</small>"
    )
    below = "; ".join(text for text in (str(published.source), published.baseline, claim.note) if text)
    return (
        f"<tr><td>{escape(claim.figure)}<br><small>{escape(claim.on)}<br>{escape(below)}</small></td>"
        f"<td>{escape(published.text)}</td><td>{shown(row.reproduced)}</td><td>{ours}</td>"
        f'<td class="word" style="color:{_COLOURS[row.word]}">{row.word}</td></tr>'
    )
