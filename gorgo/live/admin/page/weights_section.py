"""Weights in force, freeze, and the history of versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gorgo import formatting
from gorgo.live.admin.page.charts import box_line
from gorgo.live.admin.page.markup import Html, joined, tag
from gorgo.live.admin.page.snapshot import Snapshot
from gorgo.live.control.transactions import WeightsChange

#: Older ones are in a closed `details`.
VERSIONS_SHOWN = 6


class WeightsSection:
    """Weights in force and versions, newest first. Rendered again only after a change."""

    def __init__(self) -> None:
        self._written: tuple[object, Html] | None = None

    def __call__(self, status: Snapshot) -> Iterator[Html]:
        key = (status.policy, status.version, status.frozen, status.durable, *status.differences, *status.history[-1:])
        if self._written is None or self._written[0] != key:
            html = joined([_freeze_line(status), _in_force(status), _differences(status), _history(status.history)])
            self._written = key, html
        yield self._written[1]


def _freeze_line(status: Snapshot) -> Html:
    what = f"{status.policy}, version {status.version}"
    if status.frozen is None:
        free = tag("span", "not frozen", class_="chip plain")
        return tag("p", tag("b", what), " ", free, " operators and the tuner may change them")
    frozen = status.frozen
    by = "" if frozen.by is None else f" by {frozen.by}"
    reason = "" if frozen.reason is None else f": {frozen.reason}"
    chip = tag("span", "frozen", class_="chip frozen")
    lasting = "" if status.durable else " (no state file: the freeze ends with this process)"
    return tag("p", tag("b", what), " ", chip, f" since {formatting.moment(frozen.since)}{by}{reason}{lasting}")


def _in_force(status: Snapshot) -> Html | None:
    if not status.weights:
        return tag("p", f"{status.policy} has no weights.", class_="quiet")
    cells = []
    for name, value in status.weights.items():
        low, high = status.bounds.get(name, (value, value))
        box = tag("small", f"{low:g} … {high:g}")
        cells.append(tag("div", tag("span", name), tag("b", formatting.number(value)), box_line(value, low, high), box))
    return tag("div", *cells, class_="weights")


def _differences(status: Snapshot) -> Html | None:
    """What was set at run time; edits that wait are alerts."""
    lines = [tag("li", str(difference)) for difference in status.differences if not difference.waits]
    return tag("ul", *lines, class_="quiet") if lines else None


def _history(history: Sequence[WeightsChange]) -> Html:
    rows = [
        _version(change, before)
        for change, before in zip(reversed(history), [*reversed(history[:-1]), None], strict=True)
    ]
    shown, older = rows[:VERSIONS_SHOWN], rows[VERSIONS_SHOWN:]
    parts = [_table(shown)]
    if older:
        parts.append(
            tag("details", tag("summary", f"{len(older)} older versions"), _table(older), id="older", class_="older")
        )
    return joined(parts)


def _table(rows: Sequence[Html]) -> Html:
    heads = [
        tag("th", name, scope="col") for name in ("version", "since, UTC", "policy", "weights", "set by", "reason")
    ]
    return tag(
        "div", tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="versions"), class_="wide"
    )


def _version(change: WeightsChange, before: WeightsChange | None) -> Html:
    by = change.source if change.by is None else f"{change.by} ({change.source})"
    same = before is not None and before.policy == change.policy
    return tag(
        "tr",
        tag("td", change.version),
        tag("td", formatting.moment(change.at)),
        tag("td", change.policy),
        tag("td", _values(change.weights, before.weights if same and before is not None else change.weights)),
        tag("td", by),
        tag("td", change.reason, class_="reason"),
    )


def _values(weights: Mapping[str, float], before: Mapping[str, float]) -> Html:
    """What this version changed stands out."""
    shown = []
    for name, value in weights.items():
        text = f"{name} {formatting.number(value)}"
        shown.append(text if before.get(name) == value else tag("b", text))
    return joined(part for at, text in enumerate(shown) for part in ((", " if at else None), text))
