"""The appearance of plots, and their conversion to a part of a page.

Colours are Okabe and Ito's, which differ with every common colour vision. Policies also differ in dashes and markers,
for a print in grey. Plots have a white background.

SVG is deterministic (a salt for ids, no date) and self-contained: text stays text, ids are unique within the page.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

BLACK, BLUE, VERMILLION, GREY = "#000000", "#0072B2", "#D55E00", "#767676"
COLOURS = (BLUE, VERMILLION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK)
_DASHES = ((0, ()), (0, (5, 1.6)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.2, 1.2)))
_MARKERS = "os^vDPX<>hp*d8"

PANEL_HEIGHT = 2.9
#: Longer names are cut in plots; tables have them whole.
MAX_NAME = 44
#: Of a picture for print, and of one in a document.
PRINT_DPI, PNG_DPI = 300, 80
#: Of the span of a load axis; nearer labels overlap.
MIN_TICK_DISTANCE = 0.07
#: On a shorter logarithmic axis there are too few powers of ten and their simple multiples for ticks.
NARROW_DECADES = 0.8

#: Controls but line ends, marks of direction, lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gorgo",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The width of a figure in inches, and the number of panels side by side."""

    width: float
    columns: int


#: For a page of a desktop and for paper; for a screen of 390 px.
BROAD, NARROW = Layout(8.4, 2), Layout(4.0, 1)


@dataclass(frozen=True, slots=True)
class LineStyle:
    """The colour, dashes and marker of one policy; a reference is drawn behind the others."""

    colour: str
    dashes: tuple[float, tuple[float, ...]]
    marker: str
    is_reference: bool = False

    def line(self, label: str) -> Line2D:
        """Return the policy's entry in a legend."""
        return Line2D([], [], color=self.colour, linestyle=self.dashes, marker=self.marker, label=short_name(label))


def line_styles(labels: Sequence[str], references: Sequence[str] = ()) -> dict[str, LineStyle]:
    """Return a different style for each label; references are grey."""
    policies = [label for label in labels if label not in references]
    styles = {label: _style(COLOURS[n % len(COLOURS)], n) for n, label in enumerate(policies)}
    grey = {label: _style(GREY, 1 + n, is_reference=True) for n, label in enumerate(references)}
    return {label: styles.get(label) or grey[label] for label in labels}


def _style(colour: str, n: int, *, is_reference: bool = False) -> LineStyle:
    return LineStyle(colour, _DASHES[n % len(_DASHES)], _MARKERS[n % len(_MARKERS)], is_reference)


def printable_text(text: str) -> str:
    """Return a text with escapes in the place of what no page or drawing may contain.

    >>> printable_text("a\\x1b\\u202eb")
    'a\\\\x1b\\\\u202eb'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def short_name(label: str, longest: int = MAX_NAME) -> str:
    """Return a label for a plot: cut, and without an underscore at its start, which hides it from the legend."""
    label = printable_text(label)
    cut = label if len(label) <= longest else label[: longest - 1] + "…"
    return f" {cut}" if cut.startswith("_") else cut


def panels(
    count: int, layout: Layout = BROAD, *, height: float = PANEL_HEIGHT, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels."""
    columns = min(layout.columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(layout.width, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def add_legend(figure: Figure, lines: Sequence[Line2D]) -> None:
    """Add a legend above the panels, where it covers no data."""
    columns = 4 if max((len(str(line.get_label())) for line in lines), default=0) < 26 else 2
    if figure.get_figwidth() < BROAD.width:
        columns //= 2
    figure.legend(handles=lines, loc="outside upper left", ncols=columns, handlelength=3.6, fontsize=8.5)


def set_load_ticks(panel: Axes, loads: Sequence[float]) -> None:
    """Put a tick at each load, except where two labels would overlap or be equal."""
    ordered = sorted(set(loads))
    least = (ordered[-1] - ordered[0]) * MIN_TICK_DISTANCE
    ticks = ordered[:1]
    for load in ordered[1:]:
        if load - ticks[-1] >= least and f"{load:.3g}" != f"{ticks[-1]:.3g}":
            ticks.append(load)
    panel.set_xticks(ticks, [f"{load:.3g}" for load in ticks])


def set_log_ticks(panel: Axes, which: str) -> None:
    """Make an axis logarithmic, with ticks such as 200, 500, 1,000 instead of powers."""
    (panel.set_xscale if which == "x" else panel.set_yscale)("log")
    axis = panel.xaxis if which == "x" else panel.yaxis
    low, high = axis.get_view_interval()
    decades = log10(high / low) if low > 0 else 1.0
    if decades < NARROW_DECADES:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    else:
        steps = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))  # whole: equal labels are equal ticks
    axis.set_minor_locator(NullLocator())


#: The document around the drawing, and ids that nothing refers to: they repeat from plot to plot.
_SURROUNDINGS = re.compile(r'^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>|(?<=<g) id="[^"]*"', re.DOTALL)


def plot_file(draw: Callable[[], Figure], form: str, *, key: str = "gorgo", dpi: float = PRINT_DPI) -> bytes:
    """Return the figure as an SVG, PNG or PDF file; the same figure and `key` give the same bytes."""
    file = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with mpl.rc_context(RC | {"svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser's fonts have it
        draw().savefig(file, format=form, dpi="figure" if form == "svg" else dpi, metadata=metadata)
    return file.getvalue()


def svg_document(draw: Callable[[], Figure], *, key: str) -> str:
    """Return the figure as the text of an SVG file."""
    return plot_file(draw, "svg", key=key).decode()


def png_document(draw: Callable[[], Figure]) -> bytes:
    """Return the figure as a PNG file of 32 colours, for a document."""
    file = io.BytesIO()
    drawn = Image.open(io.BytesIO(plot_file(draw, "png", dpi=PNG_DPI)))
    drawn.convert("RGB").quantize(32).save(file, format="png", optimize=True)
    return file.getvalue()


def svg_element(document: str, *, key: str, title: str) -> str:
    """Return an SVG file as an element of a page; a screen reader reads `title`."""
    body = _SURROUNDINGS.sub("", document)
    label = f'<svg role="img" aria-labelledby="{key}-title" '
    return body.replace("<svg ", label, 1).replace(">", f'><title id="{key}-title">{escape(title)}</title>', 1)
