"""How plots look, and how they become part of a page.

Colours are Okabe and Ito's, told apart with every common colour vision; each policy has a line style and a marker too,
so that a print in grey still says who is who. The paper of every plot is white, whatever the page around it is.

SVG is deterministic (a fixed salt for ids, no date) and self-contained: text stays text in the reader's own sans-serif,
ids are unique within the page, nothing refers outside.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)

Dashes = Literal["-"] | tuple[float, tuple[float, ...]]
SOLID: Dashes = "-"
DASHED: Dashes = (0, (5, 1.6))
DOTTED: Dashes = (0, (1.2, 1.2))
DASH_DOT: Dashes = (0, (6, 1.5, 1.2, 1.5))
LOOSE: Dashes = (0, (3, 3))

#: Wide enough for two panels, narrow enough for a page; inches.
WIDTH = 8.4
PANEL_HEIGHT = 2.7
#: Longer names are cut in plots; the table has them whole.
MAX_NAME = 44

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gorgo",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True, slots=True)
class Look:
    """One policy's colour, line and marker."""

    colour: str
    dashes: Dashes = SOLID
    marker: str = "o"
    width: float = 1.6


_YARDSTICKS = {"oracle": Look(GREY, DASHED, "x", 1.2), "floor": Look(GREY, LOOSE, "+", 1.2)}
_KNOWN = {
    "gorgo-ms": Look(VERMILLION, SOLID, "o", 2.2),
    "gorgo": Look(BLUE, SOLID, "s", 2.0),
    "least-load": Look(GREEN, DASHED, "^"),
    "least-request": Look(PURPLE, DASH_DOT, "v"),
    "prefix-cache": Look(ORANGE, DASHED, "D"),
    "simple-session-affinity": Look(SKY, DASH_DOT, "P"),
    "random": Look(BLACK, DOTTED, "X"),
    "round-robin": Look(GREEN, DOTTED, "<"),
    "power-of-two": Look(PURPLE, DASHED, ">"),
    "nearest": Look(ORANGE, DOTTED, "h"),
    "prefix-cache-and-load": Look(SKY, SOLID, "p"),
    "prefix-threshold": Look(BLUE, DASHED, "*"),
}
_MARKERS = "8dHos^vDP"
_DASHES = (LOOSE, DOTTED, DASH_DOT, DASHED, SOLID)


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look per label: the policy's own where it has one, else the next free combination."""
    known = {**_KNOWN, **_YARDSTICKS}
    unknown = [label for label in labels if label not in known]
    made = {
        label: Look(COLOURS[n % len(COLOURS)], _DASHES[n // len(COLOURS) % len(_DASHES)], _MARKERS[n % len(_MARKERS)])
        for n, label in enumerate(unknown)
    }
    return {label: known.get(label) or made[label] for label in labels}


def name(label: str) -> str:
    """A label as plots show it: cut; an underscore at its start would hide it from the legend."""
    cut = label if len(label) <= MAX_NAME else label[: MAX_NAME - 1] + "…"
    return f" {cut}" if cut.startswith("_") else cut


def panels(
    count: int, *, columns: int = 2, height: float = PANEL_HEIGHT, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def replica_looks(replicas: Sequence[str]) -> dict[str, Look]:
    """Solid lines in seven colours, then the same dashed, and so on."""
    return {
        replica: Look(COLOURS[n % len(COLOURS)], (SOLID, *_DASHES)[n // len(COLOURS) % 5])
        for n, replica in enumerate(replicas)
    }


def legend(figure: Figure, look: Mapping[str, Look]) -> None:
    """Above the panels, so that it covers no data."""
    handles = [Line2D([], [], color=one.colour, linestyle=one.dashes, linewidth=one.width) for one in look.values()]
    names = [name(label) for label in look]
    columns = 4 if max(map(len, names), default=0) < 26 else 2
    figure.legend(handles, names, loc="outside upper left", ncols=columns, handlelength=3.6, fontsize=8.5)


_TAG = re.compile(r"<[^>]*>")
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_NUMBERS = re.compile(r'(?<= )(?:d|x|y)="[^"]*"')
_DIGITS = re.compile(r"(?<=\.\d\d)\d+")
_FONT = re.compile(r"font-family: [^;\"]*;? ?")
_SIZE = re.compile(r' width="[\d.]+pt" height="[\d.]+pt"')
_OUTSIDE = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)


def svg(draw: Callable[[], Figure], *, key: str, title: str) -> str:
    """The figure as an element of a page; `key` makes its ids unique, `title` is its text for who cannot see it."""
    text = io.StringIO()
    with mpl.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts draw it, not ours
        draw().savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    body = _TAG.sub(lambda tag: _smaller(tag.group(), key), _OUTSIDE.sub("", text.getvalue()))
    start, rest = body[: body.index(">")], body[body.index(">") + 1 :]
    label = f' role="img" aria-labelledby="{key}-title"'
    return f'{_SIZE.sub("", start)}{label}><title id="{key}-title">{escape(title)}</title>{rest.strip()}'


def _smaller(tag: str, key: str) -> str:
    """A tag with ids of its own, without fonts, and with hundredths of a point: finer is not seen."""
    tag = _NUMBERS.sub(lambda numbers: _DIGITS.sub("", numbers.group()), tag)
    return _ID.sub(rf"\g<1>{key}-", _FONT.sub("", tag))
