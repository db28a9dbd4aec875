"""What was published, with its place in the source, and the verdict on what the simulation gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, log
from typing import Any, Literal

from experiments.runner import Runs, Task
from gorgo.lab.simulate.compare import Ratio

Word = Literal["reproduced", "larger", "smaller", "reversed", "not tried"]
WORDS: tuple[Word, ...] = ("reproduced", "larger", "smaller", "reversed", "not tried")
#: A figure this near to the published one is reproduced: hosts of one kind differ by as much and more.
WITHIN = 1.10
#: A single seed has no interval; a ratio this near to 1 is no effect.
NO_EFFECT = 1.02
#: The published systems' documents, by the key of a source.
DOCUMENTS: Mapping[str, str] = {
    "gorgo": "GORGO paper",
    "gorgo rerun": "GORGO authors' note of 27 July 2026, a rerun that is not in the paper",
    "lodestar": "Lodestar paper",
    "llm-d": "llm-d, post on predicted-latency scheduling",
    "push map": "post on a push-based cache map",
    "ranvier": "Ranvier, post on multi-depth routing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published figure and where it is printed. A place without a number is described: posts number nothing."""

    document: str  #: A key of `DOCUMENTS`.
    place: str  #: Its table or figure there, then the row and the column.
    row: str
    column: str
    text: str  #: As printed, a range where several loads were measured.
    low: float  #: The same as numbers; of one figure they are equal.
    high: float  #: Infinite of "better".
    baseline: str = ""  #: The printed figures behind a ratio, or what it was measured against.

    @classmethod
    def of(cls, document: str, place: str, row: str, column: str, text: str, baseline: str = "") -> Published:
        """Return a figure that is printed as a number, or as a range `low-high`.

        Example
        -------
        >>> found = Published.of("lodestar", "evaluation", "8xA30", "mean TTFT", "1.02-2.15")
        >>> found.low, found.high, found.source
        (1.02, 2.15, 'Lodestar paper, evaluation: 8xA30; mean TTFT')
        """
        low, _, high = text.partition("-")
        return cls(
            document=document, place=place, row=row, column=column, text=text, low=float(low), high=float(high or low),
            baseline=baseline,
        )  # fmt: skip

    @property
    def source(self) -> str:
        return f"{DOCUMENTS[self.document]}, {self.place}: {self.row}; {self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published figure, and how the simulation gives the same."""

    system: str
    on: str  #: Fleet and traffic.
    figure: str  #: What is measured, of what against what.
    published: Published
    tasks: Sequence[Task] = ()  #: Runs that it needs.
    #: The figure of the published system and of this project's policy from the runs; None: not tried.
    reproduced: Callable[[Runs], Ratio | None] | None = None
    ours: Callable[[Runs], Ratio | None] | None = None
    ours_name: str = ""  #: This project's policy.
    target: str = ""  #: What this project's policy has to reach, as the figure is printed; empty: nothing is claimed.
    is_ratio: bool = True  #: Whether 1 is no effect.
    note: str = ""  #: Why it is not tried, or what is different here.


def verdict_on(published: Published, found: Ratio | None, *, is_ratio: bool = True) -> Word:
    """Return how a figure compares with the published one.

    A figure within 10 % of the published one, or of its range, is reproduced. A ratio is reversed if it is surely on
    the other side of 1, and else larger or smaller by its distance from 1.

    Example
    -------
    >>> published = Published.of("lodestar", "summary", "overall", "mean TTFT", "1.41")
    >>> [verdict_on(published, Ratio(value, None, None, 1)) for value in (1.4, 1.1, 1.9, 0.8, 0.99)]
    ['reproduced', 'smaller', 'larger', 'reversed', 'smaller']
    """
    if found is None:
        return "not tried"
    low, high, value = published.low, published.high, found.value
    if low / WITHIN <= value <= high * WITHIN:
        return "reproduced"
    if not is_ratio or low == high == 1.0:
        return "larger" if value > high else "smaller"
    printed = log(low * high)  # infinite where any gain is "better"
    if printed * log(value) < 0:
        ends = (found.low, found.high) if found.low is not None and found.high is not None else None
        sure = abs(log(value)) > log(NO_EFFECT) if ends is None else all(log(end) * log(value) > 0 for end in ends)
        return "reversed" if sure else "smaller"
    effects = [abs(log(low)), abs(log(low if high == inf else high))]
    return "larger" if abs(log(value)) > max(effects) else "smaller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedClaim:
    """A claim with what the runs gave."""

    claim: Claim
    reproduced: Ratio | None
    ours: Ratio | None

    @property
    def word(self) -> Word:
        return verdict_on(self.claim.published, self.reproduced, is_ratio=self.claim.is_ratio)

    def cells(self) -> tuple[str, ...]:
        claim = self.claim
        ours = "-" if self.ours is None else f"{shown(self.ours)} ({claim.ours_name})"
        return (claim.on, claim.figure, claim.published.text, shown(self.reproduced), ours, self.word)

    def as_json(self) -> dict[str, Any]:
        claim, published = self.claim, self.claim.published
        both = {"reproduced": self.reproduced, "ours": self.ours}
        return {
            "system": claim.system, "on": claim.on, "figure": claim.figure, "published": published.text,
            "baseline": published.baseline, "source": published.source,
            **{name: None if one is None else [one.value, one.low, one.high] for name, one in both.items()},
            "ours is": claim.ours_name, "target": claim.target, "verdict": self.word, "note": claim.note,
        }  # fmt: skip


def compared(claims: Sequence[Claim], runs: Runs) -> list[ComparedClaim]:
    return [
        ComparedClaim(claim=one, reproduced=one.reproduced and one.reproduced(runs), ours=one.ours and one.ours(runs))
        for one in claims
    ]


def counted(rows: Sequence[ComparedClaim]) -> str:
    """Return how many rows have each word."""
    return f"{len(rows)} rows: " + ", ".join(f"{sum(row.word == word for row in rows)} {word}" for word in WORDS)


def shown(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    ends = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}-{ratio.high:.2f}]"
    return f"{ratio.value:.2f}{ends}"


# -- the comparison as one HTML page, self-contained: a table per system, and below each row its source

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
    head = "".join(f"<th>{name}</th>" for name in _HEADER)
    tables = ""
    for system in dict.fromkeys(row.claim.system for row in rows):
        lines = "".join(_row(row) for row in rows if row.claim.system == system)
        tables += f"<h2>{escape(system)}</h2><table><tr>{head}</tr>{lines}</table>"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Published routing systems, simulated</title><style>{_STYLE}</style>"
        "<h1>Published routing systems, simulated</h1>"
        "<p>Each row is a published figure, the same figure of the same policy in this project's simulator, and that "
        f"of this project's policy on the same runs. A figure within {WITHIN - 1:.0%} of the published one is "
        f"reproduced; else the effect is larger, smaller or reversed. {escape(about)}</p>"
        f"<p>{counted(rows)}.</p>{tables}</html>\n"
    )


def _row(row: ComparedClaim) -> str:
    claim, published = row.claim, row.claim.published
    below = "; ".join(text for text in (published.source, published.baseline, claim.note) if text)
    beside = "" if row.ours is None else f"<br><small>{escape(claim.ours_name)} {escape(claim.target)}</small>"
    return (
        f"<tr><td>{escape(claim.figure)}<br><small>{escape(claim.on)}<br>{escape(below)}</small></td>"
        f"<td>{escape(published.text)}</td><td>{shown(row.reproduced)}</td><td>{shown(row.ours)}{beside}</td>"
        f'<td class="word" style="color:{_COLOURS[row.word]}">{row.word}</td></tr>'
    )
