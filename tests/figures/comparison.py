"""The first comparisons of the README and of the results: the default against common rules at four loads, as a table
and as a picture, and against the published policy on more than the fleet can serve.

The traffic follows the paper's window of April 6, which the simulated engine was not fitted to. A ratio pairs runs of
one seed, so its interval is that of common random numbers. `python -m tests.figures.readme` draws the picture and
writes the tables, after `... record comparison burst`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gorgo.lab.simulate.compare import Ratio, mean_interval, ratio_of, ratio_of_units
from tests.documents import DOCS
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT, PUBLISHED = "gorgo-ms", "gorgo"
#: Policies in the order of the picture's legend.
POLICIES = (DEFAULT, PUBLISHED, "least-load", "simple-session-affinity", "prefix-cache", "round-robin")
#: The rules that the default is compared with, by the words of the README.
RULES: Mapping[str, str] = {
    "round robin": "round-robin",
    "session affinity": "simple-session-affinity",
    "least load": "least-load",
}
TIME_SCALES = (3.0, 2.0, 1.25, 1.0)
SEEDS, BURST_SEEDS = 5, 10
COMMANDS = (
    "gorgo simulate art-chat-apr6 --fleet paper --max-input 24000 --max-output 128 "
    + " ".join(f"--time-scale {scale:g}" for scale in TIME_SCALES)
    + f" --seeds {SEEDS} "
    + " ".join(f"--policy {name}" for name in POLICIES)
    + " --jobs 1 --json",
)
_BURST = f"gorgo simulate chat-small --seeds {BURST_SEEDS} --policy {DEFAULT} --policy {PUBLISHED} --jobs 1"
#: More than the fleet of regions.yaml can serve: the quick start's trace at its own load, without the queue and with.
BURST_COMMANDS = (f"{_BURST} --json", f"{_BURST} --queue on --json")
#: The same comparison over six windows behind the first two minutes, without the queue of the proxy and with it.
WINDOWS_COMMANDS = tuple(
    "gorgo simulate art-chat-apr6 --fleet paper --max-input 24000 --max-output 128 --time-scale 2 --time-scale 1 "
    f"--seeds {SEEDS} --policy gorgo-ms --policy gorgo --policy least-load --policy simple-session-affinity "
    f"--policy round-robin --baseline none --warm 120 --windows 6 --queue {queue} --jobs 1 --json"
    for queue in ("off", "on")
)
#: The interval of session affinity at full load is far wider than the picture.
_MAX_S = 12.0
PICTURE = DOCS / "comparison.svg"
HEADER = ("On what", "Against what", "How much (95 % interval)", "Limit")
BURST_HEADER = ("Queue of the proxy", "`gorgo-ms` against `gorgo`, chats beyond capacity (95 % interval)")
#: Field and quantile of a result row, and the words for less and for more of it.
Latency = tuple[str, str, str, str, str]
FIRST_TOKEN: Latency = ("ttft_ms", "p95", "first token", "sooner", "later")
WHOLE_ANSWER: Latency = ("e2e_s", "p95", "whole answer", "sooner", "later")
GAP: Latency = ("itl_ms", "p95", "gap between tokens", "shorter", "longer")

#: (time scale, policy) to the rows of its seeds, in their order.
Runs = Mapping[tuple[float, str], Sequence[Any]]


def comparison(results: Sequence[Any]) -> View:
    """Return the table of results: two loads against common rules, and one against the published policy."""
    (windows,) = (runs_of(rows) for rows in results)
    lines = [
        ("Conversations, half load", "common rules", _sooner(windows, 2.0), "five seeds"),
        ("Conversations, 80 % load", "common rules", _sooner(windows, 1.25), "five seeds"),
        ("Conversations, full load", f"`{PUBLISHED}`", _three(windows), "one sure gain, one sure loss"),
    ]
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (line[0],): dict(zip(HEADER[1:], line[1:], strict=True)) for line in lines
    }
    return View(tables=[Table(labels=HEADER[:1], rows=rows)])


def burst(results: Sequence[Any]) -> View:
    """Return the table of an overload: the default against the published policy, by which of them queues.

    A second table has the README's row: the queue as `gorgo serve` has it.
    """
    without, queued = (runs_of(rows) for rows in results)
    served = {(1.0, DEFAULT): queued[1.0, DEFAULT], (1.0, PUBLISHED): without[1.0, PUBLISHED]}
    lines = {"none": without, "under both": queued, f"under `{DEFAULT}` alone, as `gorgo serve`": served}
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (words,): {BURST_HEADER[1]: _three(runs)} for words, runs in lines.items()
    }
    as_served = ("Chats beyond capacity, as `gorgo serve`", f"`{PUBLISHED}`", _three(served), "two sure losses")
    row: dict[tuple[str, ...], dict[str, Cell]] = {as_served[:1]: dict(zip(HEADER[1:], as_served[1:], strict=True))}
    return View(tables=[Table(labels=BURST_HEADER[:1], rows=rows), Table(labels=HEADER[:1], rows=row)])


def by_window(results: Sequence[Any]) -> View:
    """Return the ratios of the default to each other policy over windows, by load and by whether the proxy queues."""
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values: dict[str, float] = {}
    for queue, found in zip(("off", "on"), results, strict=True):
        runs = runs_of(found)
        for (scale, other), others in runs.items():
            if other == DEFAULT:
                continue
            cells = rows.setdefault((f"{1 / scale:g}", f"`{other}`"), {})
            for name, (field, part, *_) in (("p95 TTFT", FIRST_TOKEN), ("p95 E2E", WHOLE_ANSWER)):
                both = zip(runs[scale, DEFAULT], others, strict=True)
                ratio = ratio_of_units((one["window"], one[field][part], two[field][part]) for one, two in both)
                assert ratio is not None
                cells[f"{name}, queue {queue}"] = [round(end or 0.0, 3) for end in (ratio.value, ratio.low, ratio.high)]
            values[f"windows, {queue}"] = len({one["window"] for one in others})
    return View(tables=[Table(labels=("load", "over"), rows=rows)], values={**values, "warm, s": 120, "seeds": SEEDS})


def runs_of(rows: Sequence[Any]) -> Runs:
    found: dict[tuple[float, str], list[Any]] = {}
    for row in sorted(rows, key=lambda row: (row["seed"], row.get("window") or 0)):
        found.setdefault((row["time_scale"], row["policy"]), []).append(row)
    return found


def _sooner(runs: Runs, scale: float) -> str:
    """Return a line per rule: how much sooner the first token is under the default."""
    return "<br>".join(
        f"{words}: {difference(_ratio(runs, scale, rule, FIRST_TOKEN), FIRST_TOKEN)}" for words, rule in RULES.items()
    )


def _three(runs: Runs) -> str:
    """Return a line per latency against the published policy, at full load."""
    latencies = (FIRST_TOKEN, WHOLE_ANSWER, GAP)
    return "<br>".join(f"{one[2]}: {difference(_ratio(runs, 1.0, PUBLISHED, one), one)}" for one in latencies)


def _ratio(runs: Runs, scale: float, other: str, latency: Latency) -> Ratio:
    """Return the default's figure over the other policy's, paired by seed."""
    field, part, *_ = latency
    both = zip(runs[scale, DEFAULT], runs[scale, other], strict=True)
    ratio = ratio_of([(one[field][part], two[field][part]) for one, two in both])
    assert ratio is not None
    return ratio


def difference(ratio: Ratio, latency: Latency = FIRST_TOKEN) -> str:
    """Return a ratio in words, with the ends of its interval.

    Example
    -------
    >>> difference(Ratio(0.88, 0.861, 0.899, 5))
    '12 % sooner (10 to 14 %)'
    >>> difference(Ratio(1.02, 0.99, 1.05, 5), GAP)
    '2 % longer (1 % shorter to 5 % longer)'
    """
    *_, less, more = latency
    value, low, high = (100 * ((ratio.value if end is None else end) - 1) for end in (None, ratio.low, ratio.high))

    def side(percent: float) -> str:
        return less if percent < 0 else more

    if side(low) == side(high):
        ends = sorted((abs(low), abs(high)))
        return f"{abs(value):.0f} % {side(value)} ({ends[0]:.0f} to {ends[1]:.0f} %)"
    return f"{abs(value):.0f} % {side(value)} ({abs(low):.0f} % {side(low)} to {abs(high):.0f} % {side(high)})"


def draw(runs: Runs) -> Figure:
    """Return p95 TTFT by load, a line per policy with the interval of its mean, on a logarithmic axis."""
    from gorgo.lab.report.style import Layout, add_legend, line_styles, panels, set_load_ticks, set_log_ticks

    figure, (axis,) = panels(1, Layout(6.4, 1), height=3.4)
    styles = line_styles(POLICIES)
    for policy, style in styles.items():
        by_load = [[row["ttft_ms"]["p95"] / 1000 for row in runs[scale, policy]] for scale in TIME_SCALES]
        spreads = [mean_interval(seconds) for seconds in by_load]
        loads = [1 / scale for scale in TIME_SCALES]
        axis.plot(
            loads, [spread[0] for spread in spreads], color=style.colour, linestyle=style.dashes, marker=style.marker,
            markersize=4.5, linewidth=2.6 if policy == DEFAULT else 1.5, zorder=3 if policy == DEFAULT else 2,
        )  # fmt: skip
        axis.fill_between(
            loads, [spread[1] for spread in spreads], [spread[2] for spread in spreads], color=style.colour, alpha=0.12,
            linewidth=0,
        )  # fmt: skip
    set_load_ticks(axis, [1 / scale for scale in TIME_SCALES])
    set_log_ticks(axis, "y")
    axis.set_ylim(top=_MAX_S)
    axis.set_xlabel("load (1: as many requests as in the traffic followed)")
    axis.set_ylabel("time to first token, p95, s")
    add_legend(figure, [style.line(policy) for policy, style in styles.items()])
    return figure


def picture() -> str:
    """Return the SVG file of the stored result; the same result gives the same bytes."""
    from gorgo.lab.report.style import svg_document

    runs = runs_of(read_stored("comparison").results[0])
    return svg_document(lambda: draw(runs), key="comparison")
