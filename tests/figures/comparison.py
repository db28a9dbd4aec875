"""The README's comparison of policies: the default against common rules at four loads, as tables and as a picture.

The traffic follows the paper's window of April 6, which the simulated engine was not fitted to. A ratio pairs runs of
one seed, so its interval is that of common random numbers. `python -m tests.figures.comparison` draws the picture
and writes the README's tables, after `... record comparison`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gorgo.apps.simulate.compare import Ratio, mean_interval, ratio_of
from gorgo.config.atomic import PUBLIC, write_atomically
from tests.documents import DOCS, ROOT
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT, PUBLISHED = "gorgo-ms", "gorgo"
#: Policies in the order of the picture's legend.
POLICIES = (DEFAULT, PUBLISHED, "least-load", "simple-session-affinity", "prefix-cache", "round-robin")
#: The rules that the README compares the default with, by the words of its table.
RULES: Mapping[str, str] = {
    "round robin": "round-robin",
    "session affinity": "simple-session-affinity",
    "least load": "least-load",
}
TIME_SCALES = (3.0, 2.0, 1.25, 1.0)
#: Loads of the README's tables, with its words for them.
SHOWN: Mapping[float, str] = {2.0: "half", 1.25: "80 %"}
SEEDS = 5
COMMAND = (
    "gorgo simulate art-chat-apr6 --fleet paper --max-input 24000 --max-output 128 "
    + " ".join(f"--time-scale {scale:g}" for scale in TIME_SCALES)
    + f" --seeds {SEEDS} "
    + " ".join(f"--policy {name}" for name in POLICIES)
    + " --jobs 1 --json"
)
PICTURE = DOCS / "comparison.svg"
#: Figures of the second table, by the words of its column.
LATENCIES: Mapping[str, tuple[str, str]] = {
    "TTFT p95": ("ttft_ms", "p95"),
    "E2E p95": ("e2e_s", "p95"),
    "ITL p95": ("itl_ms", "p95"),
}

#: (time scale, policy) to the rows of its seeds, in their order.
Runs = Mapping[tuple[float, str], Sequence[Any]]


def comparison(results: Sequence[Any]) -> View:
    """Return the tables of both comparisons: TTFT against common rules, three latencies against `gorgo`."""
    runs = runs_of(results)
    return View(
        tables=[
            Table(labels=("load",), rows=against_rules(runs)),
            Table(labels=("`gorgo-ms` against `gorgo`",), rows=against_published(runs)),
        ],
        values={"seeds": float(SEEDS)},
    )


def runs_of(results: Sequence[Any]) -> Runs:
    found: dict[tuple[float, str], list[Any]] = {}
    for row in sorted(results[0], key=lambda row: row["seed"]):
        found.setdefault((row["time_scale"], row["policy"]), []).append(row)
    return found


def against_rules(runs: Runs) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Per load: by how many per cent the default's p95 TTFT is below that of each rule, as `difference` has it."""
    return {
        (name,): {
            f"against {words}": difference(_ratio(runs, scale, rule, *LATENCIES["TTFT p95"]))
            for words, rule in RULES.items()
        }
        for scale, name in SHOWN.items()
    }


def against_published(runs: Runs) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Per load: the default's latencies beside those of the published policy."""
    return {
        (f"{name} load",): {
            words: difference(_ratio(runs, scale, PUBLISHED, *path)) for words, path in LATENCIES.items()
        }
        for scale, name in SHOWN.items()
    }


def _ratio(runs: Runs, scale: float, other: str, field: str, part: str) -> Ratio:
    both = zip(runs[scale, DEFAULT], runs[scale, other], strict=True)
    ratio = ratio_of([(one[field][part], two[field][part]) for one, two in both])
    assert ratio is not None
    return ratio


def difference(ratio: Ratio) -> str:
    """Return a ratio in words, with the ends of its interval.

    Example
    -------
    >>> difference(Ratio(0.88, 0.861, 0.899, 5)), difference(Ratio(1.02, 0.99, 1.05, 5))
    ('12 % lower (10 to 14 %)', '2 % higher (1 % lower to 5 % higher)')
    """
    low, high = (0.0 if end is None else 100 * (end - 1) for end in (ratio.low, ratio.high))
    value = 100 * (ratio.value - 1)
    word = _side(value)
    if _side(low) == _side(high) == word:
        ends = sorted((abs(low), abs(high)))
        return f"{abs(value):.0f} % {word} ({ends[0]:.0f} to {ends[1]:.0f} %)"
    return f"{abs(value):.0f} % {word} ({abs(low):.0f} % {_side(low)} to {abs(high):.0f} % {_side(high)})"


def _side(percent: float) -> str:
    return "lower" if percent < 0 else "higher"


def page_part(table: Table) -> str:
    """Return a table of the view as the README has it."""
    columns = [*next(iter(table.rows.values()))]
    lines = [f"| {' | '.join((*table.labels, *columns))} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {' | '.join((*label, *map(str, cells.values())))} |" for label, cells in table.rows.items()]
    return "\n".join(lines) + "\n"


def draw(runs: Runs) -> Figure:
    """Return p95 TTFT by load, a line per policy with the interval of its mean, on a logarithmic axis."""
    from gorgo.apps.report.style import Layout, add_legend, line_styles, panels, set_load_ticks, set_log_ticks

    figure, (axis,) = panels(1, Layout(7.2, 1), height=3.7)
    styles = line_styles(POLICIES)
    for policy, style in styles.items():
        spreads = [mean_interval([row["ttft_ms"]["p95"] / 1000 for row in runs[scale, policy]]) for scale in TIME_SCALES]
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
    axis.set_xlabel("load, as a multiple of the trace's own")
    axis.set_ylabel("time to first token, p95, s")
    add_legend(figure, [style.line(policy) for policy, style in styles.items()])
    return figure


def picture() -> str:
    """Return the SVG file of the stored result; the same result gives the same bytes."""
    from gorgo.apps.report.style import svg_document

    runs = runs_of(read_stored("comparison").results)
    return svg_document(lambda: draw(runs), key="comparison")


def written(page: str, view: View) -> str:
    """Return the page with each part between `<!-- figures: comparison -->` and its end made anew, in order."""
    parts = iter(map(page_part, view.tables))
    return re.sub(
        r"(?<=<!-- figures: comparison -->\n).*?(?=<!-- /figures -->)", lambda _: next(parts), page, flags=re.DOTALL
    )


def main() -> None:
    readme = ROOT / "README.md"
    write_atomically(PICTURE, picture().encode(), mode=PUBLIC)
    page = written(readme.read_text(), comparison(read_stored("comparison").results))
    write_atomically(readme, page.encode(), mode=PUBLIC)


if __name__ == "__main__":
    main()
