"""The top of the page: alerts and statistics of recent requests."""

from __future__ import annotations

from collections.abc import Iterator

from gorgo import formatting
from gorgo.live.admin.page.charts import ttft_chart
from gorgo.live.admin.page.markup import Html, joined, tag
from gorgo.live.admin.page.snapshot import Snapshot


def alerts_section(status: Snapshot) -> Iterator[Html]:
    """Yield the alerts."""
    lines = [tag("li", alert.text, class_=alert.level) for alert in status.alerts]
    many = f"({len(lines)}) " if lines else ""
    yield tag("ul", *(lines or [_all_ready(status)]), data_title=f"{many}GORGO {status.region}")


def stats_section(status: Snapshot) -> Iterator[Html]:
    """Yield the tiles and the window that they cover."""
    stats = status.stats
    failed = f"{stats.failed} failed" if stats.failed else "none failed"
    rate = formatting.UNKNOWN if status.per_s is None else f"{status.per_s:.1f}"
    estimated = f"estimated {formatting.share(stats.estimated_share)}"
    tiles = (
        ("TTFT, median", formatting.ms(stats.ttft_ms_p50), "ms", None),
        ("TTFT, p95", formatting.ms(stats.ttft_ms_p95), "ms", None),
        ("requests", rate, "/s", failed),
        ("in flight", formatting.count(status.in_flight), "", f"{status.queued} queued"),
        ("prompt in cache", formatting.share(stats.cached_share), "", estimated),
        ("prediction error", formatting.ms(stats.error_ms_p50), "ms", "median"),
    )
    requests = "request" if stats.n == 1 else "requests"
    covered = f"{stats.n:,} {requests} that finished in the last {formatting.age(status.span_s)}"
    up = f"up for {formatting.age(status.up_s)}"
    yield joined(
        [tag("div", *(_tile(*one) for one in tiles), class_="tiles"), tag("p", f"{covered}; {up}.", class_="quiet")]
    )


def chart_section(status: Snapshot) -> Iterator[Html]:
    """Yield the chart of TTFT. Its labels are HTML, so they do not stretch with it."""
    chart, top = ttft_chart(status.ttft_series)
    scale = tag(
        "div",
        tag("span", f"{formatting.ms(top)} ms"),
        tag("span", formatting.ms(top / 2)),
        tag("span", "0"),
        class_="scale",
    )
    axis = tag(
        "div",
        tag("span", f"{formatting.age(sum(one.length_s for one in status.ttft_series))} ago"),
        tag("span", "now"),
        class_="axis",
    )
    legend = joined([tag("i", class_="p50"), "median ", tag("i", class_="p95"), "p95"])
    caption = tag("figcaption", tag("b", "Time to first token"), tag("span", legend, class_="legend"))
    yield tag("figure", caption, tag("div", scale, chart, class_="plot"), axis)


def _all_ready(status: Snapshot) -> Html:
    n = sum(len(rows) for rows in status.regions.values())
    return tag("li", "The one replica is ready" if n == 1 else f"All {n} replicas are ready", class_="good")


def _tile(name: str, value: str, unit: str, note: str | None) -> Html:
    shown = tag("b", value, tag("small", unit) if unit else None)
    return tag("div", tag("span", name), shown, tag("small", note) if note else None, class_="tile")
