"""Markup of the page: HTML that is escaped by construction, and small SVG charts made of it.

Owns `Html` with its elements, and the charts of TTFT, RTTs, terms of a cost and a weight in its range. Charts are
geometry only; colours and strokes are the style sheet's, by class. No text of clients or engines is in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape

from gorgo import formatting
from gorgo.live.telemetry.health import ProbeTime, TimeBin

# HTML that is escaped by construction.
#
# A `str` is text and is always escaped; only `Html` is inserted as it is, and only this module makes it from other
# values than constants.


class Html(str):
    """Markup."""

    __slots__ = ()


#: What can stand inside an element; `None` is nothing.
Child = str | int | None

_NOTHING = Html("")
#: Controls, marks that change the direction of the text around them, and halves of surrogate pairs.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def tag(name: str, /, *children: Child, **attributes: Child | bool) -> Html:
    """An element. Attributes may end in `_`, which is left out, and have `_` for `-`; `None` and False leave one out.

    >>> tag("p", "1 < 2 ", tag("b", "so"), class_="a", data_id='"')
    '<p class="a" data-id="&quot;">1 &lt; 2 <b>so</b></p>'
    """
    inner = "".join(map(_text, children))
    if not attributes:
        return Html(f"<{name}>{inner}</{name}>")
    return Html(f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>{inner}</{name}>")


def void(name: str, /, **attributes: Child | bool) -> Html:
    """An element that has no end tag.

    >>> void("input", type="password", required=True)
    '<input type="password" required>'
    """
    return Html(f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>")


def joined(parts: Iterable[Child]) -> Html:
    """One after another."""
    return Html("".join(map(_text, parts)))


def _text(child: Child) -> str:
    if child is None:
        return _NOTHING
    if isinstance(child, Html):
        return child
    text = str(child)
    # Most of what is shown are numbers.
    return text if text.isalnum() else _escaped(text)


def _escaped(text: str) -> str:
    return escape(text if text.isprintable() else _UNSHOWN.sub("\N{REPLACEMENT CHARACTER}", text))


@lru_cache(maxsize=2048, typed=True)
def _attribute(name: str, value: Child | bool) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{_escaped(str(value))}"'


_HEIGHT = 100.0
#: RTTs that vary by less than this ratio are drawn as a flat line.
_CALM = 0.2

Point = tuple[float, float | None]


def ttft_chart(bins: Sequence[TimeBin]) -> tuple[Html, float]:
    """Return the chart of p50 and p95, and the value at its top, ms."""
    top = nice_top(max((one.ttft_ms_p95 or 0.0 for one in bins), default=0.0))
    lines = [
        tag("path", d=_path(_points([one.ttft_ms_p95 for one in bins], 0.0, top)), class_="p95"),
        tag("path", d=_path(_points([one.ttft_ms_p50 for one in bins], 0.0, top)), class_="p50"),
    ]
    grid = [tag("path", d=f"M0 {_HEIGHT * part:g}H{len(bins)}", class_="grid") for part in (0.0, 0.5, 1.0)]
    hover = [
        tag("rect", tag("title", _bin_words(one)), x=index, y=0, width=1, height=f"{_HEIGHT:g}")
        for index, one in enumerate(bins)
        if one.n
    ]
    return _svg("chart", len(bins), [*grid, *lines, *hover], label="time to first token, p50 and p95"), top


@lru_cache(maxsize=256)
def probe_line(trips: tuple[ProbeTime, ...]) -> Html:
    """Return the chart of the last probes; a failed one is a mark at the bottom."""
    rtts_s = [rtt_s for _, rtt_s in trips if rtt_s is not None]
    if len(trips) < 2:
        return Html("")
    low, high = (min(rtts_s), max(rtts_s)) if rtts_s else (0.0, 1.0)
    slack = max(_CALM * high - (high - low), 0.0) / 2
    points = _points([rtt_s for _, rtt_s in trips], low - slack, max(high + slack, low + 1e-6))
    failed = [
        tag("path", d=f"M{index + 0.5:g} {_HEIGHT:g}V{_HEIGHT * 0.6:g}", class_="failed")
        for index, (_, rtt_s) in enumerate(trips)
        if rtt_s is None
    ]
    return _svg("trips", len(trips), [tag("title", _trip_words(trips)), tag("path", d=_path(points)), *failed])


def term_bar(values: Sequence[float], most: float) -> Html:
    """Return one candidate's positive terms side by side; `most` fills the width."""
    drawn: list[str] = []
    at = 0.0
    for term, value in enumerate(values):
        if value > 0.0 and most > 0.0:
            width = 100.0 * value / most
            drawn.append(f'<path class="t{term % 6}" d="M{at:.1f} 0h{width:.1f}v{_HEIGHT:g}h-{width:.1f}z"/>')
            at += width
    return _svg("bar", 100, [Html("".join(drawn))])


def box_line(value: float, low: float, high: float) -> Html:
    """Return the position of a weight in its range."""
    percent = 100.0 * min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 50.0
    line = tag("path", d=f"M0 {_HEIGHT / 2:g}H100")
    dot = tag("rect", x=f"{min(max(percent - 1.5, 0.0), 97.0):.1f}", y=20, width=3, height=60)
    return _svg("box", 100, [line, dot])


def nice_top(value: float) -> float:
    """Return the least round number from `value` on whose half is round too.

    >>> nice_top(0.0), nice_top(34.0), nice_top(1200.0)
    (1.0, 40.0, 2000.0)
    """
    top = 1.0
    while True:
        for step in (1.0, 2.0, 3.0, 4.0, 6.0, 8.0):
            if top * step >= value:
                return top * step
        top *= 10.0


def _points(values: Sequence[float | None], low: float, high: float) -> list[Point]:
    return [
        (index + 0.5, None if value is None else _HEIGHT * (1.0 - (value - low) / (high - low)))
        for index, value in enumerate(values)
    ]


def _path(points: Iterable[Point]) -> str:
    """Return lines between known neighbours; a single one is a short dash."""
    drawn: list[str] = []
    pen = False
    for x, y in points:
        if y is None:
            pen = False
            continue
        drawn.append(f"L{x:g} {y:.1f}" if pen else f"M{x - 0.3:.1f} {y:.1f}H{x:g}")
        pen = True
    return "".join(drawn) or "M0 0"


def _svg(kind: str, width: float, drawn: Iterable[Html], *, label: str | None = None) -> Html:
    return tag(
        "svg",
        joined(drawn),
        class_=kind,
        viewBox=f"0 0 {width:g} {_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img" if label else None,
        aria_label=label,
        aria_hidden=None if label else "true",
    )


def _bin_words(one: TimeBin) -> str:
    ended = f"{formatting.clock(one.start_s)} to {formatting.clock(one.start_s + one.length_s)}"
    return (
        f"{ended}: p50 {formatting.ms(one.ttft_ms_p50)} ms, p95 {formatting.ms(one.ttft_ms_p95)} ms, {one.n} requests"
    )


def _trip_words(trips: Sequence[ProbeTime]) -> str:
    rtts_ms = [rtt_s * 1e3 for _, rtt_s in trips if rtt_s is not None]
    span = formatting.age(trips[-1][0] - trips[0][0])
    between = f"{formatting.ms(min(rtts_ms))} to {formatting.ms(max(rtts_ms))} ms" if rtts_ms else "none answered"
    return f"{len(trips)} probes in {span}: {between}, {len(trips) - len(rtts_ms)} failed"
